// Kernels for x86 with AVX2, for programs built with any flags or none: the functions of this file carry their target.
#pragma once

#include <turboquant/kernels/portable.hpp>

#if defined(__x86_64__) && defined(__GNUC__)
#define TURBOQUANT_HAS_AVX2 1

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

// The region adds AVX2 to what the translation unit may use anyway, and no fused multiply-add: built without flags,
// every float product is rounded, as in the portable kernels. (Taking AVX-512 away from a unit that has it is no
// choice: g++ then refuses to inline its own intrinsics.) Nothing but this library may be defined in here.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

namespace turboquant::kernels {

// Unpacks half a fragment, 8 of its 16 lanes, to one register of 32 signed levels per slot: byte 4 lane + b is depth
// 4 slot + b.
template <class Codes>
struct Avx2Reader;

template <unsigned B>
struct Avx2Reader<LevelCodes<B>> {
  __m256i table;

  explicit Avx2Reader(const LevelCodes<B>& codes) {
    alignas(16) std::int8_t levels[16] = {};
    if constexpr (B < 8) std::memcpy(levels, codes.levels, std::size_t{1} << B);
    table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(levels)));
  }

  static __m256i load(const std::uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

  // 32 bits to the bytes 0 or `value`.
  static __m256i spread(const std::uint8_t* mask, char value) {
    std::int32_t bits = 0;
    std::memcpy(&bits, mask, sizeof bits);
    const __m256i bytes =
        _mm256_shuffle_epi8(_mm256_set1_epi32(bits), _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2,
                                                                      2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i own = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own), _mm256_set1_epi8(value));
  }

  void read(const std::uint8_t* fragment, const std::uint8_t*, std::size_t half, __m256i (&levels)[4]) const {
    if constexpr (B == 8) {
      for (std::size_t s = 0; s < 4; ++s) levels[s] = load(fragment + 64 * s + 32 * half);
    } else if constexpr (B == 4) {
      const __m256i low = _mm256_set1_epi8(15);
      for (std::size_t word = 0; word < 2; ++word) {
        const __m256i both = load(fragment + 64 * word + 32 * half);
        levels[2 * word] = _mm256_shuffle_epi8(table, _mm256_and_si256(both, low));
        levels[2 * word + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
      }
    } else if constexpr (B == 1) {
      for (std::size_t s = 0; s < 4; ++s) {
        levels[s] = _mm256_shuffle_epi8(table, spread(fragment + 8 * s + 4 * half, 1));
      }
    } else {
      const __m256i all = load(fragment + 32 * half), low = _mm256_set1_epi8(3);
      __m256i fields[4] = {all, _mm256_srli_epi16(all, 2), _mm256_srli_epi16(all, 4), _mm256_srli_epi16(all, 6)};
      for (std::size_t s = 0; s < 4; ++s) {
        __m256i code = _mm256_and_si256(fields[s], low);
        if constexpr (B == 3) code = _mm256_or_si256(code, spread(fragment + 64 + 8 * s + 4 * half, 4));
        levels[s] = _mm256_shuffle_epi8(table, code);
      }
    }
  }
};

template <unsigned B>
struct Avx2Reader<TrellisCodes<B>> {
  __m256i first, second;  // A, and B twice

