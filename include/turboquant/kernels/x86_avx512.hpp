// Kernels for x86 with AVX-512 (F, BW, VL, DQ, VNNI and VBMI: Ice Lake, Zen 4 and later), for programs built with any
// flags or none: the functions of this file carry their target.
#pragma once

#include <turboquant/kernels/portable.hpp>
#include <turboquant/kernels/x86_avx512_encode.hpp>
#include <turboquant/kernels/x86_avx512_read.hpp>
#include <turboquant/kernels/x86_avx512_softmax.hpp>

#if defined(TURBOQUANT_MAKES_X86_KERNELS)
#define TURBOQUANT_HAS_AVX512 1

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

// Products meet sums here in explicit fused operations only where no byte depends on them. Nothing but this library may
// be defined in here.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi"))), \
                             apply_to = function)
#else
// g++ 12 takes the undefined registers in its own intrinsics for a fault.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")
#endif

namespace turboquant::kernels {

/// The kernels of portable.hpp for AVX-512: the same bytes where bytes are written. See PortableKernels.
///
/// An unpacked slot is 64 levels + 128, the unsigned operand of vpdpbusd, which multiplies unsigned by signed bytes.
/// The signed ones are a query's numbers or weights, in two planes of seven bits, and sums begin at -128 times their
/// sum. Enough sums are kept side by side to cover the latency of four cycles: eight or sixteen.
template <class Unit>
struct Avx512Kernels : Avx512Encoders<Unit>, Avx512Softmax<Unit> {
  static constexpr const char* name = "avx512";

  // ---- queries and logits

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

  static void score_raw(const bfloat16* keys, std::size_t count, const QueryBlock& block, std::size_t row_begin,
                        std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
    for (std::size_t first = row_begin; first < row_end;) {
      std::size_t set = 8;
      while (set > row_end - first) set /= 2;
      const float* queries = block.normal + first * block.dim;
      float* to = logits + (first - row_begin) * stride;
      if (set == 8) score_raw_rows<8>(keys, count, block.dim, queries, factor + first, to, stride);
      if (set == 4) score_raw_rows<4>(keys, count, block.dim, queries, factor + first, to, stride);
      if (set == 2) score_raw_rows<2>(keys, count, block.dim, queries, factor + first, to, stride);
      if (set == 1) score_raw_rows<1>(keys, count, block.dim, queries, factor + first, to, stride);
      first += set;
    }
  }

  // ---- softmax

  using Avx512Softmax<Unit>::soften_rows, Avx512Softmax<Unit>::softmax_step, Avx512Softmax<Unit>::weigh;

  [[gnu::flatten]] static void soft_cap(float* logits, std::size_t begin, std::size_t end, float cap) {
    Base::soft_cap(logits, begin, end, cap);
  }

  // ---- accumulation

  template <class Codes>
  static void accumulate(std::span<const CodedPart> parts, const Codes& codes, std::size_t begin, std::size_t end,
                         std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                         const WeightSums* sums, std::size_t sum_stride, float* out, std::size_t out_stride) {
    const Avx512Reader<Unit, Codes, 128> reader(codes);
    Accumulation a;
    a.parts = parts;
    a.begin = begin, a.end = end;
    a.sum_stride = sum_stride;
    a.stride = out_stride;
    for (std::size_t k = 0; k < parts.size(); ++k) a.distance[k] = fetch_head(parts[k]);
    for (std::size_t first = 0; first < rows;) {
      std::size_t set = 4;
      while (set > rows - first) set /= 2;
      a.sums = sums + first;
      a.out = out + first * out_stride;
      const std::int16_t* from = weights + first * weight_stride;
      if (set == 4) accumulate_rows<4>(reader, from, weight_stride, a);
      if (set == 2) accumulate_rows<2>(reader, from, weight_stride, a);
      if (set == 1) accumulate_rows<1>(reader, from, weight_stride, a);
      first += set;
      for (std::size_t k = 0; k < parts.size(); ++k) a.distance[k] = 0;  // fetched once
    }
  }

