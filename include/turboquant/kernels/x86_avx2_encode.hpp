// Rotating and encoding on x86 with AVX2, the other half of kernels/x86_avx2.hpp.
#pragma once

#include <turboquant/kernels/portable.hpp>

#if defined(TURBOQUANT_MAKES_X86_KERNELS)

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

// The region is that of x86_avx2.hpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

// Before a loop over registers: unrolled also where the compiler would not do so on its own, as at -O2. In force until
// the end of x86_avx2.hpp.
#if defined(__clang__)
#define TURBOQUANT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TURBOQUANT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace turboquant::kernels {

/// The rotating and encoding kernels of portable.hpp for AVX2: butterflies, the choice of levels and the path search by
/// hand, the rest of the portable text compiled for this target.
template <class Unit>
struct Avx2Encoders : PortableKernels<Unit> {
  // ---- rotation

  [[gnu::flatten]] static void rotate(const RotationView& r, const float* in, float* out) {
    Base::rotate_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }
  [[gnu::flatten]] static void rotate_back(const RotationView& r, const float* in, float* out) {
    Base::rotate_back_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }

  [[gnu::flatten]] static void prepare_queries(const RotationView& rotation, QueryBlock& block) {
    Base::prepare_queries_by(rotation, block,
                             [](const RotationView& v, const float* in, float* out) { rotate(v, in, out); });
  }

  // ---- encoding

  [[gnu::flatten]] static bfloat16 center_rows(float* rows, std::size_t count, std::size_t dim, unsigned bits,
                                               std::uint8_t* center) {
    return Base::center_rows(rows, count, dim, bits, center);
  }
  [[gnu::flatten]] static void narrow_row(const void* in, std::size_t dim, bfloat16* out) {
    Base::narrow_row(in, dim, out);
  }
  [[gnu::flatten]] static void subtract_center(float* rows, std::size_t count, const CodedPart& part) {
    Base::subtract_center(rows, count, part);
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

  /// As PortableEncoders::encode_levels: the same integers, 16 coordinates at a time.
  template <unsigned B>
  static bfloat16 encode_levels(const float* x, std::size_t dim, const std::int8_t* magnitudes, double spread,
                                ScaleRule rule, bool search, std::uint8_t* codes) {
    constexpr std::size_t kHalf = std::size_t{1} << (B - 1), kSteps = kHalf - 1;
    alignas(32) std::int16_t fixed[kMaxRow];
    const Fixed row = round_row(x, dim, fixed);
    if (row.energy == 0) {
      std::memset(codes, static_cast<int>(kHalf), dim);
      return bfloat16{0};
    }
    const double base = std::sqrt(static_cast<double>(row.energy) / static_cast<double>(dim)) / spread;
    alignas(32) double middles[8] = {};
    __m256i steps[kHalf];
    for (std::size_t k = 0; k < kSteps; ++k) {
      middles[k] = 0.5 * (magnitudes[k] + magnitudes[k + 1]);
      steps[k] = _mm256_set1_epi16(static_cast<std::int16_t>(magnitudes[k + 1] - magnitudes[k]));
    }
    const __m256i lowest = _mm256_set1_epi16(magnitudes[0]);
    __m256i best_above[kHalf];  // a coordinate reaches level k + 1 if its magnitude is above above[k]
    for (std::size_t k = 0; k < kSteps; ++k) best_above[k] = _mm256_setzero_si256();
    double best = -1, best_dot = 0, best_norm = 1;
    for (std::size_t g = 0; g < (search && B > 1 ? std::size(Base::kSearchGrid) : 1); ++g) {
      __m256i above[kHalf];
      list_thresholds<B>(_mm256_set1_pd(base * (search ? Base::kSearchGrid[g] : 1.0)), middles, above);
      __m256i dots = _mm256_setzero_si256(), norms = dots;
      for (std::size_t i = 0; i < dim; i += 16) {
        const __m256i magnitude = _mm256_abs_epi16(load(fixed + i));
        __m256i level = lowest;
        TURBOQUANT_UNROLL
        for (std::size_t k = 0; k < kSteps; ++k) {
          level = _mm256_add_epi16(level, _mm256_and_si256(_mm256_cmpgt_epi16(magnitude, above[k]), steps[k]));
        }
        // Sums of at most 128 products of 32767 * 127 per lane.
        dots = _mm256_add_epi32(dots, _mm256_madd_epi16(magnitude, level));
        norms = _mm256_add_epi32(norms, _mm256_madd_epi16(level, level));
      }
      const auto d = static_cast<double>(wide_sum(dots)), n = static_cast<double>(wide_sum(norms));
      const double quality = d * d / n;
      if (quality > best) {
        best = quality, best_dot = d, best_norm = n;
        for (std::size_t k = 0; k < kSteps; ++k) best_above[k] = above[k];
      }
    }
    for (std::size_t i = 0; i < dim; i += 16) {
      const __m256i value = load(fixed + i), magnitude = _mm256_abs_epi16(value);
      __m256i index = _mm256_setzero_si256();
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < kSteps; ++k) {
        index = _mm256_sub_epi16(index, _mm256_cmpgt_epi16(magnitude, best_above[k]));
      }
      // Negative ones count downwards: -1 - index.
      const __m256i code = _mm256_add_epi16(_mm256_xor_si256(index, _mm256_srai_epi16(value, 15)),
                                            _mm256_set1_epi16(static_cast<std::int16_t>(kHalf)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i),
                       _mm_packs_epi16(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1)));
    }
    return Base::final_scale(row, best_dot, best_norm, rule);
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

