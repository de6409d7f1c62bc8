// Kernels for x86 with AVX-512 (F, BW, VL, DQ, VNNI and VBMI: Ice Lake, Zen 4 and later), for programs built with any
// flags or none: the functions of this file carry their target.
#pragma once

#include <turboquant/kernels/portable.hpp>
#include <turboquant/kernels/x86_avx512_encode.hpp>

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

// Of the unit's own target, as all that is defined here: units built with different flags share no symbol.
template <class Unit>
struct Avx512Loads {
  static __m512i load512(const void* from) { return _mm512_loadu_si512(from); }
  static __m128i load128(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
  static std::int32_t load32(const void* from) {
    std::int32_t bits = 0;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
  }
};

// Unpacks a fragment to one register of 64 levels per slot, byte 4 lane + b being depth 4 slot + b. kOffset is added to
// every level, modulo 256: 128 makes them the unsigned operand of vpdpbusd, 0 the signed one.
//
// Byte permutes take six or seven bits of an index. Tables are repeated over the bits that do not belong to the code,
// so that fields need no mask.
template <class Unit, class Codes, int kOffset>
struct Avx512Reader;

template <class Unit, unsigned B, int kOffset>
struct Avx512Reader<Unit, LevelCodes<B>, kOffset> : Avx512Loads<Unit> {
  using Avx512Loads<Unit>::load32, Avx512Loads<Unit>::load128, Avx512Loads<Unit>::load512;

  __m512i table, upper;  // the levels; at width 3 those without and with the third bit; at width 1 the two levels

  explicit Avx512Reader(const LevelCodes<B>& codes) {
    table = upper = _mm512_setzero_si512();
    if constexpr (B == 4) table = _mm512_broadcast_i32x4(load128(codes.levels));
    if constexpr (B == 3) upper = _mm512_set1_epi32(load32(codes.levels + 4));
    if constexpr (B == 3 || B == 2) table = _mm512_set1_epi32(load32(codes.levels));
    if constexpr (B == 1) {
      table = _mm512_set1_epi8(codes.levels[0]);
      upper = _mm512_set1_epi8(codes.levels[1]);
    }
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(kOffset));
    table = _mm512_add_epi8(table, offset);
    upper = _mm512_add_epi8(upper, offset);
  }

  void read(const std::uint8_t* fragment, const std::uint8_t*, __m512i (&levels)[4]) const {
    if constexpr (B == 4) {
      const __m512i first = load512(fragment), second = load512(fragment + 64);
      levels[0] = _mm512_permutexvar_epi8(first, table);
      levels[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(first, 4), table);
      levels[2] = _mm512_permutexvar_epi8(second, table);
      levels[3] = _mm512_permutexvar_epi8(_mm512_srli_epi16(second, 4), table);
    } else {
      // No loop: at -O2 g++ would not unroll it, and keep levels in memory.
      levels[0] = slot<0>(fragment);
      levels[1] = slot<1>(fragment);
      levels[2] = slot<2>(fragment);
      levels[3] = slot<3>(fragment);
    }
  }

 private:
  template <std::size_t kSlot>
  __m512i slot(const std::uint8_t* fragment) const {
    if constexpr (B == 8) {
      return _mm512_add_epi8(load512(fragment + 64 * kSlot), _mm512_set1_epi8(static_cast<char>(kOffset)));
    } else if constexpr (B == 1) {
      return _mm512_mask_blend_epi8(mask(fragment + 8 * kSlot), table, upper);
    } else {
      const __m512i all = load512(fragment), fields = kSlot == 0 ? all : _mm512_srli_epi16(all, 2 * kSlot);
      const __m512i levels = _mm512_permutexvar_epi8(fields, table);
      if constexpr (B == 3) {
        return _mm512_mask_permutexvar_epi8(levels, mask(fragment + 64 + 8 * kSlot), fields, upper);
      } else {
        return levels;
      }
    }
  }
  static __mmask64 mask(const std::uint8_t* from) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
  }
};

