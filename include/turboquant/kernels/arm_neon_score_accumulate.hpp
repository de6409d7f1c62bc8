// Reading codes on 64-bit Arm with the dot product extension: unpacking them, scoring keys and accumulating values. A
// part of kernels/arm_neon.hpp.
#pragma once

#include <turboquant/kernels/portable.hpp>

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__) && \
    (defined(__ARM_FEATURE_DOTPROD) || !defined(__ARM_FEATURE_SVE))

#include <arm_neon.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

// The region is that of arm_neon.hpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#elif !defined(__ARM_FEATURE_DOTPROD)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace turboquant::kernels {

// A place in a loop that is unrolled by the language, whatever the optimisation level.
template <std::size_t N>
struct NeonIndex {
  static constexpr std::size_t value = N;
};

// f(NeonIndex<0>()), ..., f(NeonIndex<N - 1>()).
template <std::size_t N, class F>
void for_each_neon_index(const F& f) {
  [&]<std::size_t... i>(std::index_sequence<i...>) { (f(NeonIndex<i>()), ...); }
  (std::make_index_sequence<N>());
}

// Registers, up to N of them, with a name that an index has too. g++ takes an array of two to four for one operand and
// moves it about as a whole; of five or more it does not.
template <class T, std::size_t N = 4>
using NeonArray = T[N < 5 ? 5 : N];

// Unpacks one slot of a fragment to four registers of signed levels: byte 4 lane + b of the 64 is depth 4 slot + b.
template <class Codes>
struct NeonReader;

template <unsigned B>
struct NeonReader<LevelCodes<B>> {
  static constexpr std::size_t kBytes = layout::fragment_bytes(B);

  // Width 4: table0 holds the levels. Width 1: table0 and table1 hold one each. Widths 2 and 3: index i of table0 is
  // the level of the code i & 3, of table1 of i >> 2; of third0 and third1 that of the codes with a third bit.
  int8x16_t table0{}, table1{}, third0{}, third1{};

  explicit NeonReader(const LevelCodes<B>& codes) {
    const auto table = [&](auto code) {
      std::int8_t levels[16];
      for (unsigned i = 0; i < 16; ++i) levels[i] = codes.levels[code(i)];
      return vld1q_s8(levels);
    };
    if constexpr (B < 8) table0 = table([](unsigned i) { return B == 1 ? 0 : B == 4 ? i : i & 3u; });
    if constexpr (B < 4) table1 = table([](unsigned i) { return B == 1 ? 1 : i >> 2; });
    if constexpr (B == 3) third0 = table([](unsigned i) { return 4 + (i & 3u); });
    if constexpr (B == 3) third1 = table([](unsigned i) { return 4 + (i >> 2); });
  }

  // 16 bits of the masks of width 1 or 3 to the bytes 0 or 255.
  template <std::size_t kSlot>
  static uint8x16_t spread(const std::uint8_t* masks, std::size_t quarter) {
    static constexpr std::uint8_t kBit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    static constexpr std::uint8_t kByte[64] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2,
                                               2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5,
                                               5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7};
    const uint8x8_t mask = vld1_u8(masks + 8 * kSlot);
    return vtstq_u8(vqtbl1q_u8(vcombine_u8(mask, mask), vld1q_u8(kByte + 16 * quarter)), vld1q_u8(kBit));
  }

  template <std::size_t kSlot>
  void read(const std::uint8_t* fragment, const std::uint8_t*, NeonArray<int8x16_t>& levels) const {
    for_each_neon_index<4>([&](auto index) {
      constexpr std::size_t kQuarter = decltype(index)::value;
      int8x16_t& to = levels[kQuarter];
      if constexpr (B == 8) {
        to = vreinterpretq_s8_u8(vld1q_u8(fragment + 64 * kSlot + 16 * kQuarter));
      } else if constexpr (B == 1) {
        to = vbslq_s8(spread<kSlot>(fragment, kQuarter), table1, table0);
      } else {
        // Slots 2 and 3 lie in the high nibbles of a word, or for width 4 slots 1 and 3 in those of the two words.
        constexpr bool kHigh = B == 4 ? kSlot % 2 == 1 : kSlot / 2 == 1;
        const uint8x16_t both = vld1q_u8(fragment + (B == 4 ? 64 * (kSlot / 2) : 0) + 16 * kQuarter);
        const uint8x16_t nibbles = kHigh ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
        to = vqtbl1q_s8(B == 4 || kSlot % 2 == 0 ? table0 : table1, nibbles);
        if constexpr (B == 3) {
          const int8x16_t third = vqtbl1q_s8(kSlot % 2 == 0 ? third0 : third1, nibbles);
          to = vbslq_s8(spread<kSlot>(fragment + 64, kQuarter), third, to);
        }
      }
    });
  }
};

