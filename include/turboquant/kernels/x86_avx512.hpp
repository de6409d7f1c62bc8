// Kernels for x86 with AVX-512 (F, BW, VL, DQ, VNNI and VBMI: Ice Lake, Zen 4 and later), for programs built with any
// flags or none: the functions of this file carry their target.
#pragma once

#include <turboquant/kernels/portable.hpp>
#include <turboquant/kernels/x86_avx512_encode.hpp>
#include <turboquant/kernels/x86_avx512_read.hpp>

#if defined(TURBOQUANT_MAKES_X86_KERNELS)
#define TURBOQUANT_HAS_AVX512 1

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
/// An unpacked slot is 64 levels, one operand of vpdpbusd, which multiplies unsigned by signed bytes. For keys levels +
/// 128 are the unsigned ones, and sums begin at -128 times the sum of the query; for values the weights are, in two
/// planes of seven bits. Enough sums are kept side by side to cover the latency of four cycles: eight or sixteen.
template <class Unit>
struct Avx512Kernels : Avx512Encoders<Unit>, Avx512Loads<Unit> {
  static constexpr const char* name = "avx512";

  // ---- queries and logits

  template <class Codes>
  static void score(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                    const QueryBlock& block, std::size_t row_begin, std::size_t row_end, const float* factor,
                    float* logits, std::size_t stride) {
    const Avx512Reader<Unit, Codes, 128> reader(codes);
    fetch_head(part);
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
      s.factor = factor + first;
      s.logits = logits + (first - row_begin) * stride;
      s.stride = stride;
      s.distance = first == row_begin ? distance_to_next(part) : 0;
      if (rows * planes == 8) score_rows<8>(part, reader, tile_begin, tile_end, s);
      if (rows * planes == 4) score_rows<4>(part, reader, tile_begin, tile_end, s);
      if (rows * planes == 2) score_rows<2>(part, reader, tile_begin, tile_end, s);
      if (rows * planes == 1) score_rows<1>(part, reader, tile_begin, tile_end, s);
      first += rows;
    }
  }

  static void score_raw(const bfloat16* keys, std::size_t count, const QueryBlock& block, std::size_t row_begin,
                        std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
    alignas(64) float key[kMaxRow];
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t i = 0; i < block.dim; i += 16) _mm512_store_ps(key + i, widen16(keys + t * block.dim + i));
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
    // Nearly always whole tiles are visible.
    if (low == begin && high == end && begin % 16 == 0 && end % 16 == 0) {
      return softmax_range<true>(logits, begin, end, low, high, state);
    }
    return softmax_range<false>(logits, begin, end, low, high, state);
  }

  static WeightSums weigh(const CodedPart& part, const float* p, std::size_t begin, std::size_t end,
                          std::int16_t* weights) {
    WeightSums sums{0, 0, 0};
    alignas(64) float products[kMaxPage];
    __m512 most = _mm512_setzero_ps(), total = most;
    for (std::size_t t = begin; t < end; t += 16) {
      const __m512 x = _mm512_loadu_ps(p + t), product = _mm512_mul_ps(x, widen16(part.scales + t));
      _mm512_store_ps(products + t, product);
      most = _mm512_max_ps(most, product);
      total = _mm512_add_ps(total, x);
    }
    if (part.zero_points != nullptr) {
      __m512 zero = _mm512_setzero_ps();
      for (std::size_t t = begin; t < end; t += 16) {
        zero = _mm512_fmadd_ps(_mm512_loadu_ps(p + t), widen16(part.zero_points + t), zero);
      }
      sums.zero_point = tree(zero);
    }
    const float largest = _mm512_reduce_max_ps(most);
    sums.probability = tree(total);
    sums.coefficient = largest / static_cast<float>(kWeightMax);
    // One division instead of one for each token; a power of two keeps its quotient finite.
    const float down = Base::power_of_two(-(std::min)(Base::exponent(largest), 126));
    const __m512 by = _mm512_set1_ps(largest > 0 ? static_cast<float>(kWeightMax) / (largest * down) : 0.0f);
    for (std::size_t t = begin; t < end; t += 16) {
      const __m512 relative = _mm512_mul_ps(_mm512_load_ps(products + t), _mm512_set1_ps(down));
      const __m512i w = _mm512_cvtps_epi32(_mm512_mul_ps(relative, by));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + t), _mm512_cvtepi32_epi16(w));
    }
    return sums;
  }

  // ---- accumulation

  template <class Codes>
  static void accumulate(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                         std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                         const WeightSums* sums, float* out, std::size_t out_stride) {
    alignas(64) float center[kMaxRow];
    decode_center(part, center);
    const Avx512Reader<Unit, Codes, 0> reader(codes);
    fetch_head(part);
    for (std::size_t first = 0; first < rows;) {
      std::size_t set = 8;
      while (set > rows - first) set /= 2;
      // The high and the low seven bits of each row's weights.
      alignas(64) std::uint8_t planes[8][2][kMaxPage];
      for (std::size_t r = 0; r < set; ++r) {
        const std::int16_t* from = weights + (first + r) * weight_stride;
        std::size_t t = tile_begin * 16;
        for (; t + 32 <= tile_end * 16; t += 32) {
          const __m512i w = load512(from + t);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(planes[r][0] + t),
                              _mm512_cvtepi16_epi8(_mm512_srli_epi16(w, 7)));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(planes[r][1] + t),
                              _mm512_cvtepi16_epi8(_mm512_and_si512(w, _mm512_set1_epi16(127))));
        }
        if (t < tile_end * 16) {
          const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + t));
          _mm_storeu_si128(reinterpret_cast<__m128i*>(planes[r][0] + t), _mm256_cvtepi16_epi8(_mm256_srli_epi16(w, 7)));
          _mm_storeu_si128(reinterpret_cast<__m128i*>(planes[r][1] + t),
                           _mm256_cvtepi16_epi8(_mm256_and_si256(w, _mm256_set1_epi16(127))));
        }
      }
      Accumulation a{&planes[0][0][0],         sums + first, center,
                     out + first * out_stride, out_stride,   first == 0 ? distance_to_next(part) : 0};
      if (set == 8) accumulate_rows<8>(part, reader, tile_begin, tile_end, a);
      if (set == 4) accumulate_rows<4>(part, reader, tile_begin, tile_end, a);
      if (set == 2) accumulate_rows<2>(part, reader, tile_begin, tile_end, a);
      if (set == 1) accumulate_rows<1>(part, reader, tile_begin, tile_end, a);
      first += set;
    }
  }

  static void accumulate_raw(const bfloat16* values, std::size_t count, std::size_t dim, std::size_t rows,
                             const float* p, std::size_t p_stride, float* out, std::size_t out_stride) {
    for (std::size_t first = 0; first < rows;) {
      std::size_t set = 8;
      while (set > rows - first) set /= 2;
      const float* weights = p + first * p_stride;
      float* to = out + first * out_stride;
      if (set == 8) accumulate_raw_rows<8>(values, count, dim, weights, p_stride, to, out_stride);
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
  using Avx512Loads<Unit>::load32, Avx512Loads<Unit>::load128, Avx512Loads<Unit>::load512;
  using Avx512Encoders<Unit>::settled;
  using Base::kMaxPage;
  using Base::kMaxRow;

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
  static float dot(const float* a, const float* b, std::size_t dim) {
    __m512 sums = _mm512_setzero_ps();
    for (std::size_t i = 0; i < dim; i += 16)
      sums = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), sums);
    return tree(sums);
  }
  // tree() of up to eight rows at once, in the same order of additions; rows repeat behind the last one.
  template <std::size_t kRows>
  static __m256 trees(const __m512 (&rows)[kRows]) {
    __m512 eights[4], fours[2];
    repeat<4>([&](auto k) {
      const __m512 a = rows[k.value % kRows], b = rows[(k.value + 4) % kRows];
      eights[k.value] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    });
    repeat<2>([&](auto k) {
      const __m512 a = eights[k.value], b = eights[k.value + 2];
      fours[k.value] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    });
    const __m512d a = _mm512_castps_pd(fours[0]), b = _mm512_castps_pd(fours[1]);
    const __m512 twos =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0x00)), _mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0xff)));
    // Now 128 bits hold the rows k and k + 1 of 0, 4, 2, 6.
    const __m512 ones = _mm512_add_ps(twos, _mm512_movehdup_ps(twos));
    return _mm512_castps512_ps256(
        _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0), ones));
  }

  // 16 coordinates of the centre from i on.
  template <unsigned kBits>
  static __m512 center16(const CodedPart& part, std::size_t i) {
    __m512i level;
    if constexpr (kBits == 8) {
      level = _mm512_cvtepi8_epi32(load128(part.center + i));
    } else {
      level = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(part.center + 2 * i)));
    }
    return _mm512_mul_ps(_mm512_set1_ps(part.center_scale), _mm512_cvtepi32_ps(level));
  }
  static void decode_center(const CodedPart& part, float* out) {
    if (part.center_bits == 16) {
      for (std::size_t i = 0; i < part.dim; i += 16) _mm512_store_ps(out + i, center16<16>(part, i));
    } else if (part.center_bits == 8) {
      for (std::size_t i = 0; i < part.dim; i += 16) _mm512_store_ps(out + i, center16<8>(part, i));
    } else {
      for (std::size_t i = 0; i < part.dim; i += 16) _mm512_store_ps(out + i, _mm512_setzero_ps());
    }
  }

  // The sections before the fragments of the part that is read next.
  static void fetch_head(const CodedPart& part) {
    if (part.next == nullptr) return;
    const auto bytes = static_cast<std::size_t>(part.fragments - part.begin());
    for (std::size_t i = 0; i < bytes; i += 64) fetch_line(part.next + i);
  }
  template <std::size_t kRows>
  [[gnu::flatten]] static void accumulate_raw_rows(const bfloat16* values, std::size_t count, std::size_t dim,
                                                   const float* p, std::size_t p_stride, float* out,
                                                   std::size_t out_stride) {
    for (std::size_t i = 0; i < dim; i += 16) {
      __m512 sums[kRows];
      repeat<kRows>([&](auto r) { sums[r.value] = _mm512_loadu_ps(out + r.value * out_stride + i); });
      for (std::size_t t = 0; t < count; ++t) {
        const __m512 value = widen16(values + t * dim + i);
        repeat<kRows>([&](auto r) {
          const __m512 weight = _mm512_set1_ps(p[r.value * p_stride + t]);
          // What weighs nothing need not be finite.
          const __mmask16 counts = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_GT_OQ);
          sums[r.value] = _mm512_mask3_fmadd_ps(weight, value, sums[r.value], counts);
        });
      }
      repeat<kRows>([&](auto r) { _mm512_storeu_ps(out + r.value * out_stride + i, sums[r.value]); });
    }
  }

  // How far behind a byte of this part the same byte of the part that is read next lies; 0 without such a part: then
  // fetching asks for what is being read.
  static std::ptrdiff_t distance_to_next(const CodedPart& part) {
    if (part.next == nullptr) return 0;
    return static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(part.next) -
                                       reinterpret_cast<std::uintptr_t>(part.begin()));
  }
  // By name: g++ takes a function that only fetches for one without effect, and drops calls of it.
  template <std::size_t kBytes>
  [[gnu::always_inline]] static void fetch_bytes(const std::uint8_t* from) {
    __asm__ volatile("prefetcht0 %0" : : "m"(*from));
    if constexpr (kBytes > 64) __asm__ volatile("prefetcht0 %0" : : "m"(from[64]));
    if constexpr (kBytes > 128) fetch_bytes<kBytes - 128>(from + 128);
  }
  static const std::uint8_t* moved(const std::uint8_t* from, std::ptrdiff_t distance) {
    return reinterpret_cast<const std::uint8_t*>(reinterpret_cast<std::uintptr_t>(from) +
                                                 static_cast<std::uintptr_t>(distance));
  }

  // The queries of one call of score_rows, kRows planes of them.
  struct Scoring {
    const std::int8_t* queries;  // [plane][dim]
    std::size_t planes;          // of a query
    std::int32_t start[8];       // what takes the 128 of unsigned levels off, per plane
    float shared[8];             // with the centre
    const float* rotated;
    const float* step;
    const float* factor;
    float* logits;
    std::size_t stride;
    std::ptrdiff_t distance;  // to the part that is read next
  };

  template <std::size_t kRows, class Reader>
  static void score_rows(const CodedPart& part, const Reader& reader, std::size_t tile_begin, std::size_t tile_end,
                         Scoring& s) {
    constexpr std::size_t kTiles = kRows <= 2 ? 4 : 2;
    prepare_rows<kRows>(part, s);
    std::size_t tile = tile_begin;
    for (; tile + kTiles <= tile_end; tile += kTiles) score_tiles<kRows, kTiles>(part, reader, tile, s);
    for (; tile < tile_end; ++tile) score_tiles<kRows, 1>(part, reader, tile, s);
  }

  // What all keys of the part share: s.start and s.shared.
  template <std::size_t kRows>
  [[gnu::flatten]] static void prepare_rows(const CodedPart& part, Scoring& s) {
    __m512i counts[kRows];
    repeat<kRows>([&](auto v) { counts[v.value] = _mm512_setzero_si512(); });
    const __m512i ones = _mm512_set1_epi8(1);
    const std::size_t dim = part.dim;
    std::size_t i = 0;
    for (; i + 64 <= dim; i += 64) {
      repeat<kRows>([&](auto v) {
        counts[v.value] = _mm512_dpbusd_epi32(counts[v.value], ones, load512(s.queries + v.value * dim + i));
      });
    }
    for (; i < dim; i += 16) {
      repeat<kRows>([&](auto v) {
        const __m512i quarter = _mm512_zextsi128_si512(load128(s.queries + v.value * dim + i));
        counts[v.value] = _mm512_dpbusd_epi32(counts[v.value], ones, quarter);
      });
    }
    __m512 totals[kRows];
    repeat<kRows>([&](auto v) {
      // Exact in float: 128 times a sum of at most 1024 numbers of 127 stays below 2^24.
      totals[v.value] = _mm512_cvtepi32_ps(_mm512_slli_epi32(counts[v.value], 7));
    });
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.start),
                        _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtps_epi32(trees(totals))));
    repeat<kRows>([&](auto r) { totals[r.value] = _mm512_setzero_ps(); });
    if (part.center_bits == 8) add_center<8>(part, s, totals);
    if (part.center_bits == 16) add_center<16>(part, s, totals);
    _mm256_storeu_ps(s.shared, trees(totals));
  }
  template <unsigned kBits, std::size_t kRows>
  static void add_center(const CodedPart& part, const Scoring& s, __m512 (&sums)[kRows]) {
    const std::size_t dim = part.dim;
    if (s.planes == 1) {
      for (std::size_t i = 0; i < dim; i += 16) {
        const __m512 center = center16<kBits>(part, i);
        repeat<kRows>([&](auto r) {
          sums[r.value] = _mm512_fmadd_ps(_mm512_loadu_ps(s.rotated + r.value * dim + i), center, sums[r.value]);
        });
      }
    } else if constexpr (kRows > 1) {
      for (std::size_t i = 0; i < dim; i += 16) {
        const __m512 center = center16<kBits>(part, i);
        repeat<kRows / 2>([&](auto r) {
          sums[r.value] = _mm512_fmadd_ps(_mm512_loadu_ps(s.rotated + r.value * dim + i), center, sums[r.value]);
        });
      }
    }
  }

  template <std::size_t kRows, std::size_t kTiles, class Reader>
  [[gnu::flatten]] static void score_tiles(const CodedPart& part, const Reader& reader, std::size_t tile,
                                           const Scoring& s) {
    constexpr std::size_t kSums = kRows * kTiles >= 8 ? 1 : kRows * kTiles >= 4 ? 2 : 4;  // of a row
    constexpr std::size_t kBytes = Reader::kBytes;
    __m512i sums[kTiles][kRows][kSums];
    repeat<kTiles * kRows>([&](auto at) {
      sums[at.value % kTiles][at.value / kTiles][0] = _mm512_set1_epi32(s.start[at.value / kTiles]);
      repeat<kSums - 1>(
          [&](auto more) { sums[at.value % kTiles][at.value / kTiles][more.value + 1] = _mm512_setzero_si512(); });
    });
    const std::size_t dim = part.dim, groups = dim / 16, stride = groups * kBytes;
    const std::uint8_t* fragment = part.fragments + tile * stride;
    const std::uint8_t* behind = moved(fragment, s.distance);
    const std::uint8_t* history = fragment + stride - 16;  // a tile is closed
    for (std::size_t group = 0; group < groups; ++group) {
      __m512i levels[kTiles][4];
      repeat<kTiles>([&](auto t) {
        reader.read(fragment + t.value * stride, history + t.value * stride, levels[t.value]);
        fetch_bytes<kBytes>(behind + t.value * stride);
      });
      repeat<4 * kRows>([&](auto at) {
        constexpr std::size_t kSlot = decltype(at)::value / kRows, kRow = decltype(at)::value % kRows;
        const __m512i four = _mm512_set1_epi32(load32(s.queries + kRow * dim + group * 16 + kSlot * 4));
        repeat<kTiles>([&](auto t) {
          __m512i& sum = sums[t.value][kRow][kSlot % kSums];
          sum = settled(_mm512_dpbusd_epi32(sum, levels[t.value][kSlot], four));
        });
      });
      fragment += kBytes, behind += kBytes, history = fragment - 16;
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
    const float *step = s.step, *factor = s.factor;
    const std::size_t to_stride = s.stride;
    const __m512 most = _mm512_set1_ps(3.402823466e38f), least = _mm512_set1_ps(-3.402823466e38f);
    const auto write = [&](std::size_t r, std::size_t t, __m512i sum) {
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(step[r]), scales[t]);
      __m512 x = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), _mm512_set1_ps(s.shared[r]));
      x = _mm512_mul_ps(x, _mm512_set1_ps(factor[r]));
      _mm512_storeu_ps(to + t * 16, _mm512_min_ps(_mm512_max_ps(x, least), most));
    };
    if (s.planes == 1) {
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

  // What one call of accumulate_rows works with.
  struct Accumulation {
    const std::uint8_t* planes;  // [row][2][kMaxPage]
    const WeightSums* sums;
    const float* center;
    float* out;
    std::size_t stride;
    std::ptrdiff_t distance;  // to the part that is read next
  };

  template <std::size_t kRows, class Reader>
  static void accumulate_rows(const CodedPart& part, const Reader& reader, std::size_t tile_begin, std::size_t tile_end,
                              const Accumulation& a) {
    constexpr std::size_t kGroups = kRows == 8 ? 1 : kRows == 1 ? 4 : 2;
    const std::size_t groups = part.dim / 16;
    std::size_t group = 0;
    for (; group + kGroups <= groups; group += kGroups) {
      accumulate_groups<kRows, kGroups>(part, reader, tile_begin, tile_end, a, group);
    }
    for (; group < groups; ++group) accumulate_groups<kRows, 1>(part, reader, tile_begin, tile_end, a, group);
  }

  template <std::size_t kRows, std::size_t kGroups, class Reader>
  [[gnu::flatten]] static void accumulate_groups(const CodedPart& part, const Reader& reader, std::size_t tile_begin,
                                                 std::size_t tile_end, const Accumulation& a, std::size_t group) {
    constexpr std::size_t kPlanes = 2 * kRows, kSums = kRows * kGroups >= 4 ? 1 : kRows * kGroups == 2 ? 2 : 4;
    constexpr std::size_t kBytes = Reader::kBytes;
    __m512i sums[kGroups][kPlanes][kSums];
    repeat<kGroups * kPlanes * kSums>([&](auto at) {
      constexpr std::size_t kAt = decltype(at)::value;
      sums[kAt % kGroups][kAt / kGroups % kPlanes][kAt / kGroups / kPlanes] = _mm512_setzero_si512();
    });
    const std::size_t stride = part.page_tokens / 16 * kBytes;
    const std::uint8_t* fragment = part.fragments + group * stride + tile_begin * kBytes;
    const std::uint8_t* behind = moved(fragment, a.distance);
    // The section is closed: the last fragment comes before the first.
    const std::uint8_t* history = (group == 0 && tile_begin == 0 ? fragment + part.dim / 16 * stride : fragment) - 16;
    for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
      __m512i levels[kGroups][4];
      repeat<kGroups>([&](auto g) {
        const std::uint8_t* at = fragment + g.value * stride;
        reader.read(at, g.value == 0 ? history : at - 16, levels[g.value]);
        fetch_bytes<kBytes>(behind + g.value * stride);
      });
      repeat<4 * kPlanes>([&](auto at) {
        constexpr std::size_t kSlot = decltype(at)::value / kPlanes, kPlane = decltype(at)::value % kPlanes;
        const __m512i four = _mm512_set1_epi32(load32(a.planes + kPlane * kMaxPage + tile * 16 + kSlot * 4));
        repeat<kGroups>([&](auto g) {
          __m512i& sum = sums[g.value][kPlane][kSlot % kSums];
          sum = settled(_mm512_dpbusd_epi32(sum, four, levels[g.value][kSlot]));
        });
      });
      fragment += kBytes, behind += kBytes, history = fragment - 16;
    }
    // Copies: what is written might be a, as far as the compiler knows.
    const WeightSums* weight = a.sums;
    const float* center = a.center + group * 16;
    float* to = a.out + group * 16;
    const std::size_t out_stride = a.stride;
    repeat<kRows>([&](auto row) {
      if (weight->probability > 0) {
        const __m512 probability = _mm512_set1_ps(weight->probability), zero = _mm512_set1_ps(weight->zero_point),
                     coefficient = _mm512_set1_ps(weight->coefficient);
        repeat<kGroups>([&](auto g) {
          __m512i high = sums[g.value][2 * row.value][0], low = sums[g.value][2 * row.value + 1][0];
          repeat<kSums - 1>([&](auto more) {
            high = _mm512_add_epi32(high, sums[g.value][2 * row.value][more.value + 1]);
            low = _mm512_add_epi32(low, sums[g.value][2 * row.value + 1][more.value + 1]);
          });
          const __m512 total = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low));
          const __m512 rest = _mm512_fmadd_ps(probability, _mm512_load_ps(center + g.value * 16), zero);
          const __m512 sum = _mm512_fmadd_ps(coefficient, total, rest);
          _mm512_storeu_ps(to + g.value * 16, _mm512_add_ps(_mm512_loadu_ps(to + g.value * 16), sum));
        });
      }
      ++weight, to += out_stride;
    });
  }

  // kWhole: [low, high) is [begin, end), in whole tiles. Every logit goes through the same instructions, so that a
  // weight does not depend on where its range begins.
  template <bool kWhole>
  static float softmax_range(float* logits, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
                             SoftmaxState& state) {
    const auto seen = [&](std::size_t at) { return kWhole ? __mmask16{0xffff} : between(at, low, high); };
    __m512 most = _mm512_set1_ps(state.sum > 0 ? state.largest : logits[low]);
    for (std::size_t at = low / 16 * 16; at < high; at += 16) {
      most = _mm512_mask_max_ps(most, seen(at), most, _mm512_maskz_loadu_ps(seen(at), logits + at));
    }
    const float largest = _mm512_reduce_max_ps(most);
    float factor = 0;
    if (state.sum > 0) factor = largest > state.largest ? Base::exp_negative(state.largest - largest) : 1.0f;
    const __m512 top = _mm512_set1_ps(largest);
    __m512 sums = _mm512_setzero_ps();
    for (std::size_t at = begin / 16 * 16; at < end; at += 16) {
      const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(seen(at), logits + at), top);
      const __m512 p = _mm512_maskz_mov_ps(seen(at), exp_negative16(x));
      _mm512_mask_storeu_ps(logits + at, kWhole ? __mmask16{0xffff} : between(at, begin, end), p);
      sums = _mm512_add_ps(sums, p);
    }
    state.sum = state.sum * factor + tree(sums);
    state.largest = largest;
    return factor;
  }

  // PortableKernels::exp_negative, sixteen at a time.
  static __m512 exp_negative16(__m512 x) {
    const __m512 bottom = _mm512_set1_ps(-87.0f);
    const __m512 clamped = _mm512_max_ps(bottom, x);
    const __m512i n = _mm512_cvttps_epi32(_mm512_fmadd_ps(clamped, _mm512_set1_ps(1.44269504f), _mm512_set1_ps(-0.5f)));
    const __m512 nf = _mm512_cvtepi32_ps(n);
    const __m512 f = _mm512_fnmadd_ps(nf, _mm512_set1_ps(-2.12194440e-4f),
                                      _mm512_fnmadd_ps(nf, _mm512_set1_ps(0.693359375f), clamped));
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
      y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
    }
    y = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(y, f), f, f), _mm512_set1_ps(1.0f));
    const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, bottom, _CMP_GE_OQ), y, power);
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
