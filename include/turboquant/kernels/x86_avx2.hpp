// Kernels for x86 with AVX2, for programs built with any flags or none: the functions of this file carry their target.
#pragma once

#include <turboquant/kernels/portable.hpp>
#include <turboquant/kernels/x86_avx2_encode.hpp>
#include <turboquant/kernels/x86_avx2_score_accumulate.hpp>

#if defined(TURBOQUANT_MAKES_X86_KERNELS)
#define TURBOQUANT_HAS_AVX2 1

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

/// The kernels of portable.hpp for AVX2: the same bytes where bytes are written, and float sums of its order except in
/// score_raw. See PortableKernels.
template <class Unit>
struct Avx2Kernels : Avx2Products<Unit> {
  static constexpr const char* name = "avx2";

  // ---- logits of the raw tail

  static void score_raw(const bfloat16* keys, std::size_t count, const QueryBlock& block, std::size_t row_begin,
                        std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
    constexpr std::size_t kTokens = 4;
    alignas(32) float widened[kTokens * kMaxRow];
    for (std::size_t t = 0; t < count; t += kTokens) {
      const std::size_t tokens = (std::min)(kTokens, count - t);
      for (std::size_t i = 0; i < tokens * block.dim; i += 8) {
        _mm256_store_ps(widened + i, widen8(keys + t * block.dim + i));
      }
      for (std::size_t r = row_begin; r < row_end; ++r) {
        const float* query = block.normal + r * block.dim;
        float* to = logits + (r - row_begin) * stride + t;
        float dots[kTokens];
        if (tokens == kTokens) {
          Products::template dot_rows<kTokens>(query, widened, block.dim, dots);
        } else {
          for (std::size_t k = 0; k < tokens; ++k)
            Products::template dot_rows<1>(query, widened + k * block.dim, block.dim, dots + k);
        }
        for (std::size_t k = 0; k < tokens; ++k) to[k] = Base::saturate(dots[k] * factor[r]);
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
    if (high - low >= 16) {
      __m256 most[2] = {_mm256_set1_ps(largest), _mm256_set1_ps(largest)};
      for (; t + 16 <= high; t += 16) {
        most[0] = _mm256_max_ps(most[0], _mm256_loadu_ps(logits + t));
        most[1] = _mm256_max_ps(most[1], _mm256_loadu_ps(logits + t + 8));
      }
      largest = maximum(_mm256_max_ps(most[0], most[1]));
    }
    for (; t < high; ++t) largest = (std::max)(largest, logits[t]);
    float factor = 0.0f;
    if (state.sum > 0) factor = largest > state.largest ? Base::exp_negative(state.largest - largest) : 1.0f;
    for (t = begin; t < low; ++t) logits[t] = 0;
    for (t = high; t < end; ++t) logits[t] = 0;
    // Blocks of 16 by index, so that sums have the lanes of the portable kernel; the ragged ones in a buffer. Whatever
    // a compiler makes of the polynomial, it is one for all: a weight does not depend on where its range begins.
    const __m256 top = _mm256_set1_ps(largest);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (t = low - low % 16; t < high; t += 16) {
      const std::size_t from = (std::max)(t, low), count = (std::min)(t + 16, high) - from;
      alignas(32) float ragged[16];
      float* at = count == 16 ? logits + t : ragged;
      if (count < 16) {
        std::fill_n(ragged, 16, -3e38f);
        std::copy_n(logits + from, count, ragged + (from - t));
      }
      const __m256 a = exp_negative8(_mm256_sub_ps(_mm256_loadu_ps(at), top));
      const __m256 b = exp_negative8(_mm256_sub_ps(_mm256_loadu_ps(at + 8), top));
      _mm256_storeu_ps(at, a);
      _mm256_storeu_ps(at + 8, b);
      if (count < 16) std::copy_n(ragged + (from - t), count, logits + from);
      sums[0] = _mm256_add_ps(sums[0], a);
      sums[1] = _mm256_add_ps(sums[1], b);
    }
    state.sum = state.sum * factor + tree(sums[0], sums[1]);
    state.largest = largest;
    return factor;
  }

  static void weigh(std::span<const CodedPart> parts, const float* p, std::size_t begin, std::size_t end,
                    std::int16_t* weights, WeightSums* sums, std::size_t sum_stride) {
    alignas(32) float product[kMaxPage];
    __m256 most = _mm256_setzero_ps();
    Base::for_parts(parts, begin, end, [&](std::size_t k, std::size_t from, std::size_t until) {
      const CodedPart& part = parts[k];
      const std::size_t first = k * part.page_tokens;
      most = multiply_scales(part.scales, p, first, from, until, product, most);
      WeightSums& sum = sums[k * sum_stride];
      sum = WeightSums{0, sum_by_lane(p, from, until), 0};
      if (part.zero_points == nullptr) return;
      float zero[kMaxPage];
      for (std::size_t c = from; c < until; ++c) zero[c] = p[c] * to_float(part.zero_points[c - first]);
      sum.zero_point = sum_by_lane(zero, from, until);
    });
    const float largest = maximum(most), coefficient = largest / static_cast<float>(kWeightMax);
    for (std::size_t k = 0; k < parts.size(); ++k) sums[k * sum_stride].coefficient = coefficient;
    const __m256 by = _mm256_set1_ps(largest > 0 ? largest : 1.0f), range = _mm256_set1_ps(kWeightMax);
    for (std::size_t c = begin; c < end; c += 8) {
      const __m256i w = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_div_ps(_mm256_loadu_ps(product + c), by), range));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(weights + c),
                       _mm_packs_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
    }
  }