template <unsigned B>
struct NeonReader<TrellisCodes<B>> {
  static constexpr std::size_t kBytes = layout::fragment_bytes(B);

  int8x16_t first, second, sign;  // A; the sign in bit 3 times B; the sign

  explicit NeonReader(const TrellisCodes<B>& codes) {
    std::int8_t signed_second[16], signs[16];
    for (std::size_t i = 0; i < 16; ++i) {
      signs[i] = i < 8 ? 1 : -1;
      signed_second[i] = static_cast<std::int8_t>(signs[i] * codes.table[16 + i % 8]);
    }
    first = vld1q_s8(codes.table);
    second = vld1q_s8(signed_second);
    sign = vld1q_s8(signs);
  }

  // The levels of one of the 8 positions of a half, in all lanes: its window begins kBit above the last bit of the
  // half. bytes: the plane before, then the planes of the half.
  template <std::size_t kPosition>
  int8x16_t level(const NeonArray<uint8x16_t>& bytes) const {
    constexpr std::size_t kBit = (7 - kPosition) * B, kPlane = B - kBit / 8;
    constexpr int kShift = kBit % 8;
    uint8x16_t window = bytes[kPlane];
    if constexpr (kShift != 0) window = vsliq_n_u8(vshrq_n_u8(window, kShift), bytes[kPlane - 1], 8 - kShift);
    const uint8x16_t high = vshrq_n_u8(window, 4);
    return vmlaq_s8(vqtbl1q_s8(second, high), vqtbl1q_s8(first, vandq_u8(window, vdupq_n_u8(15))),
                    vqtbl1q_s8(sign, high));
  }

  template <std::size_t kSlot>
  void read(const std::uint8_t* fragment, const std::uint8_t* history, NeonArray<int8x16_t>& levels) const {
    const std::uint8_t* planes = fragment + kSlot / 2 * B * 16;
    NeonArray<uint8x16_t> bytes;
    bytes[0] = vld1q_u8(kSlot / 2 == 0 ? history : planes - 16);
    for_each_neon_index<B>([&](auto p) { bytes[p.value + 1] = vld1q_u8(planes + 16 * p.value); });
    constexpr std::size_t kPosition = kSlot % 2 * 4;
    const int8x16_t l0 = level<kPosition>(bytes), l1 = level<kPosition + 1>(bytes), l2 = level<kPosition + 2>(bytes),
                    l3 = level<kPosition + 3>(bytes);
    const int16x8_t low01 = vreinterpretq_s16_s8(vzip1q_s8(l0, l1)), low23 = vreinterpretq_s16_s8(vzip1q_s8(l2, l3)),
                    high01 = vreinterpretq_s16_s8(vzip2q_s8(l0, l1)), high23 = vreinterpretq_s16_s8(vzip2q_s8(l2, l3));
    levels[0] = vreinterpretq_s8_s16(vzip1q_s16(low01, low23));
    levels[1] = vreinterpretq_s8_s16(vzip2q_s16(low01, low23));
    levels[2] = vreinterpretq_s8_s16(vzip1q_s16(high01, high23));
    levels[3] = vreinterpretq_s8_s16(vzip2q_s16(high01, high23));
  }
};

