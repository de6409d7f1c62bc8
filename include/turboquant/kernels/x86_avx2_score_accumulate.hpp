// Reading codes on x86 with AVX2: unpacking them, scoring keys and accumulating values. A part of kernels/x86_avx2.hpp.
#pragma once

#include <turboquant/kernels/x86_avx2_encode.hpp>

#if defined(TURBOQUANT_MAKES_X86_KERNELS)

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

// The region is that of x86_avx2.hpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

namespace turboquant::kernels {

// Unpacks half a fragment, eight depths of its 16 lanes, to four registers of 32 bytes level + 128: register 2 k + h
// has the lanes 8 h to 8 h + 7, four bytes each. Its even and its odd bytes are two pairs of depths per lane, each for
// one vpmaddwd: the pairs `even(k)` and `odd(k)` of (0, 2), (1, 3), (4, 6), (5, 7). That levels are unsigned saves a
// shift; the sums are then too large by 128 times the sum of the numbers, and right modulo 2^32 once that is taken off.
template <class Unit, class Codes>
struct Avx2Reader;

template <class Unit>
struct Avx2Plain {
  static constexpr std::size_t even(std::size_t k) { return 2 * k; }
  static constexpr std::size_t odd(std::size_t k) { return 2 * k + 1; }
  static __m256i load(const std::uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static __m128i load16(const std::uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
};

template <class Unit, unsigned B>
struct Avx2Reader<Unit, LevelCodes<B>> : Avx2Plain<Unit> {
  using Avx2Plain<Unit>::load;
  __m256i table;

  explicit Avx2Reader(const LevelCodes<B>& codes) {
    alignas(16) std::int8_t levels[16] = {};
    // Widths 2 and 3 use an index with the two low bits of the code on top of the third.
    for (std::size_t c = 0; B < 8 && c < std::size_t{1} << B % 8; ++c) {
      levels[B == 2 || B == 3 ? (c & 3) << 2 | c >> 2 : c] = codes.levels[c];
    }
    const __m128i biased = _mm_xor_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(levels)), _mm_set1_epi8(-128));
    table = _mm256_broadcastsi128_si256(biased);
  }

  // 32 bits to the bytes 0 or 1.
  static __m256i spread(const std::uint8_t* mask) {
    std::int32_t bits = 0;
    std::memcpy(&bits, mask, sizeof bits);
    const __m256i bytes =
        _mm256_shuffle_epi8(_mm256_set1_epi32(bits), _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2,
                                                                      2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i own = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
    return _mm256_min_epu8(_mm256_and_si256(bytes, own), _mm256_set1_epi8(1));
  }

  template <std::size_t kUnit>
  [[gnu::always_inline]] void read(const std::uint8_t* fragment, const std::uint8_t*, __m256i (&bytes)[4]) const {
    TURBOQUANT_UNROLL
    for (std::size_t half = 0; half < 2; ++half) {
      if constexpr (B == 8) {
        const __m256i bias = _mm256_set1_epi8(-128);
        bytes[half] = _mm256_xor_si256(load(fragment + 128 * kUnit + 32 * half), bias);
        bytes[2 + half] = _mm256_xor_si256(load(fragment + 128 * kUnit + 64 + 32 * half), bias);
      } else if constexpr (B == 4) {
        const __m256i low = _mm256_set1_epi8(15), both = load(fragment + 64 * kUnit + 32 * half);
        bytes[half] = _mm256_shuffle_epi8(table, _mm256_and_si256(both, low));
        bytes[2 + half] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
      } else if constexpr (B == 1) {
        bytes[half] = _mm256_shuffle_epi8(table, spread(fragment + 16 * kUnit + 4 * half));
        bytes[2 + half] = _mm256_shuffle_epi8(table, spread(fragment + 16 * kUnit + 8 + 4 * half));
      } else {
        const __m256i all = load(fragment + 32 * half), field = _mm256_set1_epi8(12);
        __m256i first = kUnit == 0 ? _mm256_slli_epi16(all, 2) : _mm256_srli_epi16(all, 2);
        __m256i second = kUnit == 0 ? all : _mm256_srli_epi16(all, 4);
        first = _mm256_and_si256(first, field), second = _mm256_and_si256(second, field);
        if constexpr (B == 3) {
          first = _mm256_or_si256(first, spread(fragment + 64 + 16 * kUnit + 4 * half));
          second = _mm256_or_si256(second, spread(fragment + 72 + 16 * kUnit + 4 * half));
        }
        bytes[half] = _mm256_shuffle_epi8(table, first);
        bytes[2 + half] = _mm256_shuffle_epi8(table, second);
      }
    }
  }
};

template <class Unit, unsigned B>
struct Avx2Reader<Unit, TrellisCodes<B>> : Avx2Plain<Unit> {
  using Avx2Plain<Unit>::load, Avx2Plain<Unit>::load16;
  __m256i first, second;  // A; and B + 128 with the sign of the index's fourth bit