 protected:
  using Base = PortableKernels<Unit>;
  using Trellis = PortableTrellis<Avx2Encoders>;
  friend Trellis;
  using Fixed = typename Base::Fixed;
  using Base::kMaxRow;

  static __m256i load(const std::int16_t* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }

  // to_fixed. fixed: aligned to 32.
  static Fixed round_row(const float* x, std::size_t dim, std::int16_t* fixed) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), lower_limit = _mm256_set1_epi16(-32767);
    __m256i most = _mm256_setzero_si256();
    for (std::size_t i = 0; i < dim; i += 8) {
      most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
    }
    alignas(32) std::uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
    const std::uint32_t largest = *std::max_element(lanes, lanes + 8);
    const int e = (std::max)(Base::exponent(std::bit_cast<float>(largest)), -112);
    const __m256 up = _mm256_set1_ps(Base::power_of_two(14 - e));
    __m256i energy = _mm256_setzero_si256();
    for (std::size_t i = 0; i < dim; i += 16) {
      const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), up));
      const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), up));
      const __m256i row = _mm256_max_epi16(_mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8), lower_limit);
      _mm256_store_si256(reinterpret_cast<__m256i*>(fixed + i), row);
      // Pairs of squares stay below 2^31.
      const __m256i squares = _mm256_madd_epi16(row, row);
      energy = _mm256_add_epi64(energy, _mm256_add_epi64(_mm256_srli_epi64(squares, 32),
                                                         _mm256_blend_epi32(squares, _mm256_setzero_si256(), 0xaa)));
    }
    return {std::ldexp(1.0, e - 14), sum_of_64(energy)};
  }

  // above[k] = ceil(unit * middles[k]) - 1, at most 32766. middles: eight, aligned to 32.
  template <unsigned B>
  static void list_thresholds(__m256d unit, const double* middles, __m256i* above) {
    alignas(16) std::int32_t whole[8];
    for (std::size_t k = 0; k < 8; k += 4) {
      const __m256d up = _mm256_ceil_pd(_mm256_mul_pd(unit, _mm256_load_pd(middles + k)));
      _mm_store_si128(reinterpret_cast<__m128i*>(whole + k),
                      _mm256_cvtpd_epi32(_mm256_min_pd(up, _mm256_set1_pd(32767.0))));
    }
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k + 1 < std::size_t{1} << (B - 1); ++k) {
      above[k] = _mm256_set1_epi16(static_cast<std::int16_t>(whole[k] - 1));
    }
  }

  static std::int64_t sum_of_64(__m256i x) {
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return _mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)));
  }
  // Sum of the 8 numbers, which need not fit 32 bits.
  static std::int64_t wide_sum(__m256i x) {
    return sum_of_64(_mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(x)),
                                      _mm256_cvtepi32_epi64(_mm256_extracti128_si256(x, 1))));
  }

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
};

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
