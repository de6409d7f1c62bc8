// A format pairs a key codec with a value codec; its operations are one table of kernels, filled at compile time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <turboquant/codec/codec.hpp>
#include <turboquant/codec/polar_quant.hpp>
#include <turboquant/codec/scalar_quant.hpp>
#include <turboquant/codec/trellis_quant.hpp>
#include <turboquant/core/random.hpp>
#include <turboquant/kernels/dispatch.hpp>
#include <turboquant/layout/page.hpp>

namespace turboquant {

/// How one layer's keys and values are coded, chosen at compile time: Format<PolarQuant<4>, ScalarQuant<4>>.
/// Keys are stored with the unbiased scale, so that logits have no bias; values with least squares.
template <KeyCodec Key, ValueCodec Value>
struct Format {
  using key_codec = Key;      ///< of the keys
  using value_codec = Value;  ///< of the values
  /// Frozen number in files.
  static constexpr std::uint32_t id = std::uint32_t{Key::id} << 16 | Value::id;
};

/// The recommended pair at each width: the least error at 2 and 3 bits; at 4 and 8 bits plain levels, which are small
/// enough in error there and the fastest to read. docs/accuracy.md has the measurements.
/// @{
using TQ2 = Format<TrellisQuant<2>, TrellisQuant<2>>;
using TQ3 = Format<TrellisQuant<3>, TrellisQuant<3>>;
using TQ4 = Format<PolarQuant<4>, PolarQuant<4>>;
using TQ8 = Format<PolarQuant<8>, PolarQuant<8>>;
/// @}

namespace detail {

using kernels::CodedPart;
using kernels::QueryBlock;
using kernels::RotationView;
using kernels::SoftmaxState;
using kernels::WeightSums;

// Whether a code means something only together with codes before it, which must then stay: a trellis.
template <class C>
inline constexpr bool kHasMemory = requires {
  decltype(C::codes())::states;
};

// A hash of the numbers that give the codes of C their meaning, for files.
template <class C>
constexpr std::uint64_t codebook_hash(std::uint64_t hash) {
  const auto add = [&hash](const std::int8_t* table, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) hash = mix_bits(hash ^ static_cast<std::uint8_t>(table[i]));
  };
  hash = mix_bits(hash ^ C::id);
  if constexpr (kHasMemory<C>) {
    add(C::codes().table, 24);
  } else if constexpr (C::bits < 8) {
    add(C::codes().levels, std::size_t{1} << C::bits);
  }
  return hash;
}

// The kernels of one format on one ISA, with the signatures of kernels/portable.hpp. The container is written once,
// against this table; one indirect call covers a page or a tile.
struct Operations {
  std::uint32_t format_id;
  unsigned key_bits, value_bits;
  bool value_zero_points;
  bool key_has_memory, value_has_memory;
  std::uint64_t codebook;
  unsigned query_planes;
  bool (*by_token)(Side);                                               // as the codecs' by_token and parts
  std::size_t (*parts)(Side, std::size_t);                              // side, page tokens
  std::size_t (*encode_scratch_bytes)(Side, std::size_t, std::size_t);  // side, page tokens, dim