  explicit Avx2Reader(const TrellisCodes<B>& codes) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.table));
    const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes.table + 16));
    const __m128i both = _mm_unpacklo_epi64(high, _mm_sub_epi8(_mm_setzero_si128(), high));
    first = _mm256_broadcastsi128_si256(low);
    second = _mm256_broadcastsi128_si256(_mm_xor_si128(both, _mm_set1_epi8(-128)));
  }

  // Width 4: its windows come as (0, 4, 2, 6) and (1, 5, 3, 7).
  static constexpr std::size_t even(std::size_t k) { return B == 4 ? k : 2 * k; }
  static constexpr std::size_t odd(std::size_t k) { return B == 4 ? k + 2 : 2 * k + 1; }

  // The planes 0, 1 (in a) and 2, 3 (in b) of 16 lanes, to one register per 8 lanes: of every four lanes, four bytes of
  // plane 0, then 2, 1 and 3.
  [[gnu::always_inline]] static void gather(__m256i a, __m256i b, __m256i (&lanes)[2]) {
    lanes[0] = _mm256_permute4x64_epi64(_mm256_unpacklo_epi32(a, b), 0xd8);
    lanes[1] = _mm256_permute4x64_epi64(_mm256_unpackhi_epi32(a, b), 0xd8);
  }
  // Two numbers of 16 bits per lane, of the bytes at these places of what gather left, for the first of four lanes.
  [[gnu::always_inline]] static __m256i pick(__m256i lanes, int low0, int high0, int low1, int high1) {
    const auto at = [&](int lane) {
      return (low0 + lane) | (high0 + lane) << 8 | (low1 + lane) << 16 | (high1 + lane) << 24;
    };
    const __m128i order = _mm_setr_epi32(at(0), at(1), at(2), at(3));
    return _mm256_shuffle_epi8(lanes, _mm256_broadcastsi128_si256(order));
  }

  [[gnu::always_inline]] __m256i level(__m256i w) const {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i a = _mm256_shuffle_epi8(first, _mm256_and_si256(w, nibble));
    const __m256i b = _mm256_shuffle_epi8(second, _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble));
    return _mm256_add_epi8(_mm256_sign_epi8(a, _mm256_or_si256(w, _mm256_set1_epi8(1))), b);
  }

  // Windows cut from 16-bit numbers: the even bytes are x * even >> 16, the odd ones y * odd >> 8, modulo 256.
  [[gnu::always_inline]] static __m256i windows(__m256i x, __m256i y, int even0, int even1, int odd0, int odd1) {
    const __m256i low = _mm256_mulhi_epu16(x, _mm256_set1_epi32(even0 | even1 << 16));
    const __m256i high = _mm256_mullo_epi16(y, _mm256_set1_epi32(odd0 | odd1 << 16));
    return _mm256_blendv_epi8(low, high, _mm256_set1_epi16(-256));
  }

  template <std::size_t kUnit>
  [[gnu::always_inline]] void read(const std::uint8_t* fragment, const std::uint8_t* history,
                                   __m256i (&bytes)[4]) const {
    const std::uint8_t* planes = fragment + kUnit * B * 16;
    const __m256i before = kUnit == 1
                               ? load(planes - 16)
                               : _mm256_inserti128_si256(_mm256_castsi128_si256(load16(history)), load16(planes), 1);
    __m256i lanes[2];
    if constexpr (B == 4) {
      // Windows at odd places are the planes; those at even places lie half in one, half in the next.
      const __m256i low = _mm256_set1_epi8(15), now[2] = {load(planes), load(planes + 32)};
      const auto between = [&](__m256i old, __m256i young) {
        return _mm256_or_si256(_mm256_andnot_si256(low, _mm256_slli_epi16(old, 4)),
                               _mm256_and_si256(low, _mm256_srli_epi16(young, 4)));
      };
      gather(between(before, now[0]), between(load(planes + 16), now[1]), lanes);
      TURBOQUANT_UNROLL
      for (std::size_t half = 0; half < 2; ++half) bytes[half] = level(pick(lanes[half], 0, 4, 8, 12));
      gather(now[0], now[1], lanes);
      TURBOQUANT_UNROLL
      for (std::size_t half = 0; half < 2; ++half) bytes[2 + half] = level(pick(lanes[half], 0, 4, 8, 12));
    } else if constexpr (B == 3) {
      // Windows 0 and 1 lie in history and plane 0, windows 2 to 4 in planes 0 and 1, the others in planes 1 and 2.
      gather(before, load(planes + 16), lanes);
      TURBOQUANT_UNROLL
      for (std::size_t half = 0; half < 2; ++half) {
        const __m256i early = pick(lanes[half], 8, 0, 4, 8);
        bytes[half] = level(windows(early, early, 1 << 11, 1 << 9, 1 << 6, 1 << 4));
        bytes[2 + half] = level(
            windows(pick(lanes[half], 4, 8, 12, 4), pick(lanes[half], 12, 4, 12, 4), 1 << 15, 1 << 13, 1 << 2, 1 << 8));
      }
    } else {
      gather(before, _mm256_castsi128_si256(load16(planes + 16)), lanes);
      TURBOQUANT_UNROLL
      for (std::size_t half = 0; half < 2; ++half) {
        const __m256i early = pick(lanes[half], 8, 0, 8, 0), late = pick(lanes[half], 4, 8, 4, 8);
        bytes[half] = level(windows(early, early, 1 << 10, 1 << 14, 1 << 4, 1 << 8));
        bytes[2 + half] = level(windows(late, late, 1 << 10, 1 << 14, 1 << 4, 1 << 8));
      }
    }
  }
};

