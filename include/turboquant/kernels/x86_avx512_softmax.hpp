// Softmax and weights on x86 with AVX-512, and the small tools of its reading kernels, for kernels/x86_avx512.hpp.
#pragma once

#include <turboquant/kernels/x86_avx512_read.hpp>

#if defined(TURBOQUANT_MAKES_X86_KERNELS)

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

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

template <class Unit>
struct Avx512Tools : Avx512Loads<Unit> {
  template <std::size_t N>
  struct Count {
    static constexpr std::size_t value = N;
  };
  // visit(Count<0>()), ..., visit(Count<N - 1>()): unrolled, so that arrays of sums become registers; what calls it is
  // flattened.
  template <std::size_t N, class Visit>
  [[gnu::always_inline]] static void repeat(Visit visit) {
    repeat_each(visit, std::make_index_sequence<N>());
  }
  template <class Visit, std::size_t... kIndex>
  [[gnu::always_inline]] static void repeat_each(Visit& visit, std::index_sequence<kIndex...>) {
    (visit(Count<kIndex>()), ...);
  }

  // The elements of [at, at + 16) in [low, high).
  static __mmask16 between(std::size_t at, std::size_t low, std::size_t high) {
    const std::size_t skip = low > at ? (std::min)(low - at, std::size_t{16}) : 0;
    const std::size_t stop = high > at ? (std::min)(high - at, std::size_t{16}) : 0;
    return static_cast<__mmask16>(((1u << stop) - 1u) & ~((1u << skip) - 1u));
  }

  static __m512 widen16(const bfloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  // As the portable tree: halves are added.
  static float tree(__m512 lanes) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // No lambdas: g++ gives those that return vectors the unit's own ways of doing so.
  struct Plus {
    __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
  };
  struct IntegerPlus {
    __m512 operator()(__m512 a, __m512 b) const {
      return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }
  };
  struct Larger {
    __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
  };
  // Each row of up to eight joined to one number, in the order of tree(): row r in lane r. Behind the last one rows
  // repeat.
  template <std::size_t kRows, class Join>
  [[gnu::always_inline]] static __m512 join_rows(const __m512 (&rows)[kRows], Join join) {
    __m512 eights[4], fours[2];
    repeat<4>([&](auto k) {
      const __m512 a = rows[k.value % kRows], b = rows[(k.value + 4) % kRows];
      eights[k.value] = join(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    });
    repeat<2>([&](auto k) {
      const __m512 a = eights[k.value], b = eights[k.value + 2];
      fours[k.value] = join(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    });
    const __m512d a = _mm512_castps_pd(fours[0]), b = _mm512_castps_pd(fours[1]);
    const __m512 twos =
        join(_mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0x00)), _mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0xff)));
    // Now 128 bits hold the rows k and k + 1 of 0, 4, 2, 6.
    const __m512 ones = join(twos, _mm512_movehdup_ps(twos));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0), ones);
  }
  template <std::size_t kRows>
  [[gnu::always_inline]] static __m512 trees(const __m512 (&rows)[kRows]) {
    return join_rows(rows, Plus());
  }
  template <std::size_t kRows>
  [[gnu::always_inline]] static __m256i integer_trees(const __m512i (&rows)[kRows]) {
    __m512 bits[kRows];
    repeat<kRows>([&](auto r) { bits[r.value] = _mm512_castsi512_ps(rows[r.value]); });
    return _mm512_castsi512_si256(_mm512_castps_si512(join_rows(bits, IntegerPlus())));
  }

  // exp(x) of x <= 0, sixteen at a time, as 2^r 2^f: r the multiple of 1/32 next to x log2(e), 2^(r - floor(r)) from a
  // table, 2^f - 1 by a polynomial that is 0 at 0. Off by less than 2e-7 of the result, and by 2e-8 |x| of it more, as
  // log2(e) is rounded. Zero below -87, as PortableKernels::exp_negative.
  static __m512 exp_negative16(__m512 x) {
    const __m512 low = _mm512_setr_ps(1.0f, 1.0218972f, 1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f, 1.13878858f,
                                      1.1637249f, 1.18920708f, 1.21524739f, 1.24185777f, 1.26905096f, 1.29683959f,
                                      1.32523668f, 1.35425556f, 1.38390994f);
    const __m512 high = _mm512_setr_ps(1.41421354f, 1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f,
                                       1.61049032f, 1.64575553f, 1.68179286f, 1.71861935f, 1.75625217f, 1.79470909f,
                                       1.8340081f, 1.87416768f, 1.91520655f, 1.95714414f);
    const __m512 by = _mm512_set1_ps(1.44269504f), shift = _mm512_set1_ps(0x1.8p18f);
    const __m512 shifted = _mm512_fmadd_ps(x, by, shift);  // its last bits count in 1/32
    const __m512 r = _mm512_sub_ps(shifted, shift), f = _mm512_fmsub_ps(x, by, r);
    const __m512 power = _mm512_permutex2var_ps(low, _mm512_castps_si512(shifted), high);
    const __m512 slope = _mm512_fmadd_ps(f, _mm512_set1_ps(2.40226507e-1f), _mm512_set1_ps(6.93157344e-1f));
    const __m512 y = _mm512_fmadd_ps(power, _mm512_mul_ps(f, slope), power);
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ), y, r);
  }
};