/// The kernels of portable.hpp that read codes, for 64-bit Arm with dot products.
///
/// One sdot multiplies 4 lanes x 4 bytes of levels with 4 bytes of a query or of weights, which lie in one lane of a
/// register of 16: nothing is broadcast. The 16 lanes of a fragment are four registers of sums per plane of numbers;
/// those of four planes, of one or two planes per row, stay in registers beside the levels. For more rows a run of
/// fragments is unpacked once, to memory and as codes of width 8, and read from there.
template <class Unit>
struct NeonProducts : PortableKernels<Unit> {
  template <class Codes>
  static void score(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                    const QueryBlock& block, std::size_t row_begin, std::size_t row_end, const float* factor,
                    float* logits, std::size_t stride) {
    const auto planes = [&](auto count) {
      constexpr std::size_t kPlanes = decltype(count)::value, kRows = kSums / kPlanes;
      const NeonReader<Codes> reader(codes);
      float center[kMaxRow];
      if (part.center_bits != 0) Base::decode_center(part, center);
      const std::size_t groups = part.dim / 16;
      for (std::size_t first = row_begin; first < row_end; first += kSet) {
        const std::ptrdiff_t ahead = first == row_begin ? fetch_head(part) : 0;
        const std::size_t rows = (std::min)(kSet, row_end - first);
        float shared[kSet] = {};
        if (part.center_bits != 0) {
          for (std::size_t r = 0; r < rows; ++r) {
            shared[r] = dot(block.rotated + (first + r) * block.dim, center, block.dim);
          }
        }
        for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
          const std::uint8_t* fragments = Base::fragment_at(layout::Side::key, part, codes, tile, 0);
          const std::uint8_t* before = Base::history_of(layout::Side::key, part, codes, tile, 0);
          fetch_run(fragments, groups * layout::fragment_bytes(Codes::bits), ahead);
          const auto score_all = [&](const auto& from, const std::uint8_t* at) {
            for (std::size_t r = 0; r < rows; r += kRows) {
              with_count<kRows>(rows - r, [&](auto n) {
                score_rows<decltype(n)::value, kPlanes>(from, at, before, groups, part.scales + tile * 16, block,
                                                        first + r, shared + r, factor,
                                                        logits + (first + r - row_begin) * stride + tile * 16, stride);
              });
            }
          };
          if (rows > kRows && Codes::bits < 8) {
            alignas(64) std::uint8_t levels[16 * kMaxRow];
            unpack_run(reader, fragments, before, groups, levels);
            score_all(NeonReader<LevelCodes<8>>({}), levels);
          } else {
            score_all(reader, fragments);
          }
        }
      }
    };
    if (block.plane_count == 1) return planes(NeonIndex<1>());
    planes(NeonIndex<2>());
  }

  template <class Codes>
  static void accumulate(std::span<const CodedPart> parts, const Codes& codes, std::size_t begin, std::size_t end,
                         std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                         const WeightSums* sums, std::size_t sum_stride, float* out, std::size_t out_stride) {
    Base::template accumulate_each<NeonProducts>(parts, codes, begin, end, rows, weights, weight_stride, sums,
                                                 sum_stride, out, out_stride);
  }

  template <class Codes>
  static void accumulate_part(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                              std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                              const WeightSums* sums, float* out, std::size_t out_stride) {
    constexpr std::size_t kRows = kSums / 2;
    const NeonReader<Codes> reader(codes);
    const std::size_t tiles = tile_end - tile_begin;
    float center[kMaxRow];
    Base::decode_center(part, center);
    for (std::size_t first = 0; first < rows; first += kSet) {
      const std::ptrdiff_t ahead = first == 0 ? fetch_head(part) : 0;
      const std::size_t set = (std::min)(kSet, rows - first);
      std::int8_t planes[kSet][2][kMaxPage];  // weight = 128 planes[0] + planes[1]
      for (std::size_t r = 0; r < set; ++r) {
        const bool counts = sums[first + r].coefficient > 0;
        split_weights(weights + (first + r) * weight_stride + tile_begin * 16, counts ? tiles * 16 : 0, planes[r]);
        if (!counts) std::fill_n(planes[r][0], sizeof planes[r], std::int8_t{0});
      }
      for (std::size_t group = 0; group < part.dim / 16; ++group) {
        const std::uint8_t* fragments = Base::fragment_at(layout::Side::value, part, codes, tile_begin, group);
        const std::uint8_t* before = Base::history_of(layout::Side::value, part, codes, tile_begin, group);
        fetch_run(fragments, tiles * layout::fragment_bytes(Codes::bits), ahead);
        const auto accumulate_all = [&](const auto& from, const std::uint8_t* at) {
          for (std::size_t r = 0; r < set; r += kRows) {
            with_count<kRows>(set - r, [&](auto n) {
              accumulate_rows<decltype(n)::value>(from, at, before, tiles, planes[r][0], sums + first + r,
                                                  center + group * 16, out + (first + r) * out_stride + group * 16,
                                                  out_stride);
            });
          }
        };
        if (set > kRows && Codes::bits < 8) {
          alignas(64) std::uint8_t levels[16 * kMaxPage];
          unpack_run(reader, fragments, before, tiles, levels);
          accumulate_all(NeonReader<LevelCodes<8>>({}), levels);
        } else {
          accumulate_all(reader, fragments);
        }
      }
    }
  }

 protected:
  using Base = PortableKernels<Unit>;
  using Base::kMaxPage, Base::kMaxRow;

  static constexpr std::size_t kSums = 4;  // planes of numbers whose sums, four registers each, stay in registers
  static constexpr std::size_t kSet = 16;  // rows that share the unpacking of a run

  // The next part is fetched while this one is read, the same run of it at a time.
  static void fetch_run(const std::uint8_t* run, std::size_t bytes, std::ptrdiff_t distance) {
    if (distance == 0) return;
    const auto from = reinterpret_cast<std::uintptr_t>(run) + static_cast<std::uintptr_t>(distance);
    for (std::size_t at = 0; at < bytes; at += 64) fetch_line(reinterpret_cast<const void*>(from + at));
  }

  // f(NeonIndex<n>()) for the smaller of n and kMost, n > 0.
  template <std::size_t kMost, class F>
  static void with_count(std::size_t n, const F& f) {
    if constexpr (kMost > 1) {
      if (n < kMost) return with_count<kMost - 1>(n, f);
    }
    f(NeonIndex<kMost>());
  }

  static void widen16(const bfloat16* from, NeonArray<float32x4_t>& to) {
    const uint16x8_t zero = vdupq_n_u16(0), low = vld1q_u16(&from[0].bits), high = vld1q_u16(&from[8].bits);
    to[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, low));
    to[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, low));
    to[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, high));
    to[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, high));
  }

  // sum + four levels times the four numbers of one slot, in each lane.
  template <std::size_t kSlot>
  static int32x4_t multiply(int32x4_t sum, int8x16_t levels, int8x16_t numbers) {
#if defined(__clang__) && !defined(__ARM_FEATURE_DOTPROD)  // clang before 16 hides the intrinsic
    __asm__("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(levels), "w"(numbers), "i"(kSlot));
    return sum;
#else
    return vdotq_laneq_s32(sum, levels, numbers, kSlot);
#endif
  }

  // sums[n][lanes] of numbers[n * stride + depth] level(depth, lane) over a run of successive fragments. before: the
  // history of the first one. The reader is a copy, which stays in registers.
  template <std::size_t N, class Reader>
  static void sum_products(const Reader reader, const std::uint8_t* fragment, const std::uint8_t* before,
                           std::size_t count, const std::int8_t* numbers, std::size_t stride,
                           NeonArray<int32x4_t> (&sums)[N]) {
    for_each_neon_index<N * 4>([&](auto at) { sums[at.value / 4][at.value % 4] = vdupq_n_s32(0); });
    for (std::size_t k = 0; k < count; ++k) {
      NeonArray<int8x16_t> sixteen;
      for_each_neon_index<N>([&](auto n) { sixteen[n.value] = vld1q_s8(numbers + n.value * stride + 16 * k); });
      for_each_neon_index<4>([&](auto slot) {
        NeonArray<int8x16_t> levels;
        reader.template read<decltype(slot)::value>(fragment, before, levels);
        for_each_neon_index<N * 4>([&](auto at) {
          constexpr std::size_t kRow = decltype(at)::value / 4, kQuarter = decltype(at)::value % 4;
          sums[kRow][kQuarter] = multiply<decltype(slot)::value>(sums[kRow][kQuarter], levels[kQuarter], sixteen[kRow]);
        });
      });
      fragment += Reader::kBytes;
      before = fragment - 16;
    }
  }

  // A run of fragments as one of width 8.
  template <class Reader>
  [[gnu::flatten]] static void unpack_run(const Reader& reader, const std::uint8_t* fragment,
                                          const std::uint8_t* before, std::size_t count, std::uint8_t* to) {
    for (std::size_t k = 0; k < count; ++k) {
      for_each_neon_index<4>([&](auto slot) {
        NeonArray<int8x16_t> levels;
        reader.template read<decltype(slot)::value>(fragment, before, levels);
        for_each_neon_index<4>([&](auto q) { vst1q_u8(to + 16 * q.value, vreinterpretq_u8_s8(levels[q.value])); });
        to += 64;
      });
      fragment += Reader::kBytes;
      before = fragment - 16;
    }
  }

  // One plane, or 128 times the first plus the second.
  template <std::size_t kPlanes, std::size_t N>
  static float32x4_t total(const NeonArray<int32x4_t> (&sums)[N], std::size_t r, std::size_t quarter) {
    int32x4_t sum = sums[kPlanes * r][quarter];
    if constexpr (kPlanes == 2) sum = vaddq_s32(vshlq_n_s32(sum, 7), sums[2 * r + 1][quarter]);
    return vcvtq_f32_s32(sum);
  }

  // The logits of R rows from row `first` of the block with one tile.
  template <std::size_t R, std::size_t kPlanes, class Reader>
  [[gnu::flatten]] static void score_rows(const Reader& reader, const std::uint8_t* fragments,
                                          const std::uint8_t* before, std::size_t groups, const bfloat16* scales,
                                          const QueryBlock& block, std::size_t first, const float* shared,
                                          const float* factor, float* logits, std::size_t stride) {
    NeonArray<int32x4_t> sums[R * kPlanes];
    sum_products(reader, fragments, before, groups, block.planes + first * kPlanes * block.dim, block.dim, sums);
    NeonArray<float32x4_t> scale;
    widen16(scales, scale);
    const float32x4_t most = vdupq_n_f32(3.402823466e38f), least = vdupq_n_f32(-3.402823466e38f);
    for_each_neon_index<R * 4>([&](auto at) {
      constexpr std::size_t kRow = decltype(at)::value / 4, kQuarter = decltype(at)::value % 4;
      const float32x4_t unit = vmulq_n_f32(scale[kQuarter], block.step[first + kRow]);
      const float32x4_t x = vfmaq_f32(vdupq_n_f32(shared[kRow]), unit, total<kPlanes>(sums, kRow, kQuarter));
      const float32x4_t logit = vmulq_n_f32(x, factor[first + kRow]);
      vst1q_f32(logits + kRow * stride + 4 * kQuarter, vminq_f32(vmaxq_f32(logit, least), most));
    });
  }

  // Both planes of `count` weights, a multiple of 16.
  static void split_weights(const std::int16_t* weights, std::size_t count, std::int8_t (&planes)[2][kMaxPage]) {
    for (std::size_t t = 0; t < count; t += 16) {
      const int16x8_t a = vld1q_s16(weights + t), b = vld1q_s16(weights + t + 8), low = vdupq_n_s16(127);
      vst1q_s8(planes[0] + t, vcombine_s8(vshrn_n_s16(a, 7), vshrn_n_s16(b, 7)));
      vst1q_s8(planes[1] + t, vcombine_s8(vmovn_s16(vandq_s16(a, low)), vmovn_s16(vandq_s16(b, low))));
    }
  }

  // 16 coordinates of R outputs: planes [R][2][kMaxPage].
  template <std::size_t R, class Reader>
  [[gnu::flatten]] static void accumulate_rows(const Reader& reader, const std::uint8_t* fragments,
                                               const std::uint8_t* before, std::size_t tiles, const std::int8_t* planes,
                                               const WeightSums* rows, const float* center, float* out,
                                               std::size_t out_stride) {
    NeonArray<int32x4_t> sums[R * 2];
    sum_products(reader, fragments, before, tiles, planes, kMaxPage, sums);
    for_each_neon_index<R>([&](auto row) {
      constexpr std::size_t kRow = decltype(row)::value;
      const WeightSums& w = rows[kRow];
      if (!(w.probability > 0)) return;
      for_each_neon_index<4>([&](auto quarter) {
        constexpr std::size_t kQuarter = decltype(quarter)::value;
        float* to = out + kRow * out_stride + 4 * kQuarter;
        const float32x4_t rest =
            vfmaq_n_f32(vdupq_n_f32(w.zero_point), vld1q_f32(center + 4 * kQuarter), w.probability);
        const float32x4_t more = vfmaq_n_f32(rest, total<2>(sums, kRow, kQuarter), w.coefficient);
        vst1q_f32(to, vaddq_f32(vld1q_f32(to), more));
      });
    });
  }

  // The 16 lanes of a sum, as tree_sum adds them.
  static float tree(const NeonArray<float32x4_t>& lanes) {
    const float32x4_t four = vaddq_f32(vaddq_f32(lanes[0], lanes[2]), vaddq_f32(lanes[1], lanes[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }

  // dim is a multiple of 16. 16 partial sums, then a tree, as the portable one.
  static float dot(const float* a, const float* b, std::size_t dim) {
    NeonArray<float32x4_t> lanes = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (std::size_t i = 0; i < dim; i += 16) {
      for_each_neon_index<4>([&](auto k) {
        lanes[k.value] = vfmaq_f32(lanes[k.value], vld1q_f32(a + i + 4 * k.value), vld1q_f32(b + i + 4 * k.value));
      });
    }
    return tree(lanes);
  }
};

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#elif !defined(__ARM_FEATURE_DOTPROD)
#pragma GCC pop_options
#endif

#endif