// A run of fragments that lie one behind the other: the groups of a tile of keys, or the tiles of a group of values.
template <class Unit, class Codes>
struct Avx2Run {
  using Reader = Avx2Reader<Unit, Codes>;
  const Reader& reader;
  const std::uint8_t* fragments;
  const std::uint8_t* history;  // of the first fragment; every other one continues the one before it
  std::ptrdiff_t ahead = 0;     // distance in bytes of what is fetched into the caches meanwhile, if not 0

  template <std::size_t kUnit>
  [[gnu::always_inline]] void read(std::size_t index, __m256i (&bytes)[4]) const {
    const std::uint8_t* fragment = fragments + index * layout::fragment_bytes(Codes::bits);
    reader.template read<kUnit>(fragment, index == 0 ? history : fragment - 16, bytes);
    if (kUnit != 0 || ahead == 0) return;
    for (std::size_t line = 0; line < layout::fragment_bytes(Codes::bits); line += 64)
      fetch_line(fragment + ahead + line);
  }
};

// The same, unpacked before, for more rows than share one reading.
template <class Unit, class Codes>
struct Avx2Unpacked {
  using Reader = Avx2Reader<Unit, Codes>;
  const std::uint8_t* bytes_of_run;  // aligned to 32

  template <std::size_t kUnit>
  [[gnu::always_inline]] void read(std::size_t index, __m256i (&bytes)[4]) const {
    const auto* from = reinterpret_cast<const __m256i*>(bytes_of_run + index * layout::kFragmentCodes + 128 * kUnit);
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < 4; ++k) bytes[k] = _mm256_load_si256(from + k);
  }
};