  explicit Avx2Reader(const TrellisCodes<B>& codes) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.table));
    const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes.table + 16));
    first = _mm256_broadcastsi128_si256(low);
    second = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(high, high));
  }

  static __m128i load8(const std::uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  static __m256i join(__m128i low, __m128i high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(low, high)), _mm_unpackhi_epi16(low, high),
                                   1);
  }

  // Window `i` of `bits`, 8 bits that end (7 - i) B above the last one, moved to byte i % 4.
  template <int kIndex>
  static __m256i window(__m256i bits) {
    constexpr int kByte = kIndex % 4 * 8, kShift = (7 - kIndex) * static_cast<int>(B) - kByte;
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffu << kByte));
    if constexpr (kShift >= 0)
      return _mm256_and_si256(_mm256_srli_epi32(bits, kShift), mask);
    else
      return _mm256_and_si256(_mm256_slli_epi32(bits, -kShift), mask);
  }
  template <int kSlot>
  static __m256i windows(__m256i bits) {
    return _mm256_or_si256(_mm256_or_si256(window<4 * kSlot>(bits), window<4 * kSlot + 1>(bits)),
                           _mm256_or_si256(window<4 * kSlot + 2>(bits), window<4 * kSlot + 3>(bits)));
  }

  __m256i level(__m256i w) const {
    const __m256i a = _mm256_shuffle_epi8(first, _mm256_and_si256(w, _mm256_set1_epi8(15)));
    const __m256i b = _mm256_shuffle_epi8(second, _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(7)));
    return _mm256_sign_epi8(_mm256_add_epi8(a, b), _mm256_or_si256(w, _mm256_set1_epi8(1)));
  }

  void read(const std::uint8_t* fragment, const std::uint8_t* history, std::size_t half, __m256i (&levels)[4]) const {
    for (std::size_t depth = 0; depth < 2; ++depth) {
      const std::uint8_t* planes = fragment + depth * B * 16 + 8 * half;
      const __m128i before = load8(depth == 0 ? history + 8 * half : planes - 16);
      if constexpr (B == 4) {
        // 40 bits per lane: the windows at even places are the bytes of the planes moved on by four bits.
        const __m256i odd = join(_mm_unpacklo_epi8(load8(planes + 48), load8(planes + 32)),
                                 _mm_unpacklo_epi8(load8(planes + 16), load8(planes)));
        const __m128i zero = _mm_setzero_si128();
        const __m256i even = _mm256_or_si256(_mm256_srli_epi32(odd, 4),
                                             _mm256_slli_epi32(join(_mm_unpacklo_epi8(before, zero), zero), 28));
        // Bytes 3, 2 of each are the windows 0, 2 and 1, 3; bytes 1, 0 the windows 4, 6 and 5, 7.
        const __m256i early = _mm256_setr_epi8(3, 2, -1, -1, 7, 6, -1, -1, 11, 10, -1, -1, 15, 14, -1, -1,  //
                                               3, 2, -1, -1, 7, 6, -1, -1, 11, 10, -1, -1, 15, 14, -1, -1);
        const __m256i late = _mm256_setr_epi8(1, 0, -1, -1, 5, 4, -1, -1, 9, 8, -1, -1, 13, 12, -1, -1,  //
                                              1, 0, -1, -1, 5, 4, -1, -1, 9, 8, -1, -1, 13, 12, -1, -1);
        const __m256i byte02 = _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1,  //
                                                0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
        const auto weave = [&](__m256i pick) {
          const __m256i e = _mm256_shuffle_epi8(_mm256_shuffle_epi8(even, pick), byte02);
          const __m256i o = _mm256_shuffle_epi8(_mm256_shuffle_epi8(odd, pick), byte02);
          return _mm256_or_si256(e, _mm256_slli_epi16(o, 8));
        };
        levels[2 * depth] = level(weave(early));
        levels[2 * depth + 1] = level(weave(late));
      } else {
        __m256i bits;
        if constexpr (B == 3) {
          bits =
              join(_mm_unpacklo_epi8(load8(planes + 32), load8(planes + 16)), _mm_unpacklo_epi8(load8(planes), before));
        } else {
          bits = join(_mm_unpacklo_epi8(load8(planes + 16), load8(planes)),
                      _mm_unpacklo_epi8(before, _mm_setzero_si128()));
        }
        levels[2 * depth] = level(windows<0>(bits));
        levels[2 * depth + 1] = level(windows<1>(bits));
      }
    }
  }
};