  static void soften_rows(std::span<const CodedPart> parts, std::size_t begin, std::size_t end, std::size_t rows,
                          float* logits, std::size_t stride, SoftmaxState* states, std::int16_t* weights,
                          WeightSums* sums, float* acc, std::size_t dim) {
    Base::template soften_each<Avx2Kernels>(parts, begin, end, rows, logits, stride, states, weights, sums, acc, dim);
  }

  // ---- accumulation of the raw tail

  static void accumulate_raw(const bfloat16* values, std::size_t count, std::size_t dim, std::size_t rows,
                             const float* p, std::size_t p_stride, float* out, std::size_t out_stride) {
    constexpr std::size_t kTokens = 16;  // widened once for all rows, 32 coordinates at a time
    alignas(32) float widened[kTokens * 32];
    for (std::size_t begin = 0; begin < count; begin += kTokens) {
      const std::size_t tokens = (std::min)(kTokens, count - begin);
      for (std::size_t i = 0; i < dim; i += 32) {
        const std::size_t vectors = (std::min)(dim - i, std::size_t{32}) / 8;
        for (std::size_t t = 0; t < tokens; ++t) {
          const bfloat16* from = values + (begin + t) * dim + i;
          for (std::size_t v = 0; v < vectors; ++v) _mm256_store_ps(widened + t * 32 + v * 8, widen8(from + v * 8));
        }
        for (std::size_t r = 0; r < rows; ++r) {
          const float* weights = p + r * p_stride + begin;
          float* to = out + r * out_stride + i;
          if (vectors == 4) {
            add_weighted<4>(widened, tokens, weights, to);
          } else {
            add_weighted<2>(widened, tokens, weights, to);
          }
        }
      }
    }
  }

  [[gnu::flatten]] static void combine(float* out, float a, const float* other, float b, std::size_t dim) {
    Base::combine(out, a, other, b, dim);
  }

 private:
  using Base = PortableKernels<Unit>;
  using Base::kMaxPage, Base::kMaxRow;
  using Products = Avx2Products<Unit>;
  using Products::widen8, Products::tree;

  // to[0, 8 N) += the weighted sum of the rows [tokens][32]; tokens without weight are left out.
  template <std::size_t N>
  [[gnu::always_inline]] static void add_weighted(const float* rows, std::size_t tokens, const float* weights,
                                                  float* to) {
    __m256 sums[N];
    TURBOQUANT_UNROLL
    for (std::size_t v = 0; v < N; ++v) sums[v] = _mm256_loadu_ps(to + v * 8);
    for (std::size_t t = 0; t < tokens; ++t) {
      if (!(weights[t] > 0)) continue;
      const __m256 weight = _mm256_set1_ps(weights[t]);
      TURBOQUANT_UNROLL
      for (std::size_t v = 0; v < N; ++v) {
        sums[v] = _mm256_add_ps(sums[v], _mm256_mul_ps(weight, _mm256_load_ps(rows + t * 32 + v * 8)));
      }
    }
    TURBOQUANT_UNROLL
    for (std::size_t v = 0; v < N; ++v) _mm256_storeu_ps(to + v * 8, sums[v]);
  }

  // product[c] = p[c] scales[c - first] for the columns [from, until). Returns the larger of them and `most`, by lane.
  static __m256 multiply_scales(const bfloat16* scales, const float* p, std::size_t first, std::size_t from,
                                std::size_t until, float* product, __m256 most) {
    for (std::size_t c = from; c < until; c += 8) {
      const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(p + c), widen8(scales + (c - first)));
      most = _mm256_max_ps(most, x);
      _mm256_storeu_ps(product + c, x);
    }
    return most;
  }

  static float maximum(__m256 x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
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
    TURBOQUANT_UNROLL
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
      y = _mm256_add_ps(_mm256_mul_ps(y, f), _mm256_set1_ps(c));
    }
    y = _mm256_add_ps(_mm256_add_ps(_mm256_mul_ps(_mm256_mul_ps(y, f), f), f), _mm256_set1_ps(1.0f));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, bottom, _CMP_LT_OQ), _mm256_mul_ps(y, power));
  }
};

using Avx2 = Avx2Kernels<UnitTarget>;

}  // namespace turboquant::kernels

#undef TURBOQUANT_UNROLL

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
