// Rotating and encoding on x86 with AVX-512, the other half of kernels/x86_avx512.hpp.
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

// The region is that of x86_avx512.hpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi"))), \
                             apply_to = function)
#else
// g++ 12 takes the undefined registers in its own intrinsics for a fault.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wsign-conversion"  // intrinsics that are macros without optimisation
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")
#endif

namespace turboquant::kernels {

/// The rotating and encoding kernels of portable.hpp for AVX-512: butterflies, the choice of levels and the path search
/// by hand, the rest of the portable text compiled for this target.
template <class Unit>
struct Avx512Encoders : PortableKernels<Unit> {
  // ---- rotation

  [[gnu::flatten]] static void rotate(const RotationView& r, const float* in, float* out) {
    Base::rotate_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }
  [[gnu::flatten]] static void rotate_back(const RotationView& r, const float* in, float* out) {
    Base::rotate_back_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }

  [[gnu::flatten]] static void prepare_query(const RotationView& rotation, const float* q, QueryBlock& block,
                                             std::size_t r) {
    Base::prepare_query_by(rotation, q, block, r,
                           [](const RotationView& v, const float* in, float* out) { rotate(v, in, out); });
  }

  // ---- encoding

  [[gnu::flatten]] static bfloat16 center_rows(float* rows, std::size_t count, std::size_t dim, unsigned bits,
                                               std::uint8_t* center) {
    return Base::center_rows(rows, count, dim, bits, center);
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

  /// As PortableEncoders::encode_levels: the same integers, 32 coordinates at a time.
  template <unsigned B>
  static bfloat16 encode_levels(const float* x, std::size_t dim, const std::int8_t* magnitudes, double spread,
                                ScaleRule rule, bool search, std::uint8_t* codes) {
    constexpr std::size_t kHalf = std::size_t{1} << (B - 1), kSteps = kHalf - 1;
    alignas(64) std::int16_t fixed[kMaxRow];
    const Fixed row = round_row(x, dim, fixed);
    if (row.energy == 0) {
      std::memset(codes, static_cast<int>(kHalf), dim);
      return bfloat16{0};
    }
    const double base = std::sqrt(static_cast<double>(row.energy) / static_cast<double>(dim)) / spread;
    alignas(64) double middles[8] = {};
    __m512i steps[kHalf];
    for (std::size_t k = 0; k < kSteps; ++k) {
      middles[k] = 0.5 * (magnitudes[k] + magnitudes[k + 1]);
      steps[k] = _mm512_set1_epi16(static_cast<std::int16_t>(magnitudes[k + 1] - magnitudes[k]));
    }
    const __m512i lowest = _mm512_set1_epi16(magnitudes[0]);
    __m512i above[kHalf], best_above[kHalf];  // a coordinate reaches level k + 1 if its magnitude is above above[k]
    for (std::size_t k = 0; k < kSteps; ++k) best_above[k] = _mm512_setzero_si512();
    double best = -1, best_dot = 0, best_norm = 1;
    for (std::size_t g = 0; g < (search && B > 1 ? std::size(Base::kSearchGrid) : 1); ++g) {
      const __m512d unit = _mm512_set1_pd(base * (search ? Base::kSearchGrid[g] : 1.0));
      const __m512d thresholds = _mm512_min_pd(
          _mm512_roundscale_pd(_mm512_mul_pd(unit, _mm512_load_pd(middles)), kUpwards), _mm512_set1_pd(32767.0));
      alignas(32) std::int32_t whole[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(whole), _mm512_cvtpd_epi32(thresholds));
      for (std::size_t k = 0; k < kSteps; ++k) {
        above[k] = _mm512_set1_epi16(static_cast<std::int16_t>(whole[k] - 1));
      }
      __m512i dots = _mm512_setzero_si512(), norms = dots;
      for (std::size_t i = 0; i < dim; i += 32) {
        const __mmask32 live = dim - i < 32 ? 0xffffu : 0xffffffffu;
        const __m512i magnitude = _mm512_abs_epi16(_mm512_load_si512(fixed + i));
        __m512i level = _mm512_maskz_mov_epi16(live, lowest);
        for (std::size_t k = 0; k < kSteps; ++k) {
          level = _mm512_mask_add_epi16(level, _mm512_cmpgt_epi16_mask(magnitude, above[k]), level, steps[k]);
        }
        // Sums of at most 64 products of 32767 * 127 per lane.
        dots = _mm512_add_epi32(dots, _mm512_madd_epi16(magnitude, level));
        norms = _mm512_add_epi32(norms, _mm512_madd_epi16(level, level));
      }
      const auto d = static_cast<double>(wide_sum(dots)), n = static_cast<double>(wide_sum(norms));
      const double quality = d * d / n;
      if (quality > best) {
        best = quality, best_dot = d, best_norm = n;
        for (std::size_t k = 0; k < kSteps; ++k) best_above[k] = above[k];
      }
    }
    for (std::size_t i = 0; i < dim; i += 32) {
      const __m512i value = _mm512_load_si512(fixed + i), magnitude = _mm512_abs_epi16(value);
      __m512i index = _mm512_setzero_si512();
      for (std::size_t k = 0; k < kSteps; ++k) {
        index = _mm512_mask_add_epi16(index, _mm512_cmpgt_epi16_mask(magnitude, best_above[k]), index,
                                      _mm512_set1_epi16(1));
      }
      // Negative ones count downwards: -1 - index.
      const __m512i code = _mm512_add_epi16(_mm512_xor_si512(index, _mm512_srai_epi16(value, 15)),
                                            _mm512_set1_epi16(static_cast<std::int16_t>(kHalf)));
      const __m256i bytes = _mm512_cvtepi16_epi8(code);
      if (dim - i < 32) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm256_castsi256_si128(bytes));
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes);
      }
    }
    return Base::final_scale(row, best_dot, best_norm, rule);
  }

  /// As PortableTrellis::find_trellis_path.
  template <unsigned B>
  static void find_trellis_path(const std::int16_t* target, std::size_t length, const std::int16_t* levels,
                                unsigned start, unsigned end, std::uint8_t* back, std::uint8_t* path) {
    const Search search{target, start, end, back, path};
    find_paths<B, 1>(&search, length, levels);
  }

  /// As PortableTrellis::find_closed_trellis_paths.
  template <unsigned B>
  static void find_closed_trellis_paths(const std::int16_t* targets, std::size_t count, std::size_t length,
                                        const std::int16_t* levels, std::uint8_t* back, std::uint8_t* paths) {
    while (count >= 3) {
      find_closed_paths<B, 3>(targets, length, levels, back, paths);
      targets += 3 * length, paths += 3 * length, count -= 3;
    }
    for (; count > 0; --count, targets += length, paths += length) {
      find_closed_paths<B, 1>(targets, length, levels, back, paths);
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
  using Trellis = PortableTrellis<Avx512Encoders>;
  friend Trellis;
  using Fixed = typename Base::Fixed;
  using Base::kMaxRow;

  static constexpr int kUpwards = 0x0a;  // of roundscale: towards plus infinity, no exception

  // to_fixed, and zeros from dim to the next multiple of 32. fixed: aligned to 64.
  static Fixed round_row(const float* x, std::size_t dim, std::int16_t* fixed) {
    __m512i most = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (std::size_t i = 0; i < dim; i += 16) {
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    }
    const std::uint32_t largest = _mm512_reduce_max_epu32(most);
    const int e = (std::max)(Base::exponent(std::bit_cast<float>(largest)), -112);
    const __m512 up = _mm512_set1_ps(Base::power_of_two(14 - e));
    const __m512i limit = _mm512_set1_epi32(32767), lower_limit = _mm512_set1_epi32(-32767);
    __m512i energy = _mm512_setzero_si512();
    for (std::size_t i = 0; i < dim; i += 16) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), up));
      const __m256i row = _mm512_cvtepi32_epi16(_mm512_max_epi32(_mm512_min_epi32(whole, limit), lower_limit));
      _mm256_store_si256(reinterpret_cast<__m256i*>(fixed + i), row);
      // Pairs of squares stay below 2^31.
      energy = _mm512_add_epi64(energy, _mm512_cvtepu32_epi64(_mm256_madd_epi16(row, row)));
    }
    if (dim % 32 != 0) _mm256_store_si256(reinterpret_cast<__m256i*>(fixed + dim), _mm256_setzero_si256());
    return {std::ldexp(1.0, e - 14), _mm512_reduce_add_epi64(energy)};
  }

  // Sum of the 16 numbers, which need not fit 32 bits.
  static std::int64_t wide_sum(__m512i x) {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(x)),
                                                    _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(x, 1))));
  }

  // In-place Walsh-Hadamard transform, butterflies of growing distance, as the portable one.
  static void sylvester(float* x, std::size_t n) {
    if (n < 16) {
      Base::sylvester(x, n);
      return;
    }
    for (std::size_t i = 0; i < n; i += 16) {
      __m512 v = _mm512_loadu_ps(x + i);
      v = butterfly(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
      v = butterfly(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
      v = butterfly(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
      v = butterfly(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
      _mm512_storeu_ps(x + i, v);
    }
    for (std::size_t h = 16; h < n; h *= 2) {
      for (std::size_t block = 0; block < n; block += 2 * h) {
        for (std::size_t i = block; i < block + h; i += 16) {
          const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + h);
          _mm512_storeu_ps(x + i, _mm512_add_ps(a, b));
          _mm512_storeu_ps(x + i + h, _mm512_sub_ps(a, b));
        }
      }
    }
  }
  // v + other; where `second` is set, v is the second of a pair: other - v.
  static __m512 butterfly(__m512 v, __m512 other, __mmask16 second) {
    return _mm512_mask_sub_ps(_mm512_add_ps(v, other), second, other, v);
  }

  // One search for a path; its arguments are those of find_trellis_path.
  struct Search {
    const std::int16_t* target;
    unsigned start, end;
    std::uint8_t* back;
    std::uint8_t* path;
  };

  // kCount searches of the same length side by side: each step waits for the one before, so that one alone leaves most
  // of the machine idle.
  template <unsigned B, std::size_t kCount>
  static void find_paths(const Search* searches, std::size_t length, const std::int16_t* levels) {
    if constexpr (B == 4) {
      for (std::size_t n = 0; n < kCount; ++n) find_path_of_16(searches[n], length, levels);
    } else {
      constexpr unsigned kStates = TrellisCodes<B>::states, kBranches = 1u << B, kVectors = kStates / 32;
      const __m512i nothing = _mm512_set1_epi16(kNothing), unreached = _mm512_set1_epi16(kUnreached);
      alignas(64) std::int16_t numbers[32];
      for (unsigned i = 0; i < 32; ++i) numbers[i] = static_cast<std::int16_t>(i >> B);
      const __m512i spread = _mm512_load_si512(numbers);
      __m512i cost[kCount][kVectors];
      for (std::size_t n = 0; n < kCount; ++n) {
        for (unsigned v = 0; v < kVectors; ++v) {
          const unsigned start = searches[n].start;
          const __mmask32 at = start / 32 == v ? 1u << start % 32 : 0u;
          cost[n][v] = start == Base::kAnyState ? nothing : _mm512_mask_mov_epi16(unreached, at, nothing);
        }
      }
      for (std::size_t i = 0; i < length; ++i) {
        for (std::size_t n = 0; n < kCount; ++n) {
          const __m512i aim = _mm512_set1_epi16(searches[n].target[i]);
          __m512i best[kVectors], from[kVectors];
          for (unsigned top = 0; top < kBranches; ++top) {
            for (unsigned v = 0; v < kVectors; ++v) {
              // The states that 32 successive windows come from, each for 2^B windows.
              const unsigned window = top * kStates + 32 * v, state = window >> B;
              const __m512i before = _mm512_permutexvar_epi16(
                  _mm512_add_epi16(spread, _mm512_set1_epi16(static_cast<std::int16_t>(state % 32))),
                  cost[n][state / 32]);
              const __m512i difference = _mm512_sub_epi16(aim, _mm512_loadu_si512(levels + window));
              const __m512i arriving = _mm512_add_epi16(before, _mm512_mulhi_epi16(difference, difference));
              if (top == 0) {
                best[v] = arriving;
                from[v] = _mm512_setzero_si512();
              } else {
                const __mmask32 better = _mm512_cmplt_epi16_mask(arriving, best[v]);
                best[v] = _mm512_min_epi16(best[v], arriving);
                from[v] = _mm512_mask_mov_epi16(from[v], better, _mm512_set1_epi16(static_cast<std::int16_t>(top)));
              }
            }
          }
          __m512i least = best[0];
          for (unsigned v = 1; v < kVectors; ++v) least = _mm512_min_epi16(least, best[v]);
          const __m512i excess = i < 3 ? _mm512_setzero_si512() : least_of(least);
          for (unsigned v = 0; v < kVectors; ++v) {
            cost[n][v] = _mm512_min_epi16(_mm512_sub_epi16(best[v], excess), unreached);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(searches[n].back + i * kStates + 32 * v),
                                _mm512_cvtepi16_epi8(from[v]));
          }
        }
      }
      unsigned state[kCount];
      for (std::size_t n = 0; n < kCount; ++n) {
        alignas(64) std::int16_t sums[kStates];
        for (unsigned v = 0; v < kVectors; ++v) _mm512_store_si512(sums + 32 * v, cost[n][v]);
        state[n] = searches[n].end == Base::kAnyState ? 0 : searches[n].end;
        for (unsigned other = 1; other < kStates && searches[n].end == Base::kAnyState; ++other) {
          state[n] = sums[other] < sums[state[n]] ? other : state[n];
        }
      }
      for (std::size_t i = length; i-- > 0;) {
        for (std::size_t n = 0; n < kCount; ++n) {
          searches[n].path[i] = static_cast<std::uint8_t>(state[n] & (kBranches - 1));
          state[n] = static_cast<unsigned>(searches[n].back[i * kStates + state[n]]) << (8 - 2 * B) | state[n] >> B;
        }
      }
    }
  }

  template <unsigned B, std::size_t kCount>
  static void find_closed_paths(const std::int16_t* targets, std::size_t length, const std::int16_t* levels,
                                std::uint8_t* back, std::uint8_t* paths) {
    constexpr std::size_t kSeam = Trellis::kTrellisSeam;
    std::int16_t around[kCount][2 * kSeam];
    Search searches[kCount];
    for (std::size_t n = 0; n < kCount; ++n) {
      const std::int16_t* target = targets + n * length;
      std::copy_n(target + length - kSeam, kSeam, around[n]);
      std::copy_n(target, kSeam, around[n] + kSeam);
      searches[n] = {around[n], Base::kAnyState, Base::kAnyState, back + n * length * TrellisCodes<B>::states,
                     paths + n * length};
    }
    find_paths<B, kCount>(searches, 2 * kSeam, levels);
    for (std::size_t n = 0; n < kCount; ++n) {
      const unsigned seam = Trellis::template state_after<B>(searches[n].path, kSeam);
      searches[n].target = targets + n * length;
      searches[n].start = searches[n].end = seam;
    }
    find_paths<B, kCount>(searches, length, levels);
  }

  // 16 states of 16 windows each: half a register, and not a recommended format.
  [[gnu::flatten]] static void find_path_of_16(const Search& s, std::size_t length, const std::int16_t* levels) {
    Base::template find_trellis_path<4>(s.target, length, levels, s.start, s.end, s.back, s.path);
  }

  static constexpr std::int16_t kNothing = -32768, kUnreached = kNothing + 49151;  // as the portable search

  // The least of 32 sums, less kNothing, in all lanes.
  static __m512i least_of(__m512i sums) {
    const __m256i half = _mm256_min_epi16(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    const __m128i quarter = _mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    // As unsigned numbers, for the horizontal minimum.
    return _mm512_broadcastw_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(kNothing))));
  }
};

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif

#endif