  void (*narrow_row)(const void*, std::size_t, bfloat16*);
  void (*rotate)(const RotationView&, const float*, float*);
  void (*rotate_back)(const RotationView&, const float*, float*);
  bfloat16 (*center_rows)(float*, std::size_t, std::size_t, unsigned, std::uint8_t*);
  void (*subtract_center)(float*, std::size_t, const CodedPart&);
  void (*encode_parts)(Side, const float*, std::size_t, std::size_t, std::size_t, const CodedTarget&, std::uint8_t*);
  void (*decode_row)(Side, const CodedPart&, std::size_t, float*);
  void (*prepare_queries)(const RotationView&, QueryBlock&);
  void (*score)(const CodedPart&, std::size_t, std::size_t, const QueryBlock&, std::size_t, std::size_t, const float*,
                float*, std::size_t);
  void (*score_pages)(std::span<const CodedPart>, const QueryBlock&, const float*, float*, std::size_t);
  void (*score_raw)(const bfloat16*, std::size_t, const QueryBlock&, std::size_t, std::size_t, const float*, float*,
                    std::size_t);
  void (*soft_cap)(float*, std::size_t, std::size_t, float);
  float (*softmax_step)(float*, std::size_t, std::size_t, std::size_t, std::size_t, SoftmaxState&);
  void (*weigh)(std::span<const CodedPart>, const float*, std::size_t, std::size_t, std::int16_t*, WeightSums*,
                std::size_t);
  void (*soften_rows)(std::span<const CodedPart>, std::size_t, std::size_t, std::size_t, float*, std::size_t,
                      SoftmaxState*, std::int16_t*, WeightSums*, float*, std::size_t);
  void (*accumulate)(std::span<const CodedPart>, std::size_t, std::size_t, std::size_t, const std::int16_t*,
                     std::size_t, const WeightSums*, std::size_t, float*, std::size_t);
  void (*accumulate_raw)(const bfloat16*, std::size_t, std::size_t, std::size_t, const float*, std::size_t, float*,
                         std::size_t);
  void (*combine)(float*, float, const float*, float, std::size_t);
  float (*exp_negative)(float);
};

template <class F, class K>
inline constexpr Operations kOperations = {
    .format_id = F::id,
    .key_bits = F::key_codec::bits,
    .value_bits = F::value_codec::bits,
    .value_zero_points = F::value_codec::zero_points,
    .key_has_memory = kHasMemory<typename F::key_codec>,
    .value_has_memory = kHasMemory<typename F::value_codec>,
    .codebook = codebook_hash<typename F::value_codec>(codebook_hash<typename F::key_codec>(0)),
    .query_planes = F::key_codec::query_planes,
    .by_token =
        [](Side side) { return side == Side::key ? F::key_codec::by_token(side) : F::value_codec::by_token(side); },
    .parts =
        [](Side side, std::size_t page_tokens) {
          return side == Side::key ? F::key_codec::parts(side, page_tokens) : F::value_codec::parts(side, page_tokens);
        },
    .encode_scratch_bytes =
        [](Side side, std::size_t page_tokens, std::size_t dim) {
          return side == Side::key ? F::key_codec::scratch_bytes(page_tokens, dim)
                                   : F::value_codec::scratch_bytes(page_tokens, dim);
        },
    .narrow_row = &K::narrow_row,
    .rotate = &K::rotate,
    .rotate_back = &K::rotate_back,
    .center_rows = &K::center_rows,
    .subtract_center = &K::subtract_center,
    .encode_parts =
        [](Side side, const float* rows, std::size_t count, std::size_t begin, std::size_t end,
           const CodedTarget& target, std::uint8_t* scratch) {
          if (side == Side::key) {
            F::key_codec::template encode_parts<K>(side, rows, count, begin, end, {ScaleRule::unbiased, true}, target,
                                                   scratch);
          } else {
            F::value_codec::template encode_parts<K>(side, rows, count, begin, end, {ScaleRule::least_squares, true},
                                                     target, scratch);
          }
        },
    .decode_row =
        [](Side side, const CodedPart& part, std::size_t token, float* out) {
          if (side == Side::key) {
            K::decode_row(side, part, F::key_codec::codes(), token, out);
          } else {
            K::decode_row(side, part, F::value_codec::codes(), token, out);
          }
        },
    .prepare_queries = &K::prepare_queries,
    .score =
        [](const CodedPart& part, std::size_t tile_begin, std::size_t tile_end, const QueryBlock& block,
           std::size_t row_begin, std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
          K::score(part, F::key_codec::codes(), tile_begin, tile_end, block, row_begin, row_end, factor, logits,
                   stride);
        },
    .score_pages =
        [](std::span<const CodedPart> parts, const QueryBlock& block, const float* factor, float* logits,
           std::size_t stride) { K::score_pages(parts, F::key_codec::codes(), block, factor, logits, stride); },
    .score_raw = &K::score_raw,
    .soft_cap = &K::soft_cap,
    .softmax_step = &K::softmax_step,
    .weigh = &K::weigh,
    .soften_rows = &K::soften_rows,
    .accumulate =
        [](std::span<const CodedPart> parts, std::size_t begin, std::size_t end, std::size_t rows,
           const std::int16_t* weights, std::size_t weight_stride, const WeightSums* sums, std::size_t sum_stride,
           float* out, std::size_t out_stride) {
          K::accumulate(parts, F::value_codec::codes(), begin, end, rows, weights, weight_stride, sums, sum_stride, out,
                        out_stride);
        },
    .accumulate_raw = &K::accumulate_raw,
    .combine = &K::combine,
    .exp_negative = &K::exp_negative,
};

// The kernels of a format for an ISA; portable ones where that is not supported. A class with a function that is not
// inline, so that a program can compile kernels in one unit: `extern template struct OperationsOf<TQ4>` in the others,
// `template struct OperationsOf<TQ4>` there (docs/engines.md).
template <class F>
struct OperationsOf {
  static const Operations* on(Isa isa) noexcept;
};

template <class F>
const Operations* OperationsOf<F>::on(Isa isa) noexcept {
#if defined(TURBOQUANT_HAS_AVX2)
  if constexpr (is_built(Isa::avx2)) {
    if (isa == Isa::avx2 && is_supported(isa)) return &kOperations<F, kernels::Avx2>;
  }
#endif
#if defined(TURBOQUANT_HAS_AVX512)
  if constexpr (is_built(Isa::avx512)) {
    if (isa == Isa::avx512 && is_supported(isa)) return &kOperations<F, kernels::Avx512>;
  }
#endif
#if defined(TURBOQUANT_HAS_NEON)
  if constexpr (is_built(Isa::neon)) {
    if (isa == Isa::neon && is_supported(isa)) return &kOperations<F, kernels::Neon>;
  }
#endif
  static_cast<void>(isa);
  return &kOperations<F, kernels::Portable>;
}

}  // namespace detail
}  // namespace turboquant