/// The kernels of portable.hpp that read codes, for AVX2.
///
/// Levels are multiplied as int16: one vpmaddwd takes two of them per lane and two numbers of a query (both planes) or
/// of weights (14 bits). Its sums are those of the lanes; those of four rows, two registers each, stay in registers.
template <class Unit>
struct Avx2Products : Avx2Encoders<Unit> {
  template <class Codes>
  static void score(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                    const QueryBlock& block, std::size_t row_begin, std::size_t row_end, const float* factor,
                    float* logits, std::size_t stride) {
    score_parts({&part, 1}, codes, tile_begin, tile_end, block, row_begin, row_end, factor, logits, stride);
  }

  template <class Codes>
  static void score_pages(std::span<const CodedPart> parts, const Codes& codes, const QueryBlock& block,
                          const float* factor, float* logits, std::size_t stride) {
    score_parts(parts, codes, 0, parts[0].page_tokens / 16, block, 0, block.rows, factor, logits, stride);
  }

  template <class Codes>
  static void accumulate(std::span<const CodedPart> parts, const Codes& codes, std::size_t begin, std::size_t end,
                         std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                         const WeightSums* sums, std::size_t sum_stride, float* out, std::size_t out_stride) {
    Base::template accumulate_each<Avx2Products>(parts, codes, begin, end, rows, weights, weight_stride, sums,
                                                 sum_stride, out, out_stride);
  }

  template <class Codes>
  static void accumulate_part(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                              std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                              const WeightSums* sums, float* out, std::size_t out_stride) {
    alignas(32) std::int16_t numbers[kBlock * kMaxPage];
    alignas(32) std::uint8_t unpacked[16 * kMaxPage];
    alignas(32) float center[kMaxRow];
    decode_center8(part, center);
    const std::size_t tiles = part.page_tokens / 16, groups = part.dim / 16, count = tile_end - tile_begin;
    const Avx2Reader<Unit, Codes> reader(codes);
    std::ptrdiff_t ahead = fetch_head(part);
    for (std::size_t first = 0; first < rows; first += kBlock, ahead = 0) {
      const std::size_t set = (std::min)(kBlock, rows - first);
      std::int32_t start[kBlock];
      for (std::size_t r = 0; r < set; ++r) {
        start[r] =
            pair_weights(weights + (first + r) * weight_stride + tile_begin * 16, count * 16, numbers + r * kMaxPage);
      }
      for (std::size_t group = 0; group < groups; ++group) {
        const std::size_t index = group * tiles + tile_begin;
        const std::uint8_t* fragments = part.fragments + index * layout::fragment_bytes(Codes::bits);
        const std::uint8_t* end =
            index != 0 ? fragments : part.fragments + tiles * groups * layout::fragment_bytes(Codes::bits);
        const Avx2Run<Unit, Codes> run{reader, fragments, end - 16, ahead};
        for_rows(run, count, set, unpacked, [&](auto row_count, const auto& levels, std::size_t r) {
          accumulate_rows<decltype(row_count)::value>(levels, count, numbers + r * kMaxPage, start + r,
                                                      sums + first + r, center + group * 16,
                                                      out + (first + r) * out_stride + group * 16, out_stride);
        });
      }
    }
  }

 protected:
  using Base = PortableKernels<Unit>;
  using Base::kMaxPage, Base::kMaxRow;
  static constexpr std::size_t kRows = 4;    // whose sums stay in registers
  static constexpr std::size_t kBlock = 16;  // rows that share one unpacking
  template <std::size_t N>
  using Count = std::integral_constant<std::size_t, N>;

