// Rotating and encoding on x86 with AVX2, the other half of kernels/x86_avx2.hpp.
#pragma once

#include <turboquant/kernels/portable.hpp>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// The region is that of x86_avx2.hpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

namespace turboquant::kernels {

/// The rotating and encoding kernels of portable.hpp for AVX2: the portable text, compiled for this target, around a
/// butterfly and a path search of its own.
template <class V>
struct Avx2Encoders : PortableKernels<V> {
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

 private:
  using Base = PortableKernels<V>;
  using Trellis = PortableTrellis<Avx2Encoders>;
  friend Trellis;

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
