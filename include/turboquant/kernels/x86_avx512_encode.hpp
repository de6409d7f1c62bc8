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

// As in x86_avx2_encode.hpp.
#if defined(__clang__)
#define TURBOQUANT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TURBOQUANT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace turboquant::kernels {

/// The rotating and encoding kernels of portable.hpp for AVX-512: butterflies, the choice of levels and the path search
/// by hand, the rest of the portable text compiled for this target.
template <class Unit>
struct Avx512Encoders : PortableKernels<Unit> {
  // ---- rotation

  static void rotate(const RotationView& r, const float* in, float* out) {
    const float back = normalize<true>(in, r.signs, r.dim, out);
    Base::transform(r, out, false, [](float* x, std::size_t n) { sylvester(x, n); });
    scale_back<false>(nullptr, r.dim, out, back);
  }
  static void rotate_back(const RotationView& r, const float* in, float* out) {
    const float back = normalize<false>(in, nullptr, r.dim, out);
    Base::transform(r, out, true, [](float* x, std::size_t n) { sylvester(x, n); });
    scale_back<true>(r.signs, r.dim, out, back);
  }

  static void prepare_queries(const RotationView& rotation, QueryBlock& block) {
    const bool fits = rotation.order == 1 && block.plane_count == 1;
    std::size_t r = 0;
    if (fits && block.dim == 64) prepare_rows<4>(rotation, block, r);
    if (fits && block.dim == 128) prepare_rows<8>(rotation, block, r);
    for (; r < block.rows; ++r) prepare_query(rotation, block, r);
  }

  // ---- encoding