  static void accumulate_raw(const bfloat16* values, std::size_t count, std::size_t dim, std::size_t rows,
                             const float* p, std::size_t p_stride, float* out, std::size_t out_stride) {
    if (count == 0) return;  // there need not be any values
    for (std::size_t first = 0; first < rows;) {
      std::size_t set = 4;
      while (set > rows - first) set /= 2;
      const float* weights = p + first * p_stride;
      float* to = out + first * out_stride;
      if (set == 4) accumulate_raw_rows<4>(values, count, dim, weights, p_stride, to, out_stride);
      if (set == 2) accumulate_raw_rows<2>(values, count, dim, weights, p_stride, to, out_stride);
      if (set == 1) accumulate_raw_rows<1>(values, count, dim, weights, p_stride, to, out_stride);
      first += set;
    }
  }

  [[gnu::flatten]] static void combine(float* out, float a, const float* other, float b, std::size_t dim) {
    Base::combine(out, a, other, b, dim);
  }

 private:
  using Base = PortableKernels<Unit>;
  using Avx512Loads<Unit>::load32, Avx512Loads<Unit>::load128, Avx512Loads<Unit>::load256, Avx512Loads<Unit>::load512;
  using Avx512Encoders<Unit>::settled;
  using Base::kMaxPage;
  using Tools = Avx512Tools<Unit>;
  using Tools::integer_trees, Tools::trees, Tools::widen16;

  template <std::size_t N, class Visit>
  [[gnu::always_inline]] static void repeat(Visit visit) {
    Tools::template repeat<N>(visit);
  }

