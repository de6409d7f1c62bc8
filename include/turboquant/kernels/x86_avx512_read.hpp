// Unpacking fragments on x86 with AVX-512, for kernels/x86_avx512.hpp.
#pragma once

#include <turboquant/kernels/portable.hpp>

#if defined(TURBOQUANT_MAKES_X86_KERNELS)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

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

// Of the unit's own target, as all that is defined here: units built with different flags share no symbol.
template <class Unit>
struct Avx512Loads {
  static __m512i load512(const void* from) { return _mm512_loadu_si512(from); }
  static __m128i load128(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
  static __m256i load256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  // In a register: g++ would load again for every use.
  [[gnu::always_inline]] static __m512i held(__m512i x) {
    __asm__("" : "+v"(x));
    return x;
  }
  static std::int32_t load32(const void* from) {
    std::int32_t bits = 0;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
  }
};

// Unpacks half a fragment, two slots, to one register of 64 levels per slot, byte 4 lane + b being depth 4 slot + b:
// few registers hold levels, so that many can hold sums. kOffset is added to every level, modulo 256: 128 makes them
// the unsigned operand of vpdpbusd, 0 the signed one.
//
// Byte permutes take six or seven bits of an index. Tables are repeated over the bits that do not belong to the code,
// so that fields need no mask.
template <class Unit, class Codes, int kOffset>
struct Avx512Reader;

template <class Unit, unsigned B, int kOffset>
struct Avx512Reader<Unit, LevelCodes<B>, kOffset> : Avx512Loads<Unit> {
  using Avx512Loads<Unit>::held, Avx512Loads<Unit>::load32, Avx512Loads<Unit>::load128, Avx512Loads<Unit>::load512;
  static constexpr std::size_t kBytes = layout::fragment_bytes(B);

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

  // Slots 2 kHalf and 2 kHalf + 1.
  template <std::size_t kHalf>
  void read_half(const std::uint8_t* fragment, const std::uint8_t*, __m512i* levels) const {
    if constexpr (B == 4) {
      const __m512i both = held(load512(fragment + 64 * kHalf));
      levels[0] = _mm512_permutexvar_epi8(both, table);
      levels[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(both, 4), table);
    } else {
      levels[0] = slot<2 * kHalf>(fragment);
      levels[1] = slot<2 * kHalf + 1>(fragment);
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
      const __m512i all = held(load512(fragment)), fields = kSlot == 0 ? all : _mm512_srli_epi16(all, 2 * kSlot);
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
  static constexpr std::size_t kBytes = layout::fragment_bytes(B);

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
  // Slots 2 kHalf and 2 kHalf + 1.
  template <std::size_t kHalf>
  void read_half(const std::uint8_t* fragment, const std::uint8_t* history, __m512i* levels) const {
    // Bytes t of the four planes in a register, the last plane lowest.
    const __m512i planes = _mm512_setr_epi32(0x00102030, 0x01112131, 0x02122232, 0x03132333, 0x04142434, 0x05152535,
                                             0x06162636, 0x07172737, 0x08182838, 0x09192939, 0x0a1a2a3a, 0x0b1b2b3b,
                                             0x0c1c2c3c, 0x0d1d2d3d, 0x0e1e2e3e, 0x0f1f2f3f);
    if constexpr (B == 4) {
      const __m512i first = kHalf == 0 ? with_history(fragment, history) : load512(fragment + 48);
      levels[0] = windows<20>(_mm512_permutexvar_epi8(planes, first));
      levels[1] = windows<12>(_mm512_permutexvar_epi8(planes, load512(fragment + 64 * kHalf)));
    } else if constexpr (B == 3) {
      const __m512i half = kHalf == 0 ? with_history(fragment, history) : load512(fragment + 32);
      const __m512i bits = _mm512_permutexvar_epi8(planes, half);
      levels[0] = windows<21>(bits);
      levels[1] = windows<9>(bits);
    } else {
      // Two planes to a half, and no more than the fragment behind the second: there the plane before is its own.
      const int shift = kHalf == 0 ? 0x00f0f0f0 : 0x10000000;
      const __m512i half = kHalf == 0 ? with_history(fragment, history) : load512(fragment);
      const __m512i bits = _mm512_permutexvar_epi8(_mm512_add_epi8(planes, _mm512_set1_epi32(shift)), half);
      levels[0] = windows<14>(bits);
      levels[1] = windows<6>(bits);
    }
  }

 private:
  // 64 bytes: the plane before the fragment, which need not lie there, then the fragment's first ones.
  static __m512i with_history(const std::uint8_t* fragment, const std::uint8_t* history) {
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

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif

#endif