  [[gnu::flatten]] static bfloat16 center_rows(float* rows, std::size_t count, std::size_t dim, unsigned bits,
                                               std::uint8_t* center) {
    return Base::center_rows(rows, count, dim, bits, center);
  }
  static void narrow_row(const void* in, std::size_t dim, bfloat16* out) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
    for (std::size_t i = 0; i < dim; i += 16) {
      const __m512i bits = _mm512_loadu_si512(static_cast<const std::uint8_t*>(in) + i * sizeof(float));
      const __m512i high = _mm512_srli_epi32(bits, 16);
      const __m512i carry = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
      const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
      const __mmask16 nan = _mm512_cmpgt_epi32_mask(_mm512_and_si512(bits, magnitude), infinity);
      const __m512i result = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi32_epi16(result));
    }
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

  /// As PortableEncoders::encode_levels: the same integers, 32 coordinates at a time. A level is found by halving: the
  /// thresholds of the three decisions come from tables, by the index so far.
  template <unsigned B>
  static bfloat16 encode_levels(const float* x, std::size_t dim, const std::int8_t* magnitudes, double spread,
                                ScaleRule rule, bool search, std::uint8_t* codes) {
    constexpr std::size_t kHalf = std::size_t{1} << (B - 1), kTries = std::size(Base::kSearchGrid);
    alignas(64) std::int16_t fixed[kMaxRow], absolute[kMaxRow];
    const Fixed row = round_row(x, dim, fixed);
    if (row.energy == 0) {
      std::memset(codes, static_cast<int>(kHalf), dim);
      return bfloat16{0};
    }
    for (std::size_t i = 0; i < dim; i += 32) {
      _mm512_store_si512(absolute + i, _mm512_abs_epi16(_mm512_load_si512(fixed + i)));
    }
    const double base = std::sqrt(static_cast<double>(row.energy) / static_cast<double>(dim)) / spread;
    alignas(64) double middles[8] = {};
    alignas(64) std::int16_t whole[32] = {};
    for (std::size_t k = 0; k < kHalf; ++k) whole[k] = magnitudes[k];
    for (std::size_t k = 0; k + 1 < kHalf; ++k) middles[k] = 0.5 * (magnitudes[k] + magnitudes[k + 1]);
    const __m512i levels = _mm512_load_si512(whole);
    const std::size_t tries = search && B > 1 ? kTries : 1;
    const auto thresholds_of = [&](std::size_t g) {
      const __m512d unit = _mm512_set1_pd(base * (search ? Base::kSearchGrid[g] : 1.0));
      return Thresholds<kHalf>(_mm512_min_pd(
          _mm512_roundscale_pd(_mm512_mul_pd(unit, _mm512_load_pd(middles)), kUpwards), _mm512_set1_pd(32767.0)));
    };
    alignas(64) double dot[16], norm[16], quality[16];
    for (std::size_t first = 0; first < tries; first += 8) {
      __m512d dots[8], norms[8];
      for (std::size_t k = 0; k < 8; ++k) dots[k] = norms[k] = _mm512_set1_pd(1);
      for (std::size_t k = 0; k < 8 && first + k < tries; ++k) {
        const Thresholds<kHalf> t = thresholds_of(first + k);
        __m512i d = _mm512_setzero_si512(), n = d;
        for (std::size_t i = 0; i < dim; i += 32) {
          const __m512i magnitude = _mm512_load_si512(absolute + i);
          const __m512i level = _mm512_permutexvar_epi16(t.index_of(magnitude), levels);
          // Sums of at most 64 products of 32767 * 127 per lane.
          d = settled(_mm512_dpwssd_epi32(d, magnitude, level));
          n = settled(_mm512_dpwssd_epi32(n, level, level));
        }
        dots[k] = halves(d);
        norms[k] = halves(n);
      }
      // Behind the row lie zeros, at the lowest level.
      const double behind = dim % 32 != 0 ? 16.0 * magnitudes[0] * magnitudes[0] : 0.0;
      const __m512d d = totals(dots), n = _mm512_sub_pd(totals(norms), _mm512_set1_pd(behind));
      _mm512_store_pd(dot + first, d);
      _mm512_store_pd(norm + first, n);
      _mm512_store_pd(quality + first, _mm512_div_pd(_mm512_mul_pd(d, d), n));
    }
    std::size_t best = 0;
    for (std::size_t g = 1; g < tries; ++g) best = quality[g] > quality[best] ? g : best;
    const Thresholds<kHalf> t = thresholds_of(best);
    for (std::size_t i = 0; i < dim; i += 32) {
      const __m512i index = t.index_of(_mm512_load_si512(absolute + i));
      // Negative ones count downwards: -1 - index.
      const __m512i sign = _mm512_srai_epi16(_mm512_load_si512(fixed + i), 15);
      const __m512i code =
          _mm512_add_epi16(_mm512_xor_si512(index, sign), _mm512_set1_epi16(static_cast<std::int16_t>(kHalf)));
      const __m256i bytes = _mm512_cvtepi16_epi8(code);
      if (dim - i < 32) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm256_castsi256_si128(bytes));
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes);
      }
    }
    return Base::final_scale(row, dot[best], norm[best], rule);
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
    const int e = (std::max)(Base::exponent(largest_magnitude(x, dim)), -112);
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

  // g++ would keep old and new sums in registers of their own and copy them at the end of each round.
  [[gnu::always_inline]] static __m512i settled(__m512i sum) {
    __asm__("" : "+v"(sum));
    return sum;
  }

  // Where levels begin: a magnitude has at least index k + 1 if it is above the k-th number, which do not fall.
  template <std::size_t kHalf>
  struct Thresholds {
    __m512i at[3];  // what decides about 4, 2 and 1 more, by the index so far

    explicit Thresholds(__m512d lowest) {
      const __m128i one = _mm_set1_epi16(1);
      const __m512i above =
          _mm512_castsi128_si512(_mm_sub_epi16(_mm256_cvtepi32_epi16(_mm512_cvtpd_epi32(lowest)), one));
      if constexpr (kHalf > 4) at[0] = _mm512_permutexvar_epi16(_mm512_set1_epi16(3), above);
      at[2] = above;
      if constexpr (kHalf > 2) at[1] = _mm512_permutexvar_epi16(odd(), above);
    }
    // The number behind an index, for the indices 0 to 6.
    static __m512i odd() { return _mm512_castsi128_si512(_mm_setr_epi16(1, 2, 3, 4, 5, 6, 7, 7)); }

    __m512i index_of(__m512i magnitude) const {
      __m512i index = _mm512_setzero_si512();
      if constexpr (kHalf > 4) {
        index = _mm512_maskz_mov_epi16(_mm512_cmpgt_epi16_mask(magnitude, at[0]), _mm512_set1_epi16(4));
      }
      if constexpr (kHalf > 2) {
        const __m512i second = _mm512_permutexvar_epi16(index, at[1]);
        index = _mm512_mask_add_epi16(index, _mm512_cmpgt_epi16_mask(magnitude, second), index, _mm512_set1_epi16(2));
      }
      if constexpr (kHalf > 1) {
        const __m512i third = _mm512_permutexvar_epi16(index, at[2]);
        index = _mm512_mask_add_epi16(index, _mm512_cmpgt_epi16_mask(magnitude, third), index, _mm512_set1_epi16(1));
      }
      return index;
    }
  };

  // 16 integers as eight sums of two, exactly; and the sums of eight such vectors, in order.
  static __m512d halves(__m512i x) {
    return _mm512_add_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(x)),
                         _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(x, 1)));
  }
  static __m512d totals(const __m512d (&x)[8]) {
    __m512d fours[4], twos[2];
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < 4; ++k) {
      fours[k] = _mm512_add_pd(_mm512_unpacklo_pd(x[2 * k], x[2 * k + 1]), _mm512_unpackhi_pd(x[2 * k], x[2 * k + 1]));
    }
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < 2; ++k) {
      const __m512d a = fours[2 * k], b = fours[2 * k + 1];
      twos[k] = _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xdd));
    }
    return _mm512_add_pd(_mm512_shuffle_f64x2(twos[0], twos[1], 0x88), _mm512_shuffle_f64x2(twos[0], twos[1], 0xdd));
  }

  static float largest_magnitude(const float* x, std::size_t dim) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (std::size_t i = 0; i < dim; i += 16) {
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    }
    return std::bit_cast<float>(_mm512_reduce_max_epu32(most));
  }

  // As the portable functions of these names; kSigned: the signs of the rotation on the way, exact wherever they come.
  template <bool kSigned>
  static float normalize(const float* in, const float* signs, std::size_t dim, float* out) {
    const int e = (std::min)(Base::exponent(largest_magnitude(in, dim)), 126);
    const __m512 down = _mm512_set1_ps(Base::power_of_two(-e));
    for (std::size_t i = 0; i < dim; i += 16) {
      __m512 x = _mm512_mul_ps(_mm512_loadu_ps(in + i), down);
      if constexpr (kSigned) x = _mm512_mul_ps(x, _mm512_loadu_ps(signs + i));
      _mm512_storeu_ps(out + i, x);
    }
    return Base::power_of_two(e);
  }
  template <bool kSigned>
  static void scale_back(const float* signs, std::size_t dim, float* x, float factor) {
    const __m512 norm = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(dim))), by = _mm512_set1_ps(factor);
    for (std::size_t i = 0; i < dim; i += 16) {
      __m512 v = _mm512_loadu_ps(x + i);
      if constexpr (kSigned) v = _mm512_mul_ps(v, _mm512_loadu_ps(signs + i));
      _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_mul_ps(v, norm), by));
    }
    Base::forget(x);
  }

  // One query, whatever its size and its planes.
  static void prepare_query(const RotationView& rotation, QueryBlock& block, std::size_t r) {
    float* normal = block.normal + r * block.dim;
    float* rotated = block.rotated + r * block.dim;
    std::int8_t* planes = block.planes + r * block.plane_count * block.dim;
    block.unit[r] = normalize<false>(normal, nullptr, block.dim, normal);
    // As rotate, without its scaling by powers of two: it would change no bit of what lies between 1 and 2.
    for (std::size_t i = 0; i < block.dim; i += 16) {
      _mm512_storeu_ps(rotated + i, _mm512_mul_ps(_mm512_loadu_ps(normal + i), _mm512_loadu_ps(rotation.signs + i)));
    }
    Base::transform(rotation, rotated, false, [](float* x, std::size_t n) { sylvester(x, n); });
    scale_back<false>(nullptr, block.dim, rotated, 1.0f);
    const float largest = largest_magnitude(rotated, block.dim);
    const float range = block.plane_count == 1 ? 127.0f : 16319.0f;  // as the portable one
    block.step[r] = largest / range;
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? range / largest : 0.0f);
    const __m512i least = _mm512_set1_epi32(-127), most = _mm512_set1_epi32(127);
    __m512i sum = _mm512_setzero_si512(), low_sum = sum;
    for (std::size_t i = 0; i < block.dim; i += 16) {
      const __m512i level = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(rotated + i), inverse));
      const __m512i one =
          block.plane_count == 1 ? level : _mm512_srai_epi32(_mm512_add_epi32(level, _mm512_set1_epi32(64)), 7);
      const __m512i high = _mm512_min_epi32(_mm512_max_epi32(one, least), most);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(planes + i), _mm512_cvtepi32_epi8(high));
      sum = _mm512_add_epi32(sum, high);
      if (block.plane_count == 1) continue;
      const __m512i rest = _mm512_sub_epi32(level, _mm512_slli_epi32(high, 7));
      const __m512i low = _mm512_min_epi32(_mm512_max_epi32(rest, _mm512_set1_epi32(-64)), _mm512_set1_epi32(63));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(planes + block.dim + i), _mm512_cvtepi32_epi8(low));
      low_sum = _mm512_add_epi32(low_sum, low);
    }
    block.sums[r * block.plane_count] = _mm512_reduce_add_epi32(sum);
    if (block.plane_count == 2) block.sums[2 * r + 1] = _mm512_reduce_add_epi32(low_sum);
  }
  // Queries of one plane that fit into registers, two at a time: every step of one waits for the step before it, which
  // leaves room for another.
  template <std::size_t kVectors>
  static void prepare_rows(const RotationView& rotation, QueryBlock& block, std::size_t& r) {
    for (; r + 2 <= block.rows; r += 2) prepare_vectors<kVectors, 2>(rotation, block, r);
    if (r < block.rows) prepare_vectors<kVectors, 1>(rotation, block, r++);
  }
  template <std::size_t kVectors, std::size_t kRows>
  [[gnu::flatten]] static void prepare_vectors(const RotationView& rotation, QueryBlock& block, std::size_t r) {
    constexpr std::size_t kDim = 16 * kVectors;
    float* normal = block.normal + r * kDim;
    float* rotated = block.rotated + r * kDim;
    std::int8_t* plane = block.planes + r * kDim;
    __m512 v[kRows][kVectors], by[kRows];
    TURBOQUANT_UNROLL
    for (std::size_t n = 0; n < kRows; ++n) {
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < kVectors; ++k) v[n][k] = _mm512_loadu_ps(normal + n * kDim + 16 * k);
      // As normalize, by exponents with their offset of 127.
      const __m512i exponent = _mm512_srli_epi32(largest_magnitude(v[n]), 23);
      const __m512i up = _mm512_min_epi32(_mm512_max_epi32(exponent, _mm512_set1_epi32(1)), _mm512_set1_epi32(253));
      by[n] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), up), 23));
      _mm_store_ss(block.unit + r + n, _mm512_castps512_ps128(_mm512_castsi512_ps(_mm512_slli_epi32(up, 23))));
    }
    TURBOQUANT_UNROLL
    for (std::size_t n = 0; n < kRows; ++n) {
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < kVectors; ++k) {
        v[n][k] = _mm512_mul_ps(v[n][k], by[n]);
        _mm512_storeu_ps(normal + n * kDim + 16 * k, v[n][k]);
        v[n][k] = _mm512_mul_ps(v[n][k], _mm512_loadu_ps(rotation.signs + 16 * k));
      }
      transform_registers(v[n]);
    }
    const __m512 norm = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(kDim))), range = _mm512_set1_ps(127.0f);
    TURBOQUANT_UNROLL
    for (std::size_t n = 0; n < kRows; ++n) {
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < kVectors; ++k) {
        v[n][k] = _mm512_mul_ps(v[n][k], norm);
        _mm512_storeu_ps(rotated + n * kDim + 16 * k, v[n][k]);
      }
      const __m512 largest = _mm512_castsi512_ps(largest_magnitude(v[n]));
      _mm_store_ss(block.step + r + n, _mm512_castps512_ps128(_mm512_div_ps(largest, range)));
      by[n] = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ), range, largest);
    }
    TURBOQUANT_UNROLL
    for (std::size_t n = 0; n < kRows; ++n) {
      __m512i sum = _mm512_setzero_si512();
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < kVectors; ++k) {
        const __m512i level = _mm512_cvtps_epi32(_mm512_mul_ps(v[n][k], by[n]));
        const __m512i bound =
            _mm512_min_epi32(_mm512_max_epi32(level, _mm512_set1_epi32(-127)), _mm512_set1_epi32(127));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(plane + n * kDim + 16 * k), _mm512_cvtepi32_epi8(bound));
        sum = _mm512_add_epi32(sum, bound);
      }
      block.sums[r + n] = _mm512_reduce_add_epi32(sum);
    }
  }
  // Of all lanes, in all lanes, as bits.
  template <std::size_t kVectors>
  static __m512i largest_magnitude(const __m512 (&v)[kVectors]) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most[kVectors];
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < kVectors; ++k) most[k] = _mm512_and_si512(_mm512_castps_si512(v[k]), magnitude);
    TURBOQUANT_UNROLL
    for (std::size_t left = kVectors; left > 1; left /= 2) {
      TURBOQUANT_UNROLL
      for (std::size_t k = 0; k < left / 2; ++k) most[k] = _mm512_max_epu32(most[k], most[k + left / 2]);
    }
    __m512i all = _mm512_max_epu32(most[0], _mm512_shuffle_i64x2(most[0], most[0], 0x4e));
    all = _mm512_max_epu32(all, _mm512_shuffle_i64x2(all, all, 0xb1));
    all = _mm512_max_epu32(all, _mm512_shuffle_epi32(all, _MM_PERM_BADC));
    return _mm512_max_epu32(all, _mm512_shuffle_epi32(all, _MM_PERM_CDAB));
  }

  // In-place Walsh-Hadamard transform, butterflies of growing distance, as the portable one: 128 values at a time in
  // registers.
  static void sylvester(float* x, std::size_t n) {
    if (n < 16) return Base::sylvester(x, n);
    std::size_t done = (std::min)(n, std::size_t{128});
    for (std::size_t i = 0; i < n; i += done) {
      if (done == 128) transform_vectors<8>(x + i);
      if (done == 64) transform_vectors<4>(x + i);
      if (done == 32) transform_vectors<2>(x + i);
      if (done == 16) transform_vectors<1>(x + i);
    }
    for (; done < n; done *= 2) {
      for (std::size_t block = 0; block < n; block += 2 * done) {
        for (std::size_t i = block; i < block + done; i += 16) {
          const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + done);
          _mm512_storeu_ps(x + i, _mm512_add_ps(a, b));
          _mm512_storeu_ps(x + i + done, _mm512_sub_ps(a, b));
        }
      }
    }
  }
  template <std::size_t kVectors>
  static void transform_vectors(float* x) {
    __m512 v[kVectors];
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < kVectors; ++k) v[k] = _mm512_loadu_ps(x + 16 * k);
    transform_registers(v);
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < kVectors; ++k) _mm512_storeu_ps(x + 16 * k, v[k]);
  }
  template <std::size_t kVectors>
  static void transform_registers(__m512 (&v)[kVectors]) {
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < kVectors; ++k) {
      v[k] = butterfly(v[k], _mm512_permute_ps(v[k], 0xb1), 0xaaaa);
      v[k] = butterfly(v[k], _mm512_permute_ps(v[k], 0x4e), 0xcccc);
      v[k] = butterfly(v[k], _mm512_shuffle_f32x4(v[k], v[k], 0xb1), 0xf0f0);
      v[k] = butterfly(v[k], _mm512_shuffle_f32x4(v[k], v[k], 0x4e), 0xff00);
    }
    cross<1>(v);
    cross<2>(v);
    cross<4>(v);
    cross<8>(v);
  }
  // v + other; where `second` is set, v is the second of a pair: other - v. A product with 1 or -1 is exact.
  static __m512 butterfly(__m512 v, __m512 other, __mmask16 second) {
    return _mm512_fmadd_ps(v, _mm512_mask_blend_ps(second, _mm512_set1_ps(1), _mm512_set1_ps(-1)), other);
  }
  // Butterflies between vectors kDistance apart.
  template <std::size_t kDistance, std::size_t kVectors>
  static void cross(__m512 (&v)[kVectors]) {
    TURBOQUANT_UNROLL
    for (std::size_t k = 0; k < kVectors; ++k) {
      if ((k & kDistance) != 0 || k + kDistance >= kVectors) continue;
      const __m512 a = v[k], b = v[k + kDistance];
      v[k] = _mm512_add_ps(a, b);
      v[k + kDistance] = _mm512_sub_ps(a, b);
    }
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
      TURBOQUANT_UNROLL
      for (std::size_t n = 0; n < kCount; ++n) {
        TURBOQUANT_UNROLL
        for (unsigned v = 0; v < kVectors; ++v) {
          const unsigned start = searches[n].start;
          const __mmask32 at = start / 32 == v ? 1u << start % 32 : 0u;
          cost[n][v] = start == Base::kAnyState ? nothing : _mm512_mask_mov_epi16(unreached, at, nothing);
        }
      }
      for (std::size_t i = 0; i < length; ++i) {
        TURBOQUANT_UNROLL
        for (std::size_t n = 0; n < kCount; ++n) {
          const __m512i aim = _mm512_set1_epi16(searches[n].target[i]);
          __m512i best[kVectors], from[kVectors];
          TURBOQUANT_UNROLL
          for (unsigned top = 0; top < kBranches; ++top) {
            TURBOQUANT_UNROLL
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
          TURBOQUANT_UNROLL
          for (unsigned v = 1; v < kVectors; ++v) least = _mm512_min_epi16(least, best[v]);
          const __m512i excess = i < 3 ? _mm512_setzero_si512() : least_of(least);
          TURBOQUANT_UNROLL
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
        TURBOQUANT_UNROLL
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