template <class Unit, unsigned B, int kOffset>
struct Avx512Reader<Unit, TrellisCodes<B>, kOffset> : Avx512Loads<Unit> {
  using Avx512Loads<Unit>::load128, Avx512Loads<Unit>::load512;

  __m512i lower, upper;  // A[w & 15] + B[w >> 4 & 7] + offset for the windows w modulo 128

  explicit Avx512Reader(const TrellisCodes<B>& codes) {
    const __m512i a = _mm512_broadcast_i32x4(load128(codes.table));
    const __m512i b = _mm512_broadcast_i32x4(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes.table + 16)));
    const __m512i quarter = _mm512_setr_epi32(0, 0, 0, 0, 0x01010101, 0x01010101, 0x01010101, 0x01010101,  //
                                              0x02020202, 0x02020202, 0x02020202, 0x02020202,              //
                                              0x03030303, 0x03030303, 0x03030303, 0x03030303);
    const __m512i offset = _mm512_add_epi8(a, _mm512_set1_epi8(static_cast<char>(kOffset)));
    lower = _mm512_add_epi8(offset, _mm512_shuffle_epi8(b, quarter));
    upper = _mm512_add_epi8(offset, _mm512_shuffle_epi8(b, _mm512_add_epi8(quarter, _mm512_set1_epi8(4))));
  }

  // Lane t makes the number `history << 8 B | W` of portable_trellis.hpp, 32 bits of it; windows are eight bits each.
  void read(const std::uint8_t* fragment, const std::uint8_t* history, __m512i (&levels)[4]) const {
    // Bytes t of the four planes in a register, the last plane lowest.
    const __m512i planes = _mm512_setr_epi32(0x00102030, 0x01112131, 0x02122232, 0x03132333, 0x04142434, 0x05152535,
                                             0x06162636, 0x07172737, 0x08182838, 0x09192939, 0x0a1a2a3a, 0x0b1b2b3b,
                                             0x0c1c2c3c, 0x0d1d2d3d, 0x0e1e2e3e, 0x0f1f2f3f);
    const __m512i first = with_history(fragment, history);
    if constexpr (B == 4) {
      levels[0] = windows<20>(_mm512_permutexvar_epi8(planes, first));
      levels[1] = windows<12>(_mm512_permutexvar_epi8(planes, load512(fragment)));
      levels[2] = windows<20>(_mm512_permutexvar_epi8(planes, load512(fragment + 48)));
      levels[3] = windows<12>(_mm512_permutexvar_epi8(planes, load512(fragment + 64)));
    } else if constexpr (B == 3) {
      const __m512i low = _mm512_permutexvar_epi8(planes, first);
      const __m512i high = _mm512_permutexvar_epi8(planes, load512(fragment + 32));
      levels[0] = windows<21>(low);
      levels[1] = windows<9>(low);
      levels[2] = windows<21>(high);
      levels[3] = windows<9>(high);
    } else {
      // Two planes to a half, and no more than the fragment behind the second: there the plane before is its own.
      const __m512i before = _mm512_add_epi8(planes, _mm512_set1_epi32(static_cast<int>(0x00f0f0f0u)));
      const __m512i low = _mm512_permutexvar_epi8(before, first);
      const __m512i high =
          _mm512_permutexvar_epi8(_mm512_add_epi8(planes, _mm512_set1_epi32(0x10000000)), load512(fragment));
      levels[0] = windows<14>(low);
      levels[1] = windows<6>(low);
      levels[2] = windows<14>(high);
      levels[3] = windows<6>(high);
    }
  }

 private:
  // 64 bytes: the plane before the fragment, which need not lie there, then the fragment's first ones.
  static __m512i with_history(const std::uint8_t* fragment, const std::uint8_t* history) {
    if (history + 16 == fragment) return load512(history);
    return _mm512_mask_loadu_epi32(_mm512_castsi128_si512(load128(history)), 0xfff0, fragment - 16);
  }

  // The levels of four windows per lane, the first one `top` bits above the lane's end.
  template <int kTop>
  __m512i windows(__m512i bits) const {
    constexpr int kStep = static_cast<int>(B);
    constexpr std::uint64_t kLane = static_cast<std::uint64_t>(kTop) | static_cast<std::uint64_t>(kTop - kStep) << 8 |
                                    static_cast<std::uint64_t>(kTop - 2 * kStep) << 16 |
                                    static_cast<std::uint64_t>(kTop - 3 * kStep) << 24;
    constexpr std::uint64_t kShifts = kLane | (kLane + 0x20202020u) << 32;
    const __m512i w = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<long long>(kShifts)), bits);
    const __m512i magnitude = _mm512_permutex2var_epi8(lower, w, upper);
    return _mm512_mask_sub_epi8(magnitude, _mm512_movepi8_mask(w), _mm512_setzero_si512(), magnitude);
  }
};

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
    alignas(64) float center[kMaxRow];
    if (part.center_bits != 0) decode_center(part, center);
    const Avx512Reader<Unit, Codes, 128> reader(codes);
    fetch_head(part);
    // A plane of a query is a row of its own until the end.
    const std::size_t planes = block.plane_count, most = 8 / planes;
    for (std::size_t first = row_begin; first < row_end;) {
      std::size_t rows = most;
      while (rows > row_end - first) rows /= 2;
      Scoring s;
      s.queries = block.planes + first * planes * block.dim;
      for (std::size_t v = 0; v < rows * planes; ++v) s.start[v] = -128 * sum_of(s.queries + v * block.dim, block.dim);
      for (std::size_t r = 0; r < rows; ++r) {
        s.shared[r] = part.center_bits != 0 ? dot(block.rotated + (first + r) * block.dim, center, block.dim) : 0.0f;
      }
      s.step = block.step + first;
      s.factor = factor + first;
      s.logits = logits + (first - row_begin) * stride;
      s.stride = stride;
      s.planes = planes;
      s.distance = first == row_begin ? distance_to_next(part) : 0;
      if (rows * planes == 8) score_rows<8>(part, reader, codes, tile_begin, tile_end, s);
      if (rows * planes == 4) score_rows<4>(part, reader, codes, tile_begin, tile_end, s);
      if (rows * planes == 2) score_rows<2>(part, reader, codes, tile_begin, tile_end, s);
      if (rows * planes == 1) score_rows<1>(part, reader, codes, tile_begin, tile_end, s);
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

  // Every logit goes through the same instructions, so that a weight does not depend on where its range begins.
  static float softmax_step(float* logits, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
                            SoftmaxState& state) {
    __m512 most = _mm512_set1_ps(state.sum > 0 ? state.largest : logits[low]);
    for (std::size_t at = low / 16 * 16; at < high; at += 16) {
      const __mmask16 seen = between(at, low, high);
      most = _mm512_mask_max_ps(most, seen, most, _mm512_maskz_loadu_ps(seen, logits + at));
    }
    const float largest = _mm512_reduce_max_ps(most);
    const float factor = state.sum > 0 ? Base::exp_negative(state.largest - largest) : 0.0f;
    const __m512 top = _mm512_set1_ps(largest);
    __m512 sums = _mm512_setzero_ps();
    for (std::size_t at = begin / 16 * 16; at < end; at += 16) {
      const __mmask16 seen = between(at, low, high);
      const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(seen, logits + at), top);
      const __m512 p = _mm512_maskz_mov_ps(seen, exp_negative16(x));
      _mm512_mask_storeu_ps(logits + at, between(at, begin, end), p);
      sums = _mm512_add_ps(sums, p);
    }
    state.sum = state.sum * factor + tree(sums);
    state.largest = largest;
    return factor;
  }

  static WeightSums weigh(const CodedPart& part, const float* p, std::size_t begin, std::size_t end,
                          std::int16_t* weights) {
    WeightSums sums{0, 0, 0};
    __m512 most = _mm512_setzero_ps(), total = most, zero = most;
    for (std::size_t t = begin; t < end; t += 16) {
      const __m512 x = _mm512_loadu_ps(p + t);
      most = _mm512_max_ps(most, _mm512_mul_ps(x, widen16(part.scales + t)));
      total = _mm512_add_ps(total, x);
      if (part.zero_points != nullptr) zero = _mm512_fmadd_ps(x, widen16(part.zero_points + t), zero);
    }
    const float largest = _mm512_reduce_max_ps(most);
    sums.probability = tree(total);
    sums.zero_point = tree(zero);
    sums.coefficient = largest / static_cast<float>(kWeightMax);
    const __m512 by = _mm512_set1_ps(largest > 0 ? largest : 1.0f), range = _mm512_set1_ps(kWeightMax);
    for (std::size_t t = begin; t < end; t += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(p + t), widen16(part.scales + t));
      const __m512i w = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_div_ps(x, by), range));
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
        for (std::size_t t = tile_begin * 16; t < tile_end * 16; t += 16) {
          const __m256i w =
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + (first + r) * weight_stride + t));
          _mm_store_si128(reinterpret_cast<__m128i*>(planes[r][0] + t), _mm256_cvtepi16_epi8(_mm256_srli_epi16(w, 7)));
          _mm_store_si128(reinterpret_cast<__m128i*>(planes[r][1] + t),
                          _mm256_cvtepi16_epi8(_mm256_and_si256(w, _mm256_set1_epi16(127))));
        }
      }
      Accumulation a{&planes[0][0][0],         sums + first, center,
                     out + first * out_stride, out_stride,   first == 0 ? distance_to_next(part) : 0};
      if (set == 8) accumulate_rows<8>(part, reader, codes, tile_begin, tile_end, a);
      if (set == 4) accumulate_rows<4>(part, reader, codes, tile_begin, tile_end, a);
      if (set == 2) accumulate_rows<2>(part, reader, codes, tile_begin, tile_end, a);
      if (set == 1) accumulate_rows<1>(part, reader, codes, tile_begin, tile_end, a);
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
  using Avx512Loads<Unit>::load32, Avx512Loads<Unit>::load128;
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
  static std::int32_t sum_of(const std::int8_t* x, std::size_t dim) {
    __m128i sums = _mm_setzero_si128();
    for (std::size_t i = 0; i < dim; i += 16) sums = _mm_dpbusd_epi32(sums, _mm_set1_epi8(1), load128(x + i));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
  }

  static void decode_center(const CodedPart& part, float* out) {
    const __m512 scale = _mm512_set1_ps(part.center_scale);
    for (std::size_t i = 0; i < part.dim; i += 16) {
      __m512i level = _mm512_setzero_si512();
      if (part.center_bits == 8) level = _mm512_cvtepi8_epi32(load128(part.center + i));
      if (part.center_bits == 16) {
        level = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(part.center + 2 * i)));
      }
      _mm512_store_ps(out + i, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(level)));
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

  // g++ would keep old and new sums in registers of their own and copy them at the end of each fragment.
  [[gnu::always_inline]] static __m512i settled(__m512i sum) {
    __asm__("" : "+v"(sum));
    return sum;
  }

  // How far behind a byte of this part the same byte of the part that is read next lies; 0 without such a part: then
  // fetching asks for what is being read.
  static std::ptrdiff_t distance_to_next(const CodedPart& part) {
    if (part.next == nullptr) return 0;
    return static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(part.next) -
                                       reinterpret_cast<std::uintptr_t>(part.begin()));
  }
  template <unsigned kBits>
  static void fetch_fragment(const std::uint8_t* fragment, std::ptrdiff_t distance) {
    const auto from = reinterpret_cast<std::uintptr_t>(fragment) + static_cast<std::uintptr_t>(distance);
    for (std::size_t i = 0; i < layout::fragment_bytes(kBits); i += 64) {
      fetch_line(reinterpret_cast<const void*>(from + i));
    }
  }

  // The queries of one call of score_rows, kRows planes of them.
  struct Scoring {
    const std::int8_t* queries;  // [plane][dim]
    std::size_t planes;          // of a query
    std::int32_t start[8];       // what takes the 128 of unsigned levels off, per plane
    float shared[8];             // with the centre
    const float* step;
    const float* factor;
    float* logits;
    std::size_t stride;
    std::ptrdiff_t distance;  // to the part that is read next
  };

  template <std::size_t kRows, class Reader, class Codes>
  static void score_rows(const CodedPart& part, const Reader& reader, const Codes& codes, std::size_t tile_begin,
                         std::size_t tile_end, const Scoring& s) {
    std::size_t tile = tile_begin;
    for (; tile + 2 <= tile_end; tile += 2) score_tiles<kRows, 2>(part, reader, codes, tile, s);
    for (; tile < tile_end; ++tile) score_tiles<kRows, 1>(part, reader, codes, tile, s);
  }

  template <std::size_t kRows, std::size_t kTiles, class Reader, class Codes>
  [[gnu::flatten]] static void score_tiles(const CodedPart& part, const Reader& reader, const Codes& codes,
                                           std::size_t tile, const Scoring& s) {
    constexpr std::size_t kSums = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;  // of a row
    __m512i sums[kTiles][kRows][kSums];
    repeat<kTiles * kRows>([&](auto at) {
      sums[at.value % kTiles][at.value / kTiles][0] = _mm512_set1_epi32(s.start[at.value / kTiles]);
      repeat<kSums - 1>(
          [&](auto more) { sums[at.value % kTiles][at.value / kTiles][more.value + 1] = _mm512_setzero_si512(); });
    });
    for (std::size_t group = 0; group < part.dim / 16; ++group) {
      __m512i levels[kTiles][4];
      repeat<kTiles>([&](auto t) {
        const std::uint8_t* fragment = Base::fragment_at(layout::Side::key, part, codes, tile + t.value, group);
        reader.read(fragment, Base::history_of(layout::Side::key, part, codes, tile + t.value, group), levels[t.value]);
        fetch_fragment<Codes::bits>(fragment, s.distance);
      });
      repeat<4 * kRows>([&](auto at) {
        constexpr std::size_t kSlot = decltype(at)::value / kRows, kRow = decltype(at)::value % kRows;
        const __m512i four = _mm512_set1_epi32(load32(s.queries + kRow * part.dim + group * 16 + kSlot * 4));
        repeat<kTiles>([&](auto t) {
          __m512i& sum = sums[t.value][kRow][kSlot % kSums];
          sum = settled(_mm512_dpbusd_epi32(sum, levels[t.value][kSlot], four));
        });
      });
    }
    repeat<kTiles * kRows>([&](auto at) {
      __m512i(&row)[kSums] = sums[at.value % kTiles][at.value / kTiles];
      if constexpr (kSums == 4)
        row[0] = _mm512_add_epi32(_mm512_add_epi32(row[0], row[1]), _mm512_add_epi32(row[2], row[3]));
      if constexpr (kSums == 2) row[0] = _mm512_add_epi32(row[0], row[1]);
    });
    repeat<kTiles>([&](auto t) {
      const std::size_t first = (tile + t.value) * 16;
      const __m512 scales = widen16(part.scales + first);
      repeat<kRows>([&](auto v) {
        if (s.planes == 1) {
          write_logits(s, v.value, first, scales, sums[t.value][v.value][0]);
        } else if constexpr (v.value % 2 == 0 && kRows > 1) {
          // Modulo 2^32, where the sum of both planes fits.
          write_logits(
              s, v.value / 2, first, scales,
              _mm512_add_epi32(_mm512_slli_epi32(sums[t.value][v.value][0], 7), sums[t.value][v.value + 1][0]));
        }
      });
    });
  }

  static void write_logits(const Scoring& s, std::size_t r, std::size_t first, __m512 scales, __m512i sum) {
    const __m512 most = _mm512_set1_ps(3.402823466e38f), least = _mm512_set1_ps(-3.402823466e38f);
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(s.step[r]), scales);
    __m512 x = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), _mm512_set1_ps(s.shared[r]));
    x = _mm512_mul_ps(x, _mm512_set1_ps(s.factor[r]));
    _mm512_storeu_ps(s.logits + r * s.stride + first, _mm512_min_ps(_mm512_max_ps(x, least), most));
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

  template <std::size_t kRows, class Reader, class Codes>
  static void accumulate_rows(const CodedPart& part, const Reader& reader, const Codes& codes, std::size_t tile_begin,
                              std::size_t tile_end, const Accumulation& a) {
    constexpr std::size_t kGroups = kRows == 8 ? 1 : 2;
    const std::size_t groups = part.dim / 16;
    std::size_t group = 0;
    for (; group + kGroups <= groups; group += kGroups) {
      accumulate_groups<kRows, kGroups>(part, reader, codes, tile_begin, tile_end, a, group);
    }
    for (; group < groups; ++group) accumulate_groups<kRows, 1>(part, reader, codes, tile_begin, tile_end, a, group);
  }

  template <std::size_t kRows, std::size_t kGroups, class Reader, class Codes>
  [[gnu::flatten]] static void accumulate_groups(const CodedPart& part, const Reader& reader, const Codes& codes,
                                                 std::size_t tile_begin, std::size_t tile_end, const Accumulation& a,
                                                 std::size_t group) {
    constexpr std::size_t kPlanes = 2 * kRows, kSums = kRows * kGroups == 1 ? 4 : kRows * kGroups == 2 ? 2 : 1;
    __m512i sums[kGroups][kPlanes][kSums];
    repeat<kGroups * kPlanes * kSums>([&](auto at) {
      constexpr std::size_t kAt = decltype(at)::value;
      sums[kAt % kGroups][kAt / kGroups % kPlanes][kAt / kGroups / kPlanes] = _mm512_setzero_si512();
    });
    for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
      __m512i levels[kGroups][4];
      repeat<kGroups>([&](auto g) {
        const std::uint8_t* fragment = Base::fragment_at(layout::Side::value, part, codes, tile, group + g.value);
        reader.read(fragment, Base::history_of(layout::Side::value, part, codes, tile, group + g.value),
                    levels[g.value]);
        fetch_fragment<Codes::bits>(fragment, a.distance);
      });
      repeat<4 * kPlanes>([&](auto at) {
        constexpr std::size_t kSlot = decltype(at)::value / kPlanes, kPlane = decltype(at)::value % kPlanes;
        const __m512i four = _mm512_set1_epi32(load32(a.planes + kPlane * kMaxPage + tile * 16 + kSlot * 4));
        repeat<kGroups>([&](auto g) {
          __m512i& sum = sums[g.value][kPlane][kSlot % kSums];
          sum = settled(_mm512_dpbusd_epi32(sum, four, levels[g.value][kSlot]));
        });
      });
    }
    repeat<kGroups * kRows>([&](auto at) {
      constexpr std::size_t kGroup = decltype(at)::value % kGroups, kRow = decltype(at)::value / kGroups;
      const WeightSums& weight = a.sums[kRow];
      if (!(weight.probability > 0)) return;
      __m512i high = sums[kGroup][2 * kRow][0], low = sums[kGroup][2 * kRow + 1][0];
      repeat<kSums - 1>([&](auto more) {
        high = _mm512_add_epi32(high, sums[kGroup][2 * kRow][more.value + 1]);
        low = _mm512_add_epi32(low, sums[kGroup][2 * kRow + 1][more.value + 1]);
      });
      const __m512 total = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low));
      const std::size_t first = (group + kGroup) * 16;
      float* to = a.out + kRow * a.stride + first;
      const __m512 rest = _mm512_fmadd_ps(_mm512_set1_ps(weight.probability), _mm512_load_ps(a.center + first),
                                          _mm512_set1_ps(weight.zero_point));
      const __m512 sum = _mm512_fmadd_ps(_mm512_set1_ps(weight.coefficient), total, rest);
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
    });
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

#endif