/// The kernels of portable.hpp for AVX2: the same bytes where bytes are written, and float sums of its order except in
/// score_raw. `V` is the vector of the translation unit's own target; see PortableKernels.
///
/// Codes are unpacked to int16, and one vpmaddwd multiplies two of them with two query or weight numbers of 16 bits,
/// which hold both planes of an 8-bit key's query and the 14 bits of a weight. 16 lanes of a fragment are done in two
/// halves, so that the sums of four rows, two registers each, stay in registers beside the levels.
template <class V>
struct Avx2Kernels : PortableKernels<V> {
  static constexpr const char* name = "avx2";

  // ---- rotation

  [[gnu::flatten]] static void rotate(const RotationView& r, const float* in, float* out) {
    Base::rotate_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }
  [[gnu::flatten]] static void rotate_back(const RotationView& r, const float* in, float* out) {
    Base::rotate_back_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }

  // ---- encoding: the portable text, compiled for this target, around a path search of its own

  [[gnu::flatten]] static bfloat16 center_rows(float* rows, std::size_t count, std::size_t dim, unsigned bits,
                                               std::uint8_t* center) {
    return Base::center_rows(rows, count, dim, bits, center);
  }
  [[gnu::flatten]] static void subtract_center(float* rows, std::size_t count, const CodedPart& part) {
    Base::subtract_center(rows, count, part);
  }
  template <unsigned B>
  [[gnu::flatten]] static bfloat16 encode_levels(const float* x, std::size_t dim, const std::int8_t* magnitudes,
                                                 double spread, ScaleRule rule, bool search, std::uint8_t* codes) {
    return Base::template encode_levels<B>(x, dim, magnitudes, spread, rule, search, codes);
  }
  [[gnu::flatten]] static bfloat16 encode_int8(const float* x, std::size_t dim, ScaleRule rule, std::uint8_t* codes) {
    return Base::encode_int8(x, dim, rule, codes);
  }
  template <unsigned B>
  [[gnu::flatten]] static bfloat16 encode_minmax(const float* x, std::size_t dim, bool search, bfloat16& zero_point,
                                                 std::uint8_t* codes) {
    return Base::template encode_minmax<B>(x, dim, search, zero_point, codes);
  }
  template <unsigned B>
  [[gnu::flatten]] static void pack(layout::Side side, const std::uint8_t* codes, std::size_t begin, std::size_t end,
                                    std::size_t page_tokens, std::size_t dim, std::uint8_t* fragments) {
    Base::template pack<B>(side, codes, begin, end, page_tokens, dim, fragments);
  }