  template <class Codes>
  static void score_parts(std::span<const CodedPart> parts, const Codes& codes, std::size_t tile_begin,
                          std::size_t tile_end, const QueryBlock& block, std::size_t row_begin, std::size_t row_end,
                          const float* factor, float* logits, std::size_t stride) {
    alignas(32) std::int16_t numbers[kBlock * kMaxRow];
    alignas(32) std::uint8_t unpacked[16 * kMaxRow];
    alignas(32) float center[kMaxRow];
    const std::size_t dim = block.dim, groups = dim / 16, tile_bytes = groups * layout::fragment_bytes(Codes::bits);
    const Avx2Reader<Unit, Codes> reader(codes);
    for (std::size_t first = row_begin; first < row_end; first += kBlock) {
      const std::size_t rows = (std::min)(kBlock, row_end - first);
      std::int32_t start[kBlock];
      float shared[kBlock];
      for (std::size_t r = 0; r < rows; ++r) start[r] = pair_query(block, first + r, numbers + r * dim);
      float* to = logits + (first - row_begin) * stride;
      for (const CodedPart& part : parts) {
        const std::ptrdiff_t ahead = first == row_begin ? fetch_head(part) : 0;
        if (part.center_bits != 0) decode_center8(part, center);
        for (std::size_t r = 0; r < rows; ++r) {
          shared[r] = part.center_bits != 0 ? dot(block.rotated + (first + r) * dim, center, dim) : 0.0f;
        }
        for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
          const std::uint8_t* fragments = part.fragments + tile * tile_bytes;
          const Avx2Run<Unit, Codes> run{reader, fragments, fragments + tile_bytes - 16, ahead};
          for_rows(run, groups, rows, unpacked, [&](auto count, const auto& levels, std::size_t r) {
            score_rows<decltype(count)::value>(part, levels, tile, numbers + r * dim, start + r, block.step + first + r,
                                               shared + r, factor + first + r, to + r * stride, stride);
          });
        }
        to += part.page_tokens;
      }
    }
  }

  static __m256 widen8(const bfloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

  static void decode_center8(const CodedPart& part, float* out) {
    const __m256 scale = _mm256_set1_ps(part.center_scale);
    for (std::size_t i = 0; i < part.dim; i += 8) {
      __m256i level = _mm256_setzero_si256();
      if (part.center_bits == 8) {
        level = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(part.center + i)));
      } else if (part.center_bits == 16) {
        level = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part.center + 2 * i)));
      }
      _mm256_store_ps(out + i, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(level)));
    }
  }

  // The numbers of eight depths in the order (0, 2) (1, 3) (4, 6) (5, 7). Both planes of a query are one number of 16
  // bits, |128 p0 + p1| <= 16319. Returns where the sums must start: -128 times the sum of the numbers.
  static std::int32_t pair_query(const QueryBlock& block, std::size_t r, std::int16_t* to) {
    const std::int8_t* planes = block.planes + r * block.plane_count * block.dim;
    const __m128i ones = _mm_set1_epi16(1);
    __m128i sum = _mm_setzero_si128();
    for (std::size_t i = 0; i < block.dim; i += 16) {
      const auto split = [i](const std::int8_t* plane, __m128i(&halves)[2]) {
        const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(plane + i));
        halves[0] = _mm_srai_epi16(_mm_slli_epi16(q, 8), 8);
        halves[1] = _mm_srai_epi16(q, 8);
      };
      __m128i q[2];
      split(planes, q);
      if (block.plane_count == 2) {
        __m128i low[2];
        split(planes + block.dim, low);
        TURBOQUANT_UNROLL
        for (std::size_t k = 0; k < 2; ++k) q[k] = _mm_add_epi16(_mm_slli_epi16(q[k], 7), low[k]);
      }
      sum = _mm_add_epi32(sum, _mm_add_epi32(_mm_madd_epi16(q[0], ones), _mm_madd_epi16(q[1], ones)));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + i), _mm_unpacklo_epi32(q[0], q[1]));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + i + 8), _mm_unpackhi_epi32(q[0], q[1]));
    }
    return -128 * sum4(sum);
  }
  // The same for the weights of `count` tokens: 256 of them times 128 stay below 2^31.
  static std::int32_t pair_weights(const std::int16_t* weights, std::size_t count, std::int16_t* to) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15), ones = _mm_set1_epi16(1);
    __m128i sum = _mm_setzero_si128();
    for (std::size_t t = 0; t < count; t += 8) {
      const __m128i w = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + t));
      sum = _mm_add_epi32(sum, _mm_madd_epi16(w, ones));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + t), _mm_shuffle_epi8(w, order));
    }
    return -128 * sum4(sum);
  }
  static std::int32_t sum4(__m128i x) {
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
  }

  static __m256i broadcast_pair(const std::int16_t* from) {
    std::int32_t pair = 0;
    std::memcpy(&pair, from, sizeof pair);
    return _mm256_set1_epi32(pair);
  }

  // Calls body(Count<R>, levels, r) for sets of at most four of the rows. Many rows read an unpacked copy of the run.
  template <class Codes, class Body>
  [[gnu::always_inline]] static void for_rows(const Avx2Run<Unit, Codes>& run, std::size_t fragments, std::size_t rows,
                                              std::uint8_t* unpacked, Body body) {
    const auto sets = [&](const auto& levels) {
      for (std::size_t r = 0; r < rows; r += kRows) {
        const std::size_t set = (std::min)(kRows, rows - r);
        if (set == 1) body(Count<1>(), levels, r);
        if (set == 2) body(Count<2>(), levels, r);
        if (set == 3) body(Count<3>(), levels, r);
        if (set == 4) body(Count<4>(), levels, r);
      }
    };
    if (rows <= kRows) {
      sets(run);
      return;
    }
    for (std::size_t i = 0; i < fragments; ++i) {
      auto* to = reinterpret_cast<__m256i*>(unpacked + i * layout::kFragmentCodes);
      __m256i bytes[4];
      run.template read<0>(i, bytes);
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < 4; ++k) _mm256_store_si256(to + k, bytes[k]);
      run.template read<1>(i, bytes);
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < 4; ++k) _mm256_store_si256(to + 4 + k, bytes[k]);
    }
    sets(Avx2Unpacked<Unit, Codes>{unpacked});
  }

  // g++ would add all products of a fragment as a tree, and spill most of them.
  [[gnu::always_inline]] static void settle(__m256i& sum) { __asm__("" : "+x"(sum)); }

  // sums[r][h] += levels times the numbers of eight depths, lanes 8 h to 8 h + 7.
  template <std::size_t R, class Reader>
  [[gnu::always_inline]] static void multiply(const __m256i (&bytes)[4], const std::int16_t* numbers,
                                              std::size_t stride, __m256i (&sums)[R][2]) {
    const __m256i low = _mm256_set1_epi16(255);
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < 2; ++k) {
      const __m256i even[2] = {_mm256_and_si256(bytes[2 * k], low), _mm256_and_si256(bytes[2 * k + 1], low)};
      const __m256i odd[2] = {_mm256_srli_epi16(bytes[2 * k], 8), _mm256_srli_epi16(bytes[2 * k + 1], 8)};
      TURBOQUANT_UNROLL
      for (std::size_t r = 0; r < R; ++r) {
        const __m256i first = broadcast_pair(numbers + r * stride + 2 * Reader::even(k));
        const __m256i second = broadcast_pair(numbers + r * stride + 2 * Reader::odd(k));
        TURBOQUANT_UNROLL
        for (std::size_t h = 0; h < 2; ++h) {
          sums[r][h] = _mm256_add_epi32(sums[r][h], _mm256_madd_epi16(even[h], first));
          sums[r][h] = _mm256_add_epi32(sums[r][h], _mm256_madd_epi16(odd[h], second));
          settle(sums[r][h]);
        }
      }
    }
  }
  // sums[r][h] = the sums over a run of fragments. numbers: [R][stride], 16 per fragment.
  template <std::size_t R, class Levels>
  [[gnu::always_inline]] static void multiply_run(const Levels& levels, std::size_t fragments,
                                                  const std::int16_t* numbers, std::size_t stride,
                                                  const std::int32_t* start, __m256i (&sums)[R][2]) {
    TURBOQUANT_UNROLL
    for (std::size_t r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_set1_epi32(start[r]);
    for (std::size_t i = 0; i < fragments; ++i) {
      __m256i bytes[4];
      levels.template read<0>(i, bytes);
      multiply<R, typename Levels::Reader>(bytes, numbers + 16 * i, stride, sums);
      levels.template read<1>(i, bytes);
      multiply<R, typename Levels::Reader>(bytes, numbers + 16 * i + 8, stride, sums);
    }
  }

  // One tile.
  template <std::size_t R, class Levels>
  [[gnu::always_inline]] static void score_rows(const CodedPart& part, const Levels& levels, std::size_t tile,
                                                const std::int16_t* numbers, const std::int32_t* start,
                                                const float* step, const float* shared, const float* factor,
                                                float* logits, std::size_t stride) {
    const __m256 most = _mm256_set1_ps(3.402823466e38f), least = _mm256_set1_ps(-3.402823466e38f);
    __m256i sums[R][2];
    multiply_run<R>(levels, part.dim / 16, numbers, part.dim, start, sums);
    TURBOQUANT_UNROLL
    for (std::size_t h = 0; h < 2; ++h) {
      const __m256 scales = widen8(part.scales + tile * 16 + h * 8);
      TURBOQUANT_UNROLL
      for (std::size_t r = 0; r < R; ++r) {
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(step[r]), scales);
        __m256 x = _mm256_add_ps(_mm256_mul_ps(scale, _mm256_cvtepi32_ps(sums[r][h])), _mm256_set1_ps(shared[r]));
        x = _mm256_mul_ps(x, _mm256_set1_ps(factor[r]));
        _mm256_storeu_ps(logits + r * stride + tile * 16 + h * 8, _mm256_min_ps(_mm256_max_ps(x, least), most));
      }
    }
  }

  // One group of 16 coordinates. numbers: [R][kMaxPage].
  template <std::size_t R, class Levels>
  [[gnu::always_inline]] static void accumulate_rows(const Levels& levels, std::size_t fragments,
                                                     const std::int16_t* numbers, const std::int32_t* start,
                                                     const WeightSums* rows, const float* center, float* out,
                                                     std::size_t out_stride) {
    __m256i sums[R][2];
    multiply_run<R>(levels, fragments, numbers, kMaxPage, start, sums);
    TURBOQUANT_UNROLL
    for (std::size_t r = 0; r < R; ++r) {
      if (!(rows[r].probability > 0)) continue;
      TURBOQUANT_UNROLL
      for (std::size_t h = 0; h < 2; ++h) {
        float* to = out + r * out_stride + h * 8;
        const __m256 codes_part = _mm256_mul_ps(_mm256_set1_ps(rows[r].coefficient), _mm256_cvtepi32_ps(sums[r][h]));
        const __m256 rest =
            _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(rows[r].probability), _mm256_load_ps(center + h * 8)),
                          _mm256_set1_ps(rows[r].zero_point));
        _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_add_ps(codes_part, rest)));
      }
    }
  }

  // Dot products of `a` with N rows b[n][dim], dim a multiple of 16: 16 partial sums each, then a tree, as the portable
  // one.
  template <std::size_t N>
  [[gnu::always_inline]] static void dot_rows(const float* a, const float* b, std::size_t dim, float* dots) {
    __m256 low[N], high[N];
    TURBOQUANT_UNROLL
    for (std::size_t n = 0; n < N; ++n) low[n] = high[n] = _mm256_setzero_ps();
    for (std::size_t i = 0; i < dim; i += 16) {
      const __m256 first = _mm256_loadu_ps(a + i), second = _mm256_loadu_ps(a + i + 8);
      TURBOQUANT_UNROLL
      for (std::size_t n = 0; n < N; ++n) {
        low[n] = _mm256_add_ps(low[n], _mm256_mul_ps(first, _mm256_loadu_ps(b + n * dim + i)));
        high[n] = _mm256_add_ps(high[n], _mm256_mul_ps(second, _mm256_loadu_ps(b + n * dim + i + 8)));
      }
    }
    TURBOQUANT_UNROLL
    for (std::size_t n = 0; n < N; ++n) dots[n] = tree(low[n], high[n]);
  }
  static float dot(const float* a, const float* b, std::size_t dim) {
    float result = 0;
    dot_rows<1>(a, b, dim, &result);
    return result;
  }
  static float tree(__m256 low, __m256 high) {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