/// The softmax of portable.hpp for AVX-512. A row has its bits whichever of these functions it goes through.
template <class Unit>
struct Avx512Softmax : Avx512Tools<Unit> {
  static float softmax_step(float* logits, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
                            SoftmaxState& state) {
    __m512 most = _mm512_set1_ps(state.sum > 0 ? state.largest : logits[low]);
    for (std::size_t at = low / 16 * 16; at < high; at += 16) {
      const __mmask16 seen = between(at, low, high);
      most = _mm512_mask_max_ps(most, seen, most, _mm512_maskz_loadu_ps(seen, logits + at));
    }
    const float largest = _mm512_reduce_max_ps(most);
    float factor = 0;
    if (state.sum > 0) factor = _mm512_cvtss_f32(exp_negative16(_mm512_set1_ps(state.largest - largest)));
    const __m512 top = _mm512_set1_ps(largest);
    __m512 sums = _mm512_setzero_ps();
    for (std::size_t at = begin / 16 * 16; at < end; at += 16) {
      const __mmask16 seen = between(at, low, high);
      const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(seen, logits + at), top);
      const __m512 p = _mm512_maskz_mov_ps(seen, exp_negative16(x));
      _mm512_mask_storeu_ps(logits + at, between(at, begin, end), p);
      sums = _mm512_add_ps(sums, p);
    }
    // Fused by name: soften_rows does the same.
    state.sum = _mm512_cvtss_f32(
        _mm512_fmadd_ps(_mm512_set1_ps(state.sum), _mm512_set1_ps(factor), _mm512_set1_ps(tree(sums))));
    state.largest = largest;
    return factor;
  }

  static void weigh(std::span<const CodedPart> parts, const float* p, std::size_t begin, std::size_t end,
                    std::int16_t* weights, WeightSums* sums, std::size_t sum_stride) {
    alignas(64) float products[layout::kMaxPageTokens];
    __m512 most = _mm512_setzero_ps();
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const CodedPart& part = parts[k];
      const std::size_t first = k * part.page_tokens, from = k == 0 ? begin : first;
      const std::size_t until = (std::min)(end, first + part.page_tokens);
      __m512 total = _mm512_setzero_ps(), zero = total;
      for (std::size_t c = from; c < until; c += 16) {
        const __m512 x = _mm512_loadu_ps(p + c), product = _mm512_mul_ps(x, widen16(part.scales + (c - first)));
        _mm512_store_ps(products + c, product);
        most = _mm512_max_ps(most, product);
        total = _mm512_add_ps(total, x);
        if (part.zero_points != nullptr) zero = _mm512_fmadd_ps(x, widen16(part.zero_points + (c - first)), zero);
      }
      sums[k * sum_stride] = WeightSums{0, tree(total), tree(zero)};
    }
    const Units units(_mm512_set1_ps(_mm512_reduce_max_ps(most)));
    for (std::size_t k = 0; k < parts.size(); ++k) {
      sums[k * sum_stride].coefficient = _mm512_cvtss_f32(units.coefficient);
    }
    if (units.plain != 0) {
      write_weights<true>(products, begin, end, units.down, units.by, weights);
    } else {
      write_weights<false>(products, begin, end, units.down, units.by, weights);
    }
  }

  static void soften_rows(std::span<const CodedPart> parts, std::size_t begin, std::size_t end, std::size_t rows,
                          float* logits, std::size_t stride, SoftmaxState* states, std::int16_t* weights,
                          WeightSums* sums, float* acc, std::size_t dim) {
    // Of all columns: scales, and the zero points behind them.
    alignas(64) float widened[2 * layout::kMaxPageTokens];
    const std::size_t tokens = parts[0].page_tokens;
    const bool has_zero_points = parts[0].zero_points != nullptr;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const std::size_t first = p * tokens, from = p == 0 ? begin : first, until = (std::min)(end, first + tokens);
      for_tiles(from, until, [&](std::size_t c) {
        _mm512_store_ps(widened + c, widen16(parts[p].scales + (c - first)));
        if (!has_zero_points) return;
        _mm512_store_ps(widened + layout::kMaxPageTokens + c, widen16(parts[p].zero_points + (c - first)));
      });
    }
    for (std::size_t first = 0; first < rows; first += kSet) {
      const Softening s{.widened = widened,
                        .tokens = tokens,
                        .parts = parts.size(),
                        .begin = begin,
                        .end = end,
                        .rows = (std::min)(kSet, rows - first),
                        .logits = logits + first * stride,
                        .stride = stride,
                        .states = states + first,
                        .weights = weights + first * stride,
                        .sums = sums + first,
                        .sum_stride = rows,
                        .acc = acc + first * dim,
                        .dim = dim};
      if (has_zero_points) {
        soften_set<true>(s);
      } else {
        soften_set<false>(s);
      }
    }
  }

 protected:
  using Tools = Avx512Tools<Unit>;
  using Tools::between, Tools::exp_negative16, Tools::join_rows, Tools::tree, Tools::trees, Tools::widen16;
  template <std::size_t N, class Visit>
  [[gnu::always_inline]] static void repeat(Visit visit) {
    Tools::template repeat<N>(visit);
  }

  // What weights of rows are counted in, from the largest products: weight = product * down * by.
  struct Units {
    __m512 coefficient, down, by;
    __mmask16 plain;  // rows whose `by` alone has the bits of both: they are multiplied once

    explicit Units(__m512 largest) {
      const __m512 range = _mm512_set1_ps(static_cast<float>(kWeightMax));
      coefficient = _mm512_div_ps(largest, range);
      // One division instead of one for each token; a power of two keeps its quotient finite.
      const __m512i e = _mm512_srli_epi32(_mm512_castps_si512(largest), 23);
      const __m512i at_least = _mm512_max_epi32(e, _mm512_set1_epi32(1));
      const __m512i bound = _mm512_min_epi32(at_least, _mm512_set1_epi32(253));
      down = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), bound), 23));
      by = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ), range,
                               _mm512_mul_ps(largest, down));
      // Then neither products nor their multiples that round to a weight are subnormal, nor is anything too large.
      plain = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(0x1p-80f), _CMP_GE_OQ) &
              _mm512_cmp_ps_mask(largest, _mm512_set1_ps(0x1p80f), _CMP_LE_OQ);
      by = _mm512_mask_mul_ps(by, plain, by, down);
    }
  };
  template <bool kPlain>
  [[gnu::always_inline]] static void write_weights(const float* products, std::size_t begin, std::size_t end,
                                                   __m512 down, __m512 by, std::int16_t* weights) {
    const auto whole = [&](std::size_t c, __m512i& w) {
      __m512 x = _mm512_loadu_ps(products + c);
      if constexpr (!kPlain) x = _mm512_mul_ps(x, down);
      w = _mm512_cvtps_epi32(_mm512_mul_ps(x, by));
    };
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i a, b;
    std::size_t c = begin;
    for (; c + 32 <= end; c += 32) {
      whole(c, a), whole(c + 16, b);
      _mm512_storeu_si512(weights + c, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a, b)));
    }
    if (c == end) return;
    whole(c, a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + c), _mm512_cvtepi32_epi16(a));
  }

  static constexpr std::size_t kSet = 8;  // numbers that are computed at once, one to a lane

  // What one call of soften_set works with: at most kSet rows.
  struct Softening {
    const float* widened;  // [2][kMaxPageTokens]: scales, zero points
    std::size_t tokens, parts, begin, end, rows;
    float* logits;
    std::size_t stride;
    SoftmaxState* states;
    std::int16_t* weights;
    WeightSums* sums;
    std::size_t sum_stride;
    float* acc;
    std::size_t dim;
  };

  // Vectors of the rows of a set, to be joined.
  struct RowVectors {
    __m512 largest[kSet], totals[kSet];
  };

  // What is one number of a row, or of a row and a part, is computed for eight of them at once.
  template <bool kZeroPoints>
  [[gnu::flatten]] static void soften_set(const Softening& s) {
    const std::size_t begin = s.begin, end = s.end, rows = s.rows, stride = s.stride;
    alignas(64) float tops[16], downs[16], bys[16], coefficients[16];
    RowVectors v;
    for (std::size_t r = 0; r < kSet; ++r) {
      __m512 m[4];  // no logit is less
      repeat<4>([&](auto k) { m[k.value] = _mm512_set1_ps(-3.402823466e38f); });
      const float* row = s.logits + r * stride;
      std::size_t c = begin;
      for (; r < rows && c + 64 <= end; c += 64) {
        repeat<4>([&](auto k) { m[k.value] = _mm512_max_ps(m[k.value], _mm512_loadu_ps(row + c + 16 * k.value)); });
      }
      for (; r < rows && c < end; c += 16) m[0] = _mm512_max_ps(m[0], _mm512_loadu_ps(row + c));
      v.largest[r] = _mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3]));
    }
    const typename Tools::Larger larger;
    const auto states = static_cast<__mmask8>((1u << rows) - 1u);
    const __m512 old = _mm512_castsi512_ps(_mm512_maskz_loadu_epi64(states, s.states));
    const __m512 old_sum =
        _mm512_permutexvar_ps(_mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 1, 1, 1, 1, 1, 1, 1, 1), old);
    const __m512 old_largest =
        _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0), old);
    const __mmask16 known = _mm512_cmp_ps_mask(old_sum, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 of_step = join_rows(v.largest, larger);
    const __m512 largest = _mm512_mask_max_ps(of_step, known, of_step, old_largest);
    const __m512 factor = _mm512_maskz_mov_ps(known, exp_negative16(_mm512_sub_ps(old_largest, largest)));
    _mm512_store_ps(tops, largest);
    repeat<kSet>([&](auto r) { v.largest[r.value] = v.totals[r.value] = _mm512_setzero_ps(); });
    soften_pairs<kZeroPoints>(s, tops, v);
    const Units units(join_rows(v.largest, larger));
    _mm512_store_ps(coefficients, units.coefficient);
    _mm512_store_ps(downs, units.down);
    _mm512_store_ps(bys, units.by);
    for (std::size_t r = 0; r < rows; ++r) {
      const float* row = s.logits + r * stride;
      std::int16_t* to = s.weights + r * stride;
      const __m512 by = _mm512_set1_ps(bys[r]);
      if ((units.plain >> r & 1u) != 0) {
        write_weights<true>(row, begin, end, by, by, to);
      } else {
        write_weights<false>(row, begin, end, _mm512_set1_ps(downs[r]), by, to);
      }
      WeightSums* to_sums = s.sums + r;
      for (std::size_t k = 0; k < s.parts; ++k, to_sums += s.sum_stride) alone(to_sums)->coefficient = coefficients[r];
    }
    const __m512 sum = _mm512_fmadd_ps(old_sum, factor, trees(v.totals));
    const __m512i pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_mask_storeu_epi64(s.states, states, _mm512_castps_si512(_mm512_permutex2var_ps(largest, pairs, sum)));
    // Few steps have a larger logit than all before them.
    const __mmask16 less = _mm512_mask_cmp_ps_mask(known, factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    unsigned rest = less & ((1u << rows) - 1u);
    if (rest == 0) return;
    _mm512_store_ps(tops, factor);
    for (; rest != 0; rest &= rest - 1) {
      const auto r = static_cast<std::size_t>(std::countr_zero(rest));
      scale(s.acc + r * s.dim, s.dim, tops[r]);
    }
  }

  // Logits of all rows become probabilities times scales. Sums over parts are joined for eight pairs of a row and a
  // part at once.
  template <bool kZeroPoints>
  static void soften_pairs(const Softening& s, const float* tops, RowVectors& v) {
    Pairs pairs;
    repeat<kSet>([&](auto n) { pairs.totals[n.value] = pairs.zeros[n.value] = _mm512_setzero_ps(); });
    std::size_t held = 0;
    for (std::size_t r = 0; r < s.rows; ++r) {
      float* row = s.logits + r * s.stride;
      const __m512 top = _mm512_set1_ps(tops[r]);
      __m512 row_total = _mm512_setzero_ps(), most = row_total;
      for (std::size_t k = 0; k < s.parts; ++k) {
        __m512 total = _mm512_setzero_ps(), zero = total;
        const std::size_t from = k == 0 ? s.begin : k * s.tokens;
        for_tiles(from, (std::min)(s.end, (k + 1) * s.tokens), [&](std::size_t c) {
          const __m512 p = exp_negative16(_mm512_sub_ps(_mm512_loadu_ps(row + c), top));
          const __m512 product = _mm512_mul_ps(p, _mm512_load_ps(s.widened + c));
          total = _mm512_add_ps(total, p);
          row_total = _mm512_add_ps(row_total, p);
          most = _mm512_max_ps(most, product);
          if constexpr (kZeroPoints) {
            zero = _mm512_fmadd_ps(p, _mm512_load_ps(s.widened + layout::kMaxPageTokens + c), zero);
          }
          _mm512_storeu_ps(row + c, product);
        });
        pairs.totals[held] = total;
        if constexpr (kZeroPoints) pairs.zeros[held] = zero;
        pairs.sums[held] = s.sums + k * s.sum_stride + r;
        if (++held == kSet) write_sums<kZeroPoints>(pairs, held), held = 0;
      }
      v.totals[r] = row_total, v.largest[r] = most;
    }
    if (held != 0) write_sums<kZeroPoints>(pairs, held);
  }
  struct Pairs {
    __m512 totals[kSet], zeros[kSet];
    WeightSums* sums[kSet];
  };
  template <bool kZeroPoints>
  static void write_sums(const Pairs& pairs, std::size_t count) {
    alignas(64) float probabilities[16], zeros[16];
    _mm512_store_ps(probabilities, trees(pairs.totals));
    if constexpr (kZeroPoints) _mm512_store_ps(zeros, trees(pairs.zeros));
    for (std::size_t n = 0; n < count; ++n)
      *alone(pairs.sums[n]) = WeightSums{0, probabilities[n], kZeroPoints ? zeros[n] : 0.0f};
  }
  // Keeps a loop of stores from becoming a vector's scatter, which takes many times as long.
  [[gnu::always_inline]] static WeightSums* alone(WeightSums* to) {
    __asm__("" : "+r"(to));
    return to;
  }
  static void scale(float* row, std::size_t dim, float factor) {
    const __m512 by = _mm512_set1_ps(factor);
    for (std::size_t i = 0; i < dim; i += 16) _mm512_storeu_ps(row + i, _mm512_mul_ps(_mm512_loadu_ps(row + i), by));
  }
  // visit(t) for the tiles of [begin, end); a page of 64 tokens, or what is left of it, without a loop.
  template <class Visit>
  [[gnu::always_inline]] static void for_tiles(std::size_t begin, std::size_t end, Visit visit) {
    std::size_t t = begin;
    for (; t + 64 <= end; t += 64) visit(t), visit(t + 16), visit(t + 32), visit(t + 48);
    for (; t < end; t += 16) visit(t);
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