  /// As PortableTrellis::find_trellis_path: 16 windows at a time, and the same sums in the same order.
  template <unsigned B>
  static void find_trellis_path(const std::int16_t* target, std::size_t length, const std::int16_t* levels,
                                unsigned start, unsigned end, std::uint8_t* back, std::uint8_t* path) {
    constexpr unsigned kStates = TrellisCodes<B>::states, kBranches = 1u << B, kVectors = kStates / 16;
    constexpr std::int16_t kNothing = -32768, kUnreached = kNothing + 49151;
    alignas(32) std::int16_t cost[kStates];
    for (unsigned state = 0; state < kStates; ++state) {
      cost[state] = start == Base::kAnyState || start == state ? kNothing : kUnreached;
    }
    const __m256i unreached = _mm256_set1_epi16(kUnreached), sign = _mm256_set1_epi16(kNothing);
    for (std::size_t i = 0; i < length; ++i) {
      const __m256i aim = _mm256_set1_epi16(target[i]);
      __m256i best[kVectors], from[kVectors];
      for (unsigned top = 0; top < kBranches; ++top) {
        for (unsigned v = 0; v < kVectors; ++v) {
          const unsigned window = top * kStates + 16 * v;
          const __m256i difference =
              _mm256_sub_epi16(aim, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(levels + window)));
          const __m256i arriving =
              _mm256_add_epi16(predecessors<B>(cost + window / kBranches), _mm256_mulhi_epi16(difference, difference));
          if (top == 0) {
            best[v] = arriving;
            from[v] = _mm256_setzero_si256();
          } else {
            const __m256i better = _mm256_cmpgt_epi16(best[v], arriving);
            best[v] = _mm256_min_epi16(best[v], arriving);
            from[v] = _mm256_blendv_epi8(from[v], _mm256_set1_epi16(static_cast<std::int16_t>(top)), better);
          }
        }
      }
      __m256i least = best[0];
      for (unsigned v = 1; v < kVectors; ++v) least = _mm256_min_epi16(least, best[v]);
      // Sums as unsigned numbers, for the horizontal minimum.
      const __m256i sums = _mm256_xor_si256(least, sign);
      const __m128i smallest =
          _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
      const __m256i excess = i < 3 ? _mm256_setzero_si256() : _mm256_broadcastw_epi16(smallest);
      for (unsigned v = 0; v < kVectors; ++v) {
        const __m256i kept = _mm256_min_epi16(_mm256_sub_epi16(best[v], excess), unreached);
        _mm256_store_si256(reinterpret_cast<__m256i*>(cost + 16 * v), kept);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(from[v]), _mm256_extracti128_si256(from[v], 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(back + i * kStates + 16 * v), bytes);
      }
    }
    unsigned state = end == Base::kAnyState ? 0 : end;
    for (unsigned other = 1; other < kStates && end == Base::kAnyState; ++other)
      state = cost[other] < cost[state] ? other : state;
    for (std::size_t i = length; i-- > 0;) {
      path[i] = static_cast<std::uint8_t>(state & (kBranches - 1));
      state = static_cast<unsigned>(back[i * kStates + state]) << (8 - 2 * B) | state >> B;
    }
  }

  template <unsigned B>
  [[gnu::flatten]] static void encode_trellis_keys(const float* rows, std::size_t count, std::size_t dim,
                                                   const TrellisCodes<B>& codes, double spread, ScaleRule rule,
                                                   bool search, bfloat16* scales, std::uint8_t* paths,
                                                   std::uint8_t* scratch) {
    Trellis::template encode_trellis_keys<B>(rows, count, dim, codes, spread, rule, search, scales, paths, scratch);
  }
  template <unsigned B>
  [[gnu::flatten]] static void encode_trellis_values(const float* rows, std::size_t count, std::size_t page_tokens,
                                                     std::size_t dim, const TrellisCodes<B>& codes, double spread,
                                                     std::size_t lane_begin, std::size_t lane_end, std::uint8_t* paths,
                                                     std::uint8_t* scratch) {
    Trellis::template encode_trellis_values<B>(rows, count, page_tokens, dim, codes, spread, lane_begin, lane_end,
                                               paths, scratch);
  }
  template <unsigned B>
  [[gnu::flatten]] static void scale_trellis_values(const float* rows, std::size_t count, std::size_t page_tokens,
                                                    std::size_t dim, const TrellisCodes<B>& codes, ScaleRule rule,
                                                    const std::uint8_t* fragments, bfloat16* scales,
                                                    std::uint8_t* scratch) {
    Base::template scale_trellis_values<B>(rows, count, page_tokens, dim, codes, rule, fragments, scales, scratch);
  }

  // ---- queries and logits

  [[gnu::flatten]] static void prepare_query(const RotationView& rotation, const float* q, QueryBlock& block,
                                             std::size_t r) {
    Base::prepare_query_by(rotation, q, block, r,
                           [](const RotationView& v, const float* in, float* out) { rotate(v, in, out); });
  }

  template <class Codes>
  static void score(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                    const QueryBlock& block, std::size_t row_begin, std::size_t row_end, const float* factor,
                    float* logits, std::size_t stride) {
    alignas(32) std::int16_t queries[kRows * kMaxRow];
    alignas(32) float center[kMaxRow];
    if (part.center_bits != 0) Base::decode_center(part, center);
    const Avx2Reader<Codes> reader(codes);
    for (std::size_t first = row_begin; first < row_end; first += kRows) {
      const std::size_t rows = (std::min)(kRows, row_end - first);
      float shared[kRows] = {};
      for (std::size_t r = 0; r < rows; ++r) {
        widen_query(block, first + r, queries + r * part.dim);
        if (part.center_bits != 0) shared[r] = dot(block.rotated + (first + r) * block.dim, center, block.dim);
      }
      const auto tiles = [&](auto count) {
        score_rows<decltype(count)::value>(part, reader, codes, tile_begin, tile_end, queries, block.step + first,
                                           shared, factor + first, logits + (first - row_begin) * stride, stride);
      };
      if (rows == 1) tiles(Count<1>());
      if (rows == 2) tiles(Count<2>());
      if (rows == 3) tiles(Count<3>());
      if (rows == 4) tiles(Count<4>());
    }
  }

  static void score_raw(const bfloat16* keys, std::size_t count, const QueryBlock& block, std::size_t row_begin,
                        std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
    alignas(32) float key[kMaxRow];
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t i = 0; i < block.dim; i += 8) _mm256_store_ps(key + i, widen8(keys + t * block.dim + i));
      for (std::size_t r = row_begin; r < row_end; ++r) {
        logits[(r - row_begin) * stride + t] =
            Base::saturate(dot(block.normal + r * block.dim, key, block.dim) * factor[r]);
      }
    }
  }

  // ---- softmax

  [[gnu::flatten]] static void soft_cap(float* logits, std::size_t begin, std::size_t end, float cap) {
    Base::soft_cap(logits, begin, end, cap);
  }

  static float softmax_step(float* logits, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
                            SoftmaxState& state) {
    float largest = state.sum > 0 ? state.largest : logits[low];
    std::size_t t = low;
    if (high - low >= 8) {
      __m256 most = _mm256_set1_ps(largest);
      for (; t + 8 <= high; t += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(logits + t));
      alignas(32) float lanes[8];
      _mm256_store_ps(lanes, most);
      for (const float x : lanes) largest = (std::max)(largest, x);
    }
    for (; t < high; ++t) largest = (std::max)(largest, logits[t]);
    const float factor = state.sum > 0 ? Base::exp_negative(state.largest - largest) : 0.0f;
    for (t = begin; t < low; ++t) logits[t] = 0;
    for (t = high; t < end; ++t) logits[t] = 0;
    const __m256 top = _mm256_set1_ps(largest);
    // The last few in a buffer: whatever a compiler makes of the polynomial, it is one for all, so that a weight does
    // not depend on where its range begins.
    alignas(32) float rest[8] = {};
    for (t = low; t < high; t += 8) {
      const std::size_t count = (std::min)(high - t, std::size_t{8});
      float* at = count == 8 ? logits + t : rest;
      if (count < 8) std::copy_n(logits + t, count, rest);
      _mm256_storeu_ps(at, exp_negative8(_mm256_sub_ps(_mm256_loadu_ps(at), top)));
      if (count < 8) std::copy_n(rest, count, logits + t);
    }
    state.sum = state.sum * factor + sum_by_lane(logits, begin, end);
    state.largest = largest;
    return factor;
  }

  static WeightSums weigh(const CodedPart& part, const float* p, std::size_t begin, std::size_t end,
                          std::int16_t* weights) {
    WeightSums sums{0, 0, 0};
    alignas(32) float product[kMaxPage];
    __m256 most = _mm256_setzero_ps();
    for (std::size_t t = begin; t < end; t += 8) {
      const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(p + t), widen8(part.scales + t));
      most = _mm256_max_ps(most, x);
      _mm256_storeu_ps(product + t, x);
    }
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, most);
    float largest = 0;
    for (const float x : lanes) largest = (std::max)(largest, x);
    sums.probability = sum_by_lane(p, begin, end);
    if (part.zero_points != nullptr) {
      float zero[kMaxPage];
      for (std::size_t t = begin; t < end; ++t) zero[t] = p[t] * to_float(part.zero_points[t]);
      sums.zero_point = sum_by_lane(zero, begin, end);
    }
    sums.coefficient = largest / static_cast<float>(kWeightMax);
    const __m256 by = _mm256_set1_ps(largest > 0 ? largest : 1.0f), range = _mm256_set1_ps(kWeightMax);
    for (std::size_t t = begin; t < end; t += 8) {
      const __m256i w = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_div_ps(_mm256_loadu_ps(product + t), by), range));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(weights + t),
                       _mm_packs_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
    }
    return sums;
  }

  // ---- accumulation

  template <class Codes>
  static void accumulate(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                         std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                         const WeightSums* sums, float* out, std::size_t out_stride) {
    alignas(32) float center[kMaxRow];
    Base::decode_center(part, center);
    const Avx2Reader<Codes> reader(codes);
    for (std::size_t first = 0; first < rows; first += kRows) {
      const auto groups = [&](auto count) {
        accumulate_rows<decltype(count)::value>(part, reader, codes, tile_begin, tile_end,
                                                weights + first * weight_stride, weight_stride, sums + first, center,
                                                out + first * out_stride, out_stride);
      };
      const std::size_t set = (std::min)(kRows, rows - first);
      if (set == 1) groups(Count<1>());
      if (set == 2) groups(Count<2>());
      if (set == 3) groups(Count<3>());
      if (set == 4) groups(Count<4>());
    }
  }

  static void accumulate_raw(const bfloat16* values, std::size_t count, std::size_t dim, std::size_t rows,
                             const float* p, std::size_t p_stride, float* out, std::size_t out_stride) {
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t i = 0; i < dim; i += 16) {
        float* to = out + r * out_stride + i;
        __m256 a = _mm256_loadu_ps(to), b = _mm256_loadu_ps(to + 8);
        for (std::size_t t = 0; t < count; ++t) {
          const float probability = p[r * p_stride + t];
          if (!(probability > 0)) continue;
          const __m256 weight = _mm256_set1_ps(probability);
          a = _mm256_add_ps(a, _mm256_mul_ps(weight, widen8(values + t * dim + i)));
          b = _mm256_add_ps(b, _mm256_mul_ps(weight, widen8(values + t * dim + i + 8)));
        }
        _mm256_storeu_ps(to, a);
        _mm256_storeu_ps(to + 8, b);
      }
    }
  }

  [[gnu::flatten]] static void combine(float* out, float a, const float* other, float b, std::size_t dim) {
    Base::combine(out, a, other, b, dim);
  }

 private:
  using Base = PortableKernels<V>;
  using Trellis = PortableTrellis<Avx2Kernels>;
  friend Trellis;
  using Base::kMaxPage;
  using Base::kMaxRow;

  static constexpr std::size_t kRows = 4;  // whose sums stay in registers
  template <std::size_t N>
  struct Count {
    static constexpr std::size_t value = N;
  };

  // In-place Walsh-Hadamard transform, butterflies of growing distance, as the portable one.
  static void sylvester(float* x, std::size_t n) {
    if (n < 8) {
      Base::sylvester(x, n);
      return;
    }
    for (std::size_t i = 0; i < n; i += 8) {
      __m256 v = _mm256_loadu_ps(x + i);
      __m256 other = _mm256_permute_ps(v, 0xb1);
      v = _mm256_blend_ps(_mm256_add_ps(v, other), _mm256_sub_ps(other, v), 0xaa);
      other = _mm256_permute_ps(v, 0x4e);
      v = _mm256_blend_ps(_mm256_add_ps(v, other), _mm256_sub_ps(other, v), 0xcc);
      other = _mm256_permute2f128_ps(v, v, 1);
      v = _mm256_blend_ps(_mm256_add_ps(v, other), _mm256_sub_ps(other, v), 0xf0);
      _mm256_storeu_ps(x + i, v);
    }
    for (std::size_t h = 8; h < n; h *= 2) {
      for (std::size_t block = 0; block < n; block += 2 * h) {
        for (std::size_t i = block; i < block + h; i += 8) {
          const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + h);
          _mm256_storeu_ps(x + i, _mm256_add_ps(a, b));
          _mm256_storeu_ps(x + i + h, _mm256_sub_ps(a, b));
        }
      }
    }
  }

  // Costs of the states that 16 successive windows come from, each for 2^B windows.
  template <unsigned B>
  static __m256i predecessors(const std::int16_t* cost) {
    if constexpr (B == 4) {
      return _mm256_set1_epi16(*cost);
    } else if constexpr (B == 3) {
      std::int32_t two = 0;
      std::memcpy(&two, cost, sizeof two);
      return _mm256_shuffle_epi8(_mm256_set1_epi32(two),
                                 _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1,  //
                                                  2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
    } else {
      std::int64_t four = 0;
      std::memcpy(&four, cost, sizeof four);
      return _mm256_shuffle_epi8(_mm256_set1_epi64x(four),
                                 _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3,  //
                                                  4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
    }
  }

  static __m256 widen8(const bfloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

  // Both planes of a query in one number of 16 bits: |128 p0 + p1| <= 16319.
  static void widen_query(const QueryBlock& block, std::size_t r, std::int16_t* to) {
    const std::int8_t* planes = block.planes + r * block.plane_count * block.dim;
    for (std::size_t i = 0; i < block.dim; i += 16) {
      __m256i q = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(planes + i)));
      if (block.plane_count == 2) {
        const __m256i low =
            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(planes + block.dim + i)));
        q = _mm256_add_epi16(_mm256_slli_epi16(q, 7), low);
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), q);
    }
  }

  // Four numbers of 16 bits, to every 64-bit lane.
  static __m256i broadcast4(const std::int16_t* from) {
    std::int64_t four = 0;
    std::memcpy(&four, from, sizeof four);
    return _mm256_set1_epi64x(four);
  }

  // sums[r][0, 1] += levels times four numbers per row and slot, in pairs: lanes 0-3 and 4-7 of the half, two sums
  // each.
  template <std::size_t R, class Numbers>
  static void multiply(const __m256i (&levels)[4], Numbers numbers, __m256i (&sums)[R][2]) {
    for (std::size_t s = 0; s < 4; ++s) {
      const __m256i low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(levels[s]));
      const __m256i high = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(levels[s], 1));
      for (std::size_t r = 0; r < R; ++r) {
        const __m256i four = broadcast4(numbers(r) + 4 * s);
        sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(low, four));
        sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(high, four));
      }
    }
  }
  // The eight lanes in order.
  static __m256 total(const __m256i (&sums)[2]) {
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[0], sums[1]), 0xd8));
  }

  template <std::size_t R, class Reader, class Codes>
  static void score_rows(const CodedPart& part, const Reader& reader, const Codes& codes, std::size_t tile_begin,
                         std::size_t tile_end, const std::int16_t* queries, const float* step, const float* shared,
                         const float* factor, float* logits, std::size_t stride) {
    const std::size_t groups = part.dim / 16;
    const __m256 most = _mm256_set1_ps(3.402823466e38f), least = _mm256_set1_ps(-3.402823466e38f);
    for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
      for (std::size_t half = 0; half < 2; ++half) {
        __m256i sums[R][2] = {};
        for (std::size_t group = 0; group < groups; ++group) {
          __m256i levels[4];
          reader.read(Base::fragment_at(layout::Side::key, part, codes, tile, group),
                      Base::history_of(layout::Side::key, part, codes, tile, group), half, levels);
          multiply(
              levels, [&](std::size_t r) { return queries + r * part.dim + group * 16; }, sums);
        }
        const __m256 scales = widen8(part.scales + tile * 16 + half * 8);
        for (std::size_t r = 0; r < R; ++r) {
          const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(step[r]), scales);
          __m256 x = _mm256_add_ps(_mm256_mul_ps(scale, total(sums[r])), _mm256_set1_ps(shared[r]));
          x = _mm256_mul_ps(x, _mm256_set1_ps(factor[r]));
          _mm256_storeu_ps(logits + r * stride + tile * 16 + half * 8, _mm256_min_ps(_mm256_max_ps(x, least), most));
        }
      }
    }
  }

  template <std::size_t R, class Reader, class Codes>
  static void accumulate_rows(const CodedPart& part, const Reader& reader, const Codes& codes, std::size_t tile_begin,
                              std::size_t tile_end, const std::int16_t* weights, std::size_t weight_stride,
                              const WeightSums* rows, const float* center, float* out, std::size_t out_stride) {
    for (std::size_t group = 0; group < part.dim / 16; ++group) {
      for (std::size_t half = 0; half < 2; ++half) {
        __m256i sums[R][2] = {};
        for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
          __m256i levels[4];
          reader.read(Base::fragment_at(layout::Side::value, part, codes, tile, group),
                      Base::history_of(layout::Side::value, part, codes, tile, group), half, levels);
          multiply(
              levels, [&](std::size_t r) { return weights + r * weight_stride + tile * 16; }, sums);
        }
        const __m256 mean = _mm256_load_ps(center + group * 16 + half * 8);
        for (std::size_t r = 0; r < R; ++r) {
          if (!(rows[r].probability > 0)) continue;
          float* to = out + r * out_stride + group * 16 + half * 8;
          const __m256 codes_part = rows[r].coefficient > 0
                                        ? _mm256_mul_ps(_mm256_set1_ps(rows[r].coefficient), total(sums[r]))
                                        : _mm256_setzero_ps();
          const __m256 rest = _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(rows[r].probability), mean),
                                            _mm256_set1_ps(rows[r].zero_point));
          _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_add_ps(codes_part, rest)));
        }
      }
    }
  }

  // dim is a multiple of 16. 16 partial sums, then a tree, as the portable one.
  static float dot(const float* a, const float* b, std::size_t dim) {
    __m256 low = _mm256_setzero_ps(), high = low;
    for (std::size_t i = 0; i < dim; i += 16) {
      low = _mm256_add_ps(low, _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
      high = _mm256_add_ps(high, _mm256_mul_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8)));
    }
    return tree(low, high);
  }
  static float tree(__m256 low, __m256 high) {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // Sum of x[begin, end) in 16 lanes by index, then a tree: what a sum is does not depend on where its range begins.
  static float sum_by_lane(const float* x, std::size_t begin, std::size_t end) {
    alignas(32) float lanes[16] = {};
    std::size_t t = begin;
    for (; t < end && t % 16 != 0; ++t) lanes[t % 16] += x[t];
    __m256 low = _mm256_load_ps(lanes), high = _mm256_load_ps(lanes + 8);
    for (; t + 16 <= end; t += 16) {
      low = _mm256_add_ps(low, _mm256_loadu_ps(x + t));
      high = _mm256_add_ps(high, _mm256_loadu_ps(x + t + 8));
    }
    _mm256_store_ps(lanes, low);
    _mm256_store_ps(lanes + 8, high);
    for (; t < end; ++t) lanes[t % 16] += x[t];
    return tree(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8));
  }

  // PortableKernels::exp_negative, eight at a time, with its bits.
  static __m256 exp_negative8(__m256 x) {
    const __m256 bottom = _mm256_set1_ps(-87.0f);
    const __m256 clamped = _mm256_max_ps(bottom, x);
    const __m256i n =
        _mm256_cvttps_epi32(_mm256_sub_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(1.44269504f)), _mm256_set1_ps(0.5f)));
    const __m256 nf = _mm256_cvtepi32_ps(n);
    const __m256 f = _mm256_sub_ps(_mm256_sub_ps(clamped, _mm256_mul_ps(nf, _mm256_set1_ps(0.693359375f))),
                                   _mm256_mul_ps(nf, _mm256_set1_ps(-2.12194440e-4f)));
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
      y = _mm256_add_ps(_mm256_mul_ps(y, f), _mm256_set1_ps(c));
    }
    y = _mm256_add_ps(_mm256_add_ps(_mm256_mul_ps(_mm256_mul_ps(y, f), f), f), _mm256_set1_ps(1.0f));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, bottom, _CMP_LT_OQ), _mm256_mul_ps(y, power));
  }
};

using Avx2 = Avx2Kernels<FloatVector>;

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