  // 16 coordinates of the centre from i on, before its scale.
  template <unsigned kBits>
  static __m512 center16(const CodedPart& part, std::size_t i) {
    if constexpr (kBits == 8) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(part.center + i)));
    } else {
      return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(load256(part.center + 2 * i)));
    }
  }
  static __m512 any_center16(const CodedPart& part, std::size_t i) {
    const __m512 scale = _mm512_set1_ps(part.center_scale);
    if (part.center_bits == 8) return _mm512_mul_ps(center16<8>(part, i), scale);
    if (part.center_bits == 16) return _mm512_mul_ps(center16<16>(part, i), scale);
    return _mm512_setzero_ps();
  }

  // Eight products at once, of kRows queries with some keys.
  template <std::size_t kRows>
  [[gnu::flatten]] static void score_raw_rows(const bfloat16* keys, std::size_t count, std::size_t dim,
                                              const float* queries, const float* factor, float* logits,
                                              std::size_t stride) {
    constexpr std::size_t kKeys = 8 / kRows;
    const __m256i row = _mm256_srli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), std::countr_zero(kKeys));
    const __m256 by = _mm256_permutevar8x32_ps(_mm256_maskz_loadu_ps((1u << kRows) - 1u, factor), row);
    const __m256 most = _mm256_set1_ps(3.402823466e38f), least = _mm256_set1_ps(-3.402823466e38f);
    for (std::size_t t = 0; t < count; t += kKeys) {
      const bfloat16* from[kKeys];
      repeat<kKeys>([&](auto k) { from[k.value] = keys + (std::min)(t + k.value, count - 1) * dim; });
      __m512 sums[8];
      repeat<8>([&](auto at) { sums[at.value] = _mm512_setzero_ps(); });
      for (std::size_t i = 0; i < dim; i += 16) {
        __m512 key[kKeys];
        repeat<kKeys>([&](auto k) { key[k.value] = widen16(from[k.value] + i); });
        repeat<kRows>([&](auto r) {
          const __m512 query = _mm512_loadu_ps(queries + r.value * dim + i);
          repeat<kKeys>([&](auto k) {
            __m512& sum = sums[r.value * kKeys + k.value];
            sum = _mm512_fmadd_ps(query, key[k.value], sum);
          });
        });
      }
      const __m256 product = _mm256_mul_ps(_mm512_castps512_ps256(trees(sums)), by);
      alignas(32) float products[8];
      _mm256_store_ps(products, _mm256_min_ps(_mm256_max_ps(product, least), most));
      for (std::size_t r = 0; r < kRows; ++r) {
        std::memcpy(logits + r * stride + t, products + r * kKeys, (std::min)(kKeys, count - t) * sizeof(float));
      }
    }
  }

  template <std::size_t kRows>
  static void accumulate_raw_rows(const bfloat16* values, std::size_t count, std::size_t dim, const float* p,
                                  std::size_t p_stride, float* out, std::size_t out_stride) {
    constexpr std::size_t kGroups = 4;
    std::size_t i = 0;
    for (; i + 16 * kGroups <= dim; i += 16 * kGroups)
      accumulate_raw_groups<kRows, kGroups>(values + i, count, dim, p, p_stride, out + i, out_stride);
    for (; i < dim; i += 16) accumulate_raw_groups<kRows, 1>(values + i, count, dim, p, p_stride, out + i, out_stride);
  }
  template <std::size_t kRows, std::size_t kGroups>
  [[gnu::flatten]] static void accumulate_raw_groups(const bfloat16* values, std::size_t count, std::size_t dim,
                                                     const float* p, std::size_t p_stride, float* out,
                                                     std::size_t out_stride) {
    __m512 sums[kRows][kGroups];
    repeat<kRows * kGroups>([&](auto at) {
      constexpr std::size_t kRow = decltype(at)::value / kGroups, kGroup = decltype(at)::value % kGroups;
      sums[kRow][kGroup] = _mm512_loadu_ps(out + kRow * out_stride + kGroup * 16);
    });
    for (std::size_t t = 0; t < count; ++t) {
      __m512 value[kGroups];
      repeat<kGroups>([&](auto g) { value[g.value] = widen16(values + t * dim + g.value * 16); });
      repeat<kRows>([&](auto r) {
        const __m512 weight = _mm512_set1_ps(p[r.value * p_stride + t]);
        // What weighs nothing need not be finite.
        const __mmask16 counts = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_GT_OQ);
        repeat<kGroups>([&](auto g) {
          __m512& sum = sums[r.value][g.value];
          sum = _mm512_mask3_fmadd_ps(weight, value[g.value], sum, counts);
        });
      });
    }
    repeat<kRows * kGroups>([&](auto at) {
      constexpr std::size_t kRow = decltype(at)::value / kGroups, kGroup = decltype(at)::value % kGroups;
      _mm512_storeu_ps(out + kRow * out_stride + kGroup * 16, sums[kRow][kGroup]);
    });
  }

  template <std::size_t kBytes>
  [[gnu::always_inline]] static void fetch_bytes(const std::uint8_t* from) {
    fetch_line(from);
    if constexpr (kBytes > 64) fetch_bytes<kBytes - 64>(from + 64);
  }
  static const std::uint8_t* moved(const std::uint8_t* from, std::ptrdiff_t distance) {
    return reinterpret_cast<const std::uint8_t*>(reinterpret_cast<std::uintptr_t>(from) +
                                                 static_cast<std::uintptr_t>(distance));
  }

  template <class Codes>
  static void score_parts(std::span<const CodedPart> parts, const Codes& codes, std::size_t tile_begin,
                          std::size_t tile_end, const QueryBlock& block, std::size_t row_begin, std::size_t row_end,
                          const float* factor, float* logits, std::size_t stride) {
    const Avx512Reader<Unit, Codes, 128> reader(codes);
    // A plane of a query is a row of its own until the end.
    const std::size_t planes = block.plane_count, most = planes == 2 ? 4 : 8;
    for (std::size_t first = row_begin; first < row_end;) {
      std::size_t rows = most;
      while (rows > row_end - first) rows /= 2;
      Scoring s;
      s.queries = block.planes + first * planes * block.dim;
      s.planes = planes;
      s.rotated = block.rotated + first * block.dim;
      s.step = block.step + first;
      s.sums = block.sums + first * planes;
      s.factor = factor + first;
      s.logits = logits + (first - row_begin) * stride;
      s.stride = stride;
      s.fetches = first == row_begin;
      if (rows * planes == 8) score_rows<8>(parts, reader, tile_begin, tile_end, s);
      if (rows * planes == 4) score_rows<4>(parts, reader, tile_begin, tile_end, s);
      if (rows * planes == 2) score_rows<2>(parts, reader, tile_begin, tile_end, s);
      if (rows * planes == 1) score_rows<1>(parts, reader, tile_begin, tile_end, s);
      first += rows;
    }
  }

  // The queries of one call of score_rows, kRows planes of them.
  struct Scoring {
    const std::int8_t* queries;  // [plane][dim]
    std::size_t planes;          // of a query
    std::int32_t start[8];       // what takes the 128 of unsigned levels off, per plane
    float centers[8];            // products with centres times what logits are multiplied by: [part][row]
    float by[8];                 // what a level times a number of the query counts
    float after[8];              // 1; the whole factor where it is so small or large that products need care
    bool plain;                  // all of `after` is 1, and no logit can be infinite
    const float* rotated;
    const float* step;
    const std::int32_t* sums;
    const float* factor;
    float* logits;
    std::size_t stride;
    bool fetches;             // what is read next
    std::ptrdiff_t distance;  // to it
    __m256 first;             // what `by` and `centers` hold of the factor
  };

  template <std::size_t kRows, class Reader>
  static void score_rows(std::span<const CodedPart> parts, const Reader& reader, std::size_t tile_begin,
                         std::size_t tile_end, Scoring& s) {
    if (parts.size() == 1) {
      score_rows<kRows, 1>(parts, reader, tile_begin, tile_end, s);
    } else if (kRows == 1 && parts.size() <= 4) {
      score_rows<kRows, 4>(parts, reader, tile_begin, tile_end, s);
    } else {
      score_rows<kRows, 8 / kRows>(parts, reader, tile_begin, tile_end, s);
    }
  }
  // kParts: whose centres are multiplied at once.
  template <std::size_t kRows, std::size_t kParts, class Reader>
  static void score_rows(std::span<const CodedPart> parts, const Reader& reader, std::size_t tile_begin,
                         std::size_t tile_end, Scoring& s) {
    constexpr std::size_t kTiles = kRows <= 4 ? 4 : 2;
    prepare_rows<kRows>(s);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const CodedPart& part = parts[p];
      s.distance = s.fetches ? fetch_head(part) : 0;
      if (p % kParts == 0) multiply_centers<kRows, kParts>(parts.subspan(p), s);
      const float* shared = s.centers + p % kParts * kRows;
      std::size_t tile = tile_begin;
      for (; tile + kTiles <= tile_end; tile += kTiles) score_tiles<kRows, kTiles>(part, reader, tile, shared, s);
      for (; tile < tile_end; ++tile) score_tiles<kRows, 1>(part, reader, tile, shared, s);
      s.logits += part.page_tokens;
    }
  }

  // What all keys share.
  template <std::size_t kRows>
  [[gnu::flatten]] static void prepare_rows(Scoring& s) {
    const __m256i sums = _mm256_maskz_loadu_epi32(static_cast<__mmask8>((1u << kRows) - 1u), s.sums);
    const __m256i start = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(sums, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.start), start);
    const auto rows = static_cast<__mmask8>((1u << (s.planes == 2 ? kRows / 2 : kRows)) - 1u);
    const __m256 step = _mm256_maskz_loadu_ps(rows, s.step), factor = _mm256_maskz_loadu_ps(rows, s.factor);
    // Products of stored keys and prepared queries stay below 2^108 (QueryBlock).
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), factor), one = _mm256_set1_ps(1.0f);
    const auto extreme =
        static_cast<__mmask8>(_mm256_mask_cmp_ps_mask(rows, size, _mm256_set1_ps(0x1p-60f), _CMP_LT_OQ) |
                              _mm256_mask_cmp_ps_mask(rows, size, _mm256_set1_ps(0x1p18f), _CMP_GT_OQ));
    s.first = _mm256_mask_mov_ps(factor, extreme, one);
    _mm256_storeu_ps(s.by, _mm256_mul_ps(step, s.first));
    _mm256_storeu_ps(s.after, _mm256_mask_mov_ps(one, extreme, factor));
    s.plain = extreme == 0;
  }

  // What the keys of a part share, for as many of the parts as have room: eight products at once.
  template <std::size_t kRows, std::size_t kParts>
  [[gnu::flatten]] static void multiply_centers(std::span<const CodedPart> parts, Scoring& s) {
    const CodedPart* from[kParts];
    __m512 totals[kParts * kRows];
    repeat<kParts * kRows>([&](auto at) { totals[at.value] = _mm512_setzero_ps(); });
    repeat<kParts>([&](auto p) { from[p.value] = &parts[(std::min)(p.value, parts.size() - 1)]; });
    if (parts[0].center_bits == 8) add_centers<8, kRows>(from, s, totals);
    if (parts[0].center_bits == 16) add_centers<16, kRows>(from, s, totals);
    // Lane part * kRows + row.
    __m256 by = _mm256_mul_ps(s.first, _mm256_set1_ps(parts[0].center_scale));
    if constexpr (kParts > 1) {
      const auto scale = [&](std::size_t lane) { return from[lane / kRows % kParts]->center_scale; };
      const __m256 scales =
          _mm256_setr_ps(scale(0), scale(1), scale(2), scale(3), scale(4), scale(5), scale(6), scale(7));
      const __m256i row = _mm256_and_si256(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(kRows - 1));
      by = _mm256_mul_ps(_mm256_permutexvar_ps(row, s.first), scales);
    }
    _mm256_storeu_ps(s.centers, _mm256_mul_ps(_mm512_castps512_ps256(trees(totals)), by));
  }
  template <unsigned kBits, std::size_t kRows, std::size_t kParts>
  static void add_centers(const CodedPart* const (&parts)[kParts], const Scoring& s, __m512 (&sums)[kParts * kRows]) {
    // A query of two planes counts as two rows.
    if (s.planes == 1) {
      add_products<kBits, kRows, kRows>(parts, s.rotated, sums);
    } else if constexpr (kRows > 1) {
      add_products<kBits, kRows, kRows / 2>(parts, s.rotated, sums);
    }
  }
  template <unsigned kBits, std::size_t kRows, std::size_t kQueries, std::size_t kParts>
  static void add_products(const CodedPart* const (&parts)[kParts], const float* queries,
                           __m512 (&sums)[kParts * kRows]) {
    const std::size_t dim = parts[0]->dim;
    for (std::size_t i = 0; i < dim; i += 16) {
      __m512 centers[kParts];
      repeat<kParts>([&](auto p) { centers[p.value] = center16<kBits>(*parts[p.value], i); });
      repeat<kQueries>([&](auto r) {
        const __m512 query = _mm512_loadu_ps(queries + r.value * dim + i);
        repeat<kParts>([&](auto p) {
          __m512& sum = sums[p.value * kRows + r.value];
          sum = _mm512_fmadd_ps(query, centers[p.value], sum);
        });
      });
    }
  }

  template <std::size_t kRows, std::size_t kTiles, class Reader>
  [[gnu::flatten]] static void score_tiles(const CodedPart& part, const Reader& reader, std::size_t tile,
                                           const float* shared, const Scoring& s) {
    constexpr std::size_t kSums = kRows * kTiles >= 16 ? 1 : kRows * kTiles >= 4 ? 2 : 4;  // of a row
    constexpr std::size_t kBytes = Reader::kBytes;
    __m512i sums[kTiles][kRows][kSums];
    repeat<kTiles * kRows>([&](auto at) {
      sums[at.value % kTiles][at.value / kTiles][0] = _mm512_set1_epi32(s.start[at.value / kTiles]);
      repeat<kSums - 1>(
          [&](auto more) { sums[at.value % kTiles][at.value / kTiles][more.value + 1] = _mm512_setzero_si512(); });
    });
    const std::size_t dim = part.dim, groups = dim / 16, stride = groups * kBytes;
    const std::uint8_t* fragment = part.fragments + tile * stride;
    const std::uint8_t* behind = moved(fragment, s.distance);  // line by line
    const std::uint8_t* history = fragment + stride - 16;      // a tile is closed
    for (std::size_t group = 0; group < groups; ++group) {
      fetch_bytes<kTiles * kBytes>(behind);
      // Inlined by name: clang calls it otherwise, and keeps all sums in memory.
      repeat<2>([&](auto half) __attribute__((always_inline)) {
        constexpr std::size_t kHalf = decltype(half)::value;
        __m512i levels[kTiles][2];
        repeat<kTiles>([&](auto t) {
          reader.template read_half<kHalf>(fragment + t.value * stride, history + t.value * stride, levels[t.value]);
        });
        repeat<2 * kRows>([&](auto at) {
          constexpr std::size_t kSlot = decltype(at)::value / kRows, kRow = decltype(at)::value % kRows;
          constexpr bool kLoads = kTiles == 1 || (kTiles == 2 && kSlot == 1);
          const std::int8_t* from = s.queries + kRow * dim + group * 16 + kHalf * 8 + kSlot * 4;
          const __m512i four = _mm512_set1_epi32(load32(from));
          repeat<kTiles>([&](auto t) {
            __m512i& sum = sums[t.value][kRow][(2 * kHalf + kSlot) % kSums];
            sum = multiply_four<kLoads>(sum, levels[t.value][kSlot], four, from);
          });
        });
      });
      fragment += kBytes, behind += kTiles * kBytes, history = fragment - 16;
    }
    repeat<kTiles * kRows>([&](auto at) {
      __m512i(&row)[kSums] = sums[at.value % kTiles][at.value / kTiles];
      if constexpr (kSums == 4)
        row[0] = _mm512_add_epi32(_mm512_add_epi32(row[0], row[1]), _mm512_add_epi32(row[2], row[3]));
      if constexpr (kSums == 2) row[0] = _mm512_add_epi32(row[0], row[1]);
    });
    __m512 scales[kTiles];
    repeat<kTiles>([&](auto t) { scales[t.value] = widen16(part.scales + (tile + t.value) * 16); });
    // Copies: what is written might be s, as far as the compiler knows.
    float* to = s.logits + tile * 16;
    const std::size_t to_stride = s.stride;
    const auto product = [&](std::size_t r, std::size_t t, __m512i sum, __m512& x) {
      const __m512 scale = _mm512_mul_ps(scales[t], _mm512_set1_ps(s.by[r]));
      x = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), _mm512_set1_ps(shared[r]));
    };
    const auto write = [&](std::size_t r, std::size_t t, __m512i sum) {
      const __m512 most = _mm512_set1_ps(3.402823466e38f), least = _mm512_set1_ps(-3.402823466e38f);
      __m512 x;
      product(r, t, sum, x);
      x = _mm512_mul_ps(x, _mm512_set1_ps(s.after[r]));
      _mm512_storeu_ps(to + t * 16, _mm512_min_ps(_mm512_max_ps(x, least), most));
    };
    if (s.planes == 1 && s.plain) {
      repeat<kRows>([&](auto r) {
        repeat<kTiles>([&](auto t) {
          __m512 x;
          product(r.value, t.value, sums[t.value][r.value][0], x);
          _mm512_storeu_ps(to + t.value * 16, x);
        });
        to += to_stride;
      });
    } else if (s.planes == 1) {
      repeat<kRows>([&](auto r) {
        repeat<kTiles>([&](auto t) { write(r.value, t.value, sums[t.value][r.value][0]); });
        to += to_stride;
      });
    } else if constexpr (kRows > 1) {
      repeat<kRows / 2>([&](auto r) {
        repeat<kTiles>([&](auto t) {
          // Modulo 2^32, where the sum of both planes fits.
          const __m512i high = _mm512_slli_epi32(sums[t.value][2 * r.value][0], 7);
          write(r.value, t.value, _mm512_add_epi32(high, sums[t.value][2 * r.value + 1][0]));
        });
        to += to_stride;
      });
    }
  }

  // What accumulate_groups works with.
  struct Accumulation {
    alignas(64) std::uint8_t planes[4][2][kMaxPage + 64];  // the high and the low seven bits of each row's weights
    std::int32_t start[8];                                 // what takes the 128 of unsigned levels off; four are used
    float zero_points[4];                                  // of a row, over all parts
    bool counts[4], all_count;                             // rows with a probability
    std::ptrdiff_t distance[kMaxPage / 16];                // of each part to the one that is fetched
    std::span<const CodedPart> parts;
    std::size_t begin, end;
    const WeightSums* sums;
    std::size_t sum_stride;
    float* out;
    std::size_t stride;
  };

  template <std::size_t kRows, class Reader>
  static void accumulate_rows(const Reader& reader, const std::int16_t* weights, std::size_t stride, Accumulation& a) {
    split_weights<kRows>(a.begin, a.end, weights, stride, a);
    a.all_count = true;
    for (std::size_t r = 0; r < kRows; ++r) {
      a.zero_points[r] = 0;
      a.counts[r] = false;
      for (std::size_t k = 0; k < a.parts.size(); ++k) {
        a.counts[r] |= a.sums[k * a.sum_stride + r].probability > 0;
        a.zero_points[r] += a.sums[k * a.sum_stride + r].zero_point;
      }
      a.all_count &= a.counts[r];
    }
    constexpr std::size_t kGroups = kRows == 4 ? 2 : 4;
    const std::size_t groups = a.parts[0].dim / 16;
    std::size_t group = 0;
    for (; group + kGroups <= groups; group += kGroups) accumulate_groups<kRows, kGroups>(reader, a, group);
    for (; group < groups; ++group) accumulate_groups<kRows, 1>(reader, a, group);
  }

  template <std::size_t kRows>
  [[gnu::flatten]] static void split_weights(std::size_t begin, std::size_t end, const std::int16_t* weights,
                                             std::size_t stride, Accumulation& a) {
    __m512i sums[kRows];
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), low = _mm512_set1_epi16(127);
    const __m512i minus = _mm512_set1_epi16(-128);
    for (std::size_t r = 0; r < kRows; ++r) {
      const std::int16_t* from = weights + r * stride;
      __m512i sum = _mm512_setzero_si512();
      // In pieces as they were stored: other loads would wait until the stores are done. Behind the last tile there is
      // room in the planes.
      for (std::size_t c = begin; c < end; c += 64) {
        const __m512i x = end - c == 16 ? _mm512_zextsi256_si512(load256(from + c)) : load512(from + c);
        __m512i y = _mm512_setzero_si512();
        if (end - c >= 64) {
          y = load512(from + c + 32);
        } else if (end - c == 48) {
          y = _mm512_zextsi256_si512(load256(from + c + 32));
        }
        sum = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, x, minus), y, minus);
        const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(x, 7), _mm512_srli_epi16(y, 7));
        const __m512i rest = _mm512_packus_epi16(_mm512_and_si512(x, low), _mm512_and_si512(y, low));
        _mm512_storeu_si512(a.planes[r][0] + c, _mm512_permutexvar_epi64(order, high));
        _mm512_storeu_si512(a.planes[r][1] + c, _mm512_permutexvar_epi64(order, rest));
      }
      sums[r] = sum;
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(a.start), integer_trees(sums));
  }

  // Tiles of one part, from a coordinate group on.
  struct Run {
    std::size_t part = 0, tiles = 0;  // tiles: 0 behind the last part
    const std::uint8_t *fragment = nullptr, *behind = nullptr, *history = nullptr;

    Run(const Accumulation& a, std::size_t group, std::size_t bytes, std::size_t groups) {
      start(a, a.begin / 16, group, bytes, groups);
    }
    void next(const Accumulation& a, std::size_t group, std::size_t bytes, std::size_t groups) {
      tiles = 0;
      if (++part < a.parts.size()) start(a, 0, group, bytes, groups);
    }

   private:
    void start(const Accumulation& a, std::size_t tile, std::size_t group, std::size_t bytes, std::size_t groups) {
      const CodedPart& from = a.parts[part];
      const std::size_t tokens = from.page_tokens, stride = tokens / 16 * bytes;
      tiles = (std::min)(a.end - part * tokens, tokens) / 16 - tile;
      const std::uint8_t* first = from.fragments + group * stride;
      fragment = first + tile * bytes;
      behind = moved(first + tile * groups * bytes, a.distance[part]);  // line by line
      // The section is closed: the last fragment comes before the first.
      history = (group == 0 && tile == 0 ? fragment + from.dim / 16 * stride : fragment) - 16;
    }
  };

  template <std::size_t kRows, std::size_t kGroups, class Reader>
  [[gnu::flatten]] static void accumulate_groups(const Reader& reader, const Accumulation& a, std::size_t group) {
    constexpr std::size_t kPlanes = 2 * kRows, kSums = kRows * kGroups >= 8 ? 1 : kRows * kGroups >= 4 ? 2 : 4;
    constexpr std::size_t kBytes = Reader::kBytes;
    __m512i sums[kGroups][kPlanes][kSums];
    repeat<kGroups * kPlanes * kSums>([&](auto at) {
      constexpr std::size_t kAt = decltype(at)::value;
      sums[kAt % kGroups][kAt / kGroups % kPlanes][kAt / kGroups / kPlanes] = _mm512_setzero_si512();
    });
    repeat<kGroups * kRows>([&](auto at) {
      constexpr std::size_t kRow = decltype(at)::value / kGroups;
      sums[at.value % kGroups][2 * kRow + 1][0] = _mm512_set1_epi32(a.start[kRow]);
    });
    const std::size_t stride = a.parts[0].page_tokens / 16 * kBytes;
    const std::uint8_t* weights = &a.planes[0][0][0] + a.begin;
    // One loop over the tiles of all parts: with one inside the other g++ keeps the sums in memory.
    Run run(a, group, kBytes, kGroups);
    const std::uint8_t *fragment = run.fragment, *behind = run.behind, *history = run.history;
    for (std::size_t left = run.tiles; left != 0;) {
      fetch_bytes<kGroups * kBytes>(behind);
      repeat<2>([&](auto half) __attribute__((always_inline)) {
        constexpr std::size_t kHalf = decltype(half)::value;
        __m512i levels[kGroups][2];
        repeat<kGroups>([&](auto g) {
          const std::uint8_t* at = fragment + g.value * stride;
          reader.template read_half<kHalf>(at, g.value == 0 ? history : at - 16, levels[g.value]);
        });
        repeat<2 * kPlanes>([&](auto at) {
          constexpr std::size_t kSlot = decltype(at)::value / kPlanes, kPlane = decltype(at)::value % kPlanes;
          const std::uint8_t* from = weights + kPlane * (kMaxPage + 64) + kHalf * 8 + kSlot * 4;
          constexpr bool kLoads = kGroups == 1 || (kGroups == 2 && kSlot == 1);
          const __m512i four = _mm512_set1_epi32(load32(from));
          repeat<kGroups>([&](auto g) {
            __m512i& sum = sums[g.value][kPlane][(2 * kHalf + kSlot) % kSums];
            sum = multiply_four<kLoads>(sum, levels[g.value][kSlot], four, from);
          });
        });
      });
      fragment += kBytes, behind += kGroups * kBytes, history = fragment - 16, weights += 16;
      if (--left != 0) continue;
      run.next(a, group, kBytes, kGroups);
      fragment = run.fragment, behind = run.behind, history = run.history, left = run.tiles;
    }
    __m512 rests[kRows][kGroups];
    repeat<kRows * kGroups>([&](auto at) {
      constexpr std::size_t kRow = decltype(at)::value / kGroups;
      rests[kRow][at.value % kGroups] = _mm512_set1_ps(a.zero_points[kRow]);
    });
    const std::size_t centers = a.parts[0].center_bits != 0 ? a.parts.size() : 0;
    for (std::size_t k = 0; k < centers; ++k) {
      __m512 center[kGroups];
      repeat<kGroups>([&](auto g) { center[g.value] = any_center16(a.parts[k], (group + g.value) * 16); });
      repeat<kRows>([&](auto row) {
        const __m512 probability = _mm512_set1_ps(a.sums[k * a.sum_stride + row.value].probability);
        repeat<kGroups>([&](auto g) {
          __m512& rest = rests[row.value][g.value];
          rest = _mm512_fmadd_ps(center[g.value], probability, rest);
        });
      });
    }
    // Copies: what is written might be a, as far as the compiler knows.
    const WeightSums* weight = a.sums;
    float* to = a.out + group * 16;
    const std::size_t out_stride = a.stride;
    const bool* counts = a.all_count ? nullptr : a.counts;
    repeat<kRows>([&](auto row) {
      constexpr std::size_t kRow = decltype(row)::value;
      const __m512 coefficient = _mm512_set1_ps(weight[kRow].coefficient);
      if (counts == nullptr || counts[kRow]) {
        repeat<kGroups>([&](auto g) {
          __m512i high = sums[g.value][2 * kRow][0], low = sums[g.value][2 * kRow + 1][0];
          repeat<kSums - 1>([&](auto more) {
            high = _mm512_add_epi32(high, sums[g.value][2 * kRow][more.value + 1]);
            low = _mm512_add_epi32(low, sums[g.value][2 * kRow + 1][more.value + 1]);
          });
          const __m512 total = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low));
          const __m512 sum = _mm512_fmadd_ps(total, coefficient, rests[kRow][g.value]);
          _mm512_storeu_ps(to + g.value * 16, _mm512_add_ps(_mm512_loadu_ps(to + g.value * 16), sum));
        });
      }
      to += out_stride;
    });
  }

  // sum + each lane's four unsigned levels times the four signed numbers at `from`. kLoads: the product loads them,
  // which saves an instruction; else they are in all lanes of `four`. Where two registers of levels share them every
  // second product loads, so that loads do not become the limit.
  template <bool kLoads>
  [[gnu::always_inline]] static __m512i multiply_four(__m512i sum, __m512i levels, __m512i four, const void* from) {
    if constexpr (kLoads) {
      using Four = const std::uint8_t[4];
      __asm__("{vpdpbusd %2%{1to16%}, %1, %0|vpdpbusd %0, %1, %2%{1to16%}}"
              : "+v"(sum)
              : "v"(levels), "m"(*static_cast<Four*>(from)));
      return sum;
    } else {
      return settled(_mm512_dpbusd_epi32(sum, levels, four));
    }
  }
};

using Avx512 = Avx512Kernels<UnitTarget>;

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif
#undef TURBOQUANT_UNROLL

#endif
