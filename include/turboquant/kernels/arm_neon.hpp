// Kernels for 64-bit Arm with the dot product extension, for programs built with any flags or none: the functions of
// this file carry their target.
#pragma once

#include <turboquant/kernels/portable.hpp>

// A unit with SVE but without dot products is for a CPU that has none, and g++ could not take it to the target below.
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__) && \
    (defined(__ARM_FEATURE_DOTPROD) || !defined(__ARM_FEATURE_SVE))
#define TURBOQUANT_HAS_NEON 1

#include <arm_neon.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

// The region adds sdot to what the translation unit may use anyway. g++ inlines its intrinsic into nothing less than
// Armv8.2, and every CPU with dot products is one. Nothing but this library may be defined in here.
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

/// The kernels of portable.hpp for 64-bit Arm with dot products: the same bytes where bytes are written, the same
/// integers, and float sums of its order, with fused products. `V` is the vector of the translation unit's own target;
/// see PortableKernels.
///
/// One sdot multiplies 4 lanes x 4 bytes of levels with 4 bytes of a query or of weights, which lie in one lane of a
/// register of 16: nothing is broadcast. The 16 lanes of a fragment are four registers of sums per plane of numbers;
/// those of four planes, of one or two planes per row, stay in registers beside the levels. For more rows a run of
/// fragments is unpacked once, to memory and as codes of width 8, and read from there.
///
/// What is not here is portable text that a compiler vectorises for any 64-bit Arm.
template <class V>
struct NeonKernels : PortableKernels<V> {
  static constexpr const char* name = "neon";

  // ---- rotation

  static void rotate(const RotationView& r, const float* in, float* out) {
    Base::rotate_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }
  static void rotate_back(const RotationView& r, const float* in, float* out) {
    Base::rotate_back_by(r, in, out, [](float* x, std::size_t n) { sylvester(x, n); });
  }

  // ---- encoding: the portable text around a path search of its own

  /// As PortableTrellis::find_trellis_path: 8 windows at a time, and the same sums in the same order.
  template <unsigned B>
  static void find_trellis_path(const std::int16_t* target, std::size_t length, const std::int16_t* levels,
                                unsigned start, unsigned end, std::uint8_t* back, std::uint8_t* path) {
    constexpr unsigned kStates = TrellisCodes<B>::states, kBranches = 1u << B, kVectors = kStates / 8;
    constexpr std::int16_t kNothing = -32768, kUnreached = kNothing + 49151;
    alignas(16) std::int16_t cost[kStates];
    for (unsigned state = 0; state < kStates; ++state) {
      cost[state] = start == Base::kAnyState || start == state ? kNothing : kUnreached;
    }
    for (std::size_t i = 0; i < length; ++i) {
      const int16x8_t aim = vdupq_n_s16(target[i]);
      NeonArray<int16x8_t, kVectors> best;
      NeonArray<uint16x8_t, kVectors> from;
      for (unsigned top = 0; top < kBranches; ++top) {
        for_each_neon_index<kVectors>([&](auto index) {
          constexpr unsigned kVector = decltype(index)::value;
          const unsigned window = top * kStates + 8 * kVector;
          const int16x8_t difference = vsubq_s16(aim, vld1q_s16(levels + window));
          // The upper half of the doubled square, halved, is the square >> 16: no difference is -32768.
          const int16x8_t arriving =
              vsraq_n_s16(predecessors<B>(cost + window / kBranches), vqdmulhq_s16(difference, difference), 1);
          if (top == 0) {
            best[kVector] = arriving;
            from[kVector] = vdupq_n_u16(0);
          } else {
            const uint16x8_t better = vcgtq_s16(best[kVector], arriving);
            best[kVector] = vminq_s16(best[kVector], arriving);
            from[kVector] = vbslq_u16(better, vdupq_n_u16(static_cast<std::uint16_t>(top)), from[kVector]);
          }
        });
      }
      int16x8_t least = best[0];
      for (unsigned v = 1; v < kVectors; ++v) least = vminq_s16(least, best[v]);
      // cost - (least - kNothing), modulo 2^16
      const std::uint16_t excess = i < 3 ? 0u : static_cast<std::uint16_t>(vminvq_s16(least) - kNothing);
      const int16x8_t down = vreinterpretq_s16_u16(vdupq_n_u16(excess));
      for (unsigned v = 0; v < kVectors; ++v) {
        vst1q_s16(cost + 8 * v, vminq_s16(vsubq_s16(best[v], down), vdupq_n_s16(kUnreached)));
        vst1_u8(back + i * kStates + 8 * v, vmovn_u16(from[v]));
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
  static void encode_trellis_keys(const float* rows, std::size_t count, std::size_t dim, const TrellisCodes<B>& codes,
                                  double spread, ScaleRule rule, bool search, bfloat16* scales, std::uint8_t* paths,
                                  std::uint8_t* scratch) {
    Trellis::template encode_trellis_keys<B>(rows, count, dim, codes, spread, rule, search, scales, paths, scratch);
  }
  template <unsigned B>
  static void encode_trellis_values(const float* rows, std::size_t count, std::size_t page_tokens, std::size_t dim,
                                    const TrellisCodes<B>& codes, double spread, std::size_t lane_begin,
                                    std::size_t lane_end, std::uint8_t* paths, std::uint8_t* scratch) {
    Trellis::template encode_trellis_values<B>(rows, count, page_tokens, dim, codes, spread, lane_begin, lane_end,
                                               paths, scratch);
  }

  // ---- queries and logits

  static void prepare_query(const RotationView& rotation, const float* q, QueryBlock& block, std::size_t r) {
    Base::prepare_query_by(rotation, q, block, r,
                           [](const RotationView& v, const float* in, float* out) { rotate(v, in, out); });
  }

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

  static void score_raw(const bfloat16* keys, std::size_t count, const QueryBlock& block, std::size_t row_begin,
                        std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
    for (std::size_t first = row_begin; first < row_end; first += kSums) {
      with_count<kSums>(row_end - first, [&](auto n) {
        constexpr std::size_t kRows = decltype(n)::value;
        const float* queries = block.normal + first * block.dim;
        for (std::size_t t = 0; t < count; ++t) {
          const bfloat16* key = keys + t * block.dim;
          NeonArray<float32x4_t> sums[kRows];
          for_each_neon_index<kRows * 4>([&](auto at) { sums[at.value / 4][at.value % 4] = vdupq_n_f32(0); });
          for (std::size_t i = 0; i < block.dim; i += 16) {
            NeonArray<float32x4_t> x;
            widen16(key + i, x);
            for_each_neon_index<kRows * 4>([&](auto at) {
              constexpr std::size_t kRow = decltype(at)::value / 4, kPart = decltype(at)::value % 4;
              sums[kRow][kPart] =
                  vfmaq_f32(sums[kRow][kPart], vld1q_f32(queries + kRow * block.dim + i + 4 * kPart), x[kPart]);
            });
          }
          for (std::size_t r = 0; r < kRows; ++r) {
            logits[(first + r - row_begin) * stride + t] = Base::saturate(tree(sums[r]) * factor[first + r]);
          }
        }
      });
    }
  }

  // ---- softmax

  static float softmax_step(float* logits, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
                            SoftmaxState& state) {
    float largest = state.sum > 0 ? state.largest : logits[low];
    float32x4_t most = vdupq_n_f32(largest);
    std::size_t t = low;
    for (; t + 4 <= high; t += 4) most = vmaxq_f32(most, vld1q_f32(logits + t));
    largest = vmaxvq_f32(most);
    for (; t < high; ++t) largest = (std::max)(largest, logits[t]);
    const float factor = state.sum > 0 ? vgetq_lane_f32(exp_negative4(vdupq_n_f32(state.largest - largest)), 0) : 0.0f;
    for (t = begin; t < low; ++t) logits[t] = 0;
    for (t = high; t < end; ++t) logits[t] = 0;
    const float32x4_t top = vdupq_n_f32(largest);
    float rest[4] = {};
    for (t = low; t < high; t += 4) {
      const std::size_t count = (std::min)(high - t, std::size_t{4});
      float* at = count == 4 ? logits + t : rest;
      if (count < 4) std::copy_n(logits + t, count, rest);
      vst1q_f32(at, exp_negative4(vsubq_f32(vld1q_f32(at), top)));
      if (count < 4) std::copy_n(rest, count, logits + t);
    }
    state.sum = state.sum * factor + sum_by_lane(logits, begin, end);
    state.largest = largest;
    return factor;
  }

  static WeightSums weigh(const CodedPart& part, const float* p, std::size_t begin, std::size_t end,
                          std::int16_t* weights) {
    WeightSums sums{0, 0, 0};
    float product[kMaxPage];
    float32x4_t most = vdupq_n_f32(0);
    for (std::size_t t = begin; t < end; t += 16) {
      NeonArray<float32x4_t> scales;
      widen16(part.scales + t, scales);
      for (std::size_t k = 0; k < 4; ++k) {
        const float32x4_t x = vmulq_f32(vld1q_f32(p + t + 4 * k), scales[k]);
        most = vmaxq_f32(most, x);
        vst1q_f32(product + t + 4 * k, x);
      }
    }
    const float largest = vmaxvq_f32(most);
    sums.probability = sum_by_lane(p, begin, end);
    if (part.zero_points != nullptr) {
      NeonArray<float32x4_t> lanes = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
      for (std::size_t t = begin; t < end; t += 16) {
        NeonArray<float32x4_t> zero;
        widen16(part.zero_points + t, zero);
        for (std::size_t k = 0; k < 4; ++k) lanes[k] = vfmaq_f32(lanes[k], vld1q_f32(p + t + 4 * k), zero[k]);
      }
      sums.zero_point = tree(lanes);
    }
    sums.coefficient = largest / static_cast<float>(kWeightMax);
    // round_even of the portable text, its product fused: the integer is in the low bits.
    const float32x4_t by = vdupq_n_f32(largest > 0 ? largest : 1.0f), middle = vdupq_n_f32(12582912.0f);
    for (std::size_t t = begin; t < end; t += 4) {
      const float32x4_t relative = vdivq_f32(vld1q_f32(product + t), by);
      const float32x4_t shifted = vfmaq_n_f32(middle, relative, static_cast<float>(kWeightMax));
      vst1_s16(weights + t, vmovn_s32(vreinterpretq_s32_f32(shifted)));
    }
    return sums;
  }

  // ---- accumulation

  template <class Codes>
  static void accumulate(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                         std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                         const WeightSums* sums, float* out, std::size_t out_stride) {
    constexpr std::size_t kRows = kSums / 2;
    const NeonReader<Codes> reader(codes);
    const std::size_t tiles = tile_end - tile_begin;
    float center[kMaxRow];
    Base::decode_center(part, center);
    for (std::size_t first = 0; first < rows; first += kSet) {
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

  static void accumulate_raw(const bfloat16* values, std::size_t count, std::size_t dim, std::size_t rows,
                             const float* p, std::size_t p_stride, float* out, std::size_t out_stride) {
    for (std::size_t first = 0; first < rows; first += kSums) {
      with_count<kSums>(rows - first, [&](auto n) {
        constexpr std::size_t kRows = decltype(n)::value;
        for (std::size_t i = 0; i < dim; i += 16) {
          float* to = out + first * out_stride + i;
          NeonArray<float32x4_t> sums[kRows];
          for_each_neon_index<kRows * 4>([&](auto at) {
            sums[at.value / 4][at.value % 4] = vld1q_f32(to + at.value / 4 * out_stride + at.value % 4 * 4);
          });
          for (std::size_t t = 0; t < count; ++t) {
            NeonArray<float32x4_t> x;
            widen16(values + t * dim + i, x);
            for_each_neon_index<kRows>([&](auto row) {
              const float probability = p[(first + row.value) * p_stride + t];
              if (!(probability > 0)) return;
              for_each_neon_index<4>([&](auto k) {
                sums[row.value][k.value] = vfmaq_n_f32(sums[row.value][k.value], x[k.value], probability);
              });
            });
          }
          for_each_neon_index<kRows * 4>([&](auto at) {
            vst1q_f32(to + at.value / 4 * out_stride + at.value % 4 * 4, sums[at.value / 4][at.value % 4]);
          });
        }
      });
    }
  }

 private:
  using Base = PortableKernels<V>;
  using Trellis = PortableTrellis<NeonKernels>;
  friend Trellis;
  using Base::kMaxPage;
  using Base::kMaxRow;

  static constexpr std::size_t kSums = 4;  // planes of numbers whose sums, four registers each, stay in registers
  static constexpr std::size_t kSet = 16;  // rows that share the unpacking of a run

  // f(NeonIndex<n>()) for the smaller of n and kMost, n > 0.
  template <std::size_t kMost, class F>
  static void with_count(std::size_t n, const F& f) {
    if constexpr (kMost > 1) {
      if (n < kMost) return with_count<kMost - 1>(n, f);
    }
    f(NeonIndex<kMost>());
  }

  // In-place Walsh-Hadamard transform, butterflies of growing distance, as the portable one; two distances at a time.
  static void sylvester(float* x, std::size_t n) {
    if (n < 4) {
      Base::sylvester(x, n);
      return;
    }
    const float32x4_t odd = {1, -1, 1, -1}, upper = {1, 1, -1, -1};
    for (std::size_t i = 0; i < n; i += 4) {
      float32x4_t v = vld1q_f32(x + i);
      v = vfmaq_f32(vrev64q_f32(v), v, odd);
      v = vfmaq_f32(vextq_f32(v, v, 2), v, upper);
      vst1q_f32(x + i, v);
    }
    std::size_t h = 4;
    for (; 4 * h <= n; h *= 4) {
      for (std::size_t block = 0; block < n; block += 4 * h) {
        for (float* at = x + block; at < x + block + h; at += 4) {
          const float32x4_t a = vld1q_f32(at), b = vld1q_f32(at + h), c = vld1q_f32(at + 2 * h),
                            d = vld1q_f32(at + 3 * h);
          const float32x4_t sum0 = vaddq_f32(a, b), difference0 = vsubq_f32(a, b), sum1 = vaddq_f32(c, d),
                            difference1 = vsubq_f32(c, d);
          vst1q_f32(at, vaddq_f32(sum0, sum1));
          vst1q_f32(at + h, vaddq_f32(difference0, difference1));
          vst1q_f32(at + 2 * h, vsubq_f32(sum0, sum1));
          vst1q_f32(at + 3 * h, vsubq_f32(difference0, difference1));
        }
      }
    }
    for (std::size_t i = 0; 2 * h <= n && i < h; i += 4) {
      const float32x4_t a = vld1q_f32(x + i), b = vld1q_f32(x + i + h);
      vst1q_f32(x + i, vaddq_f32(a, b));
      vst1q_f32(x + i + h, vsubq_f32(a, b));
    }
  }

  // Costs of the states that 8 successive windows come from, each for 2^B windows.
  template <unsigned B>
  static int16x8_t predecessors(const std::int16_t* cost) {
    if constexpr (B >= 3) return vld1q_dup_s16(cost);
    return vcombine_s16(vld1_dup_s16(cost), vld1_dup_s16(cost + 1));
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

  // Sum of x[begin, end) in 16 lanes by index, then a tree: what a sum is does not depend on where its range begins.
  static float sum_by_lane(const float* x, std::size_t begin, std::size_t end) {
    float ends[16] = {};
    std::size_t t = begin;
    for (; t < end && t % 16 != 0; ++t) ends[t % 16] += x[t];
    NeonArray<float32x4_t> lanes;
    for (std::size_t k = 0; k < 4; ++k) lanes[k] = vld1q_f32(ends + 4 * k);
    for (; t + 16 <= end; t += 16) {
      for_each_neon_index<4>(
          [&](auto k) { lanes[k.value] = vaddq_f32(lanes[k.value], vld1q_f32(x + t + 4 * k.value)); });
    }
    for (std::size_t k = 0; k < 4; ++k) vst1q_f32(ends + 4 * k, lanes[k]);
    for (; t < end; ++t) ends[t % 16] += x[t];
    for (std::size_t k = 0; k < 4; ++k) lanes[k] = vld1q_f32(ends + 4 * k);
    return tree(lanes);
  }

  // PortableKernels::exp_negative, four at a time; products that meet an addition are fused, at any optimisation level,
  // so that a weight does not depend on how its range is divided.
  static float32x4_t exp_negative4(float32x4_t x) {
    const float32x4_t bottom = vdupq_n_f32(-87.0f), clamped = vmaxq_f32(bottom, x);
    const int32x4_t n = vcvtq_s32_f32(vfmaq_n_f32(vdupq_n_f32(-0.5f), clamped, 1.44269504f));
    const float32x4_t nf = vcvtq_f32_s32(n);
    const float32x4_t f = vfmsq_n_f32(vfmsq_n_f32(clamped, nf, 0.693359375f), nf, -2.12194440e-4f);
    float32x4_t y = vdupq_n_f32(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
      y = vfmaq_f32(vdupq_n_f32(c), y, f);
    }
    y = vaddq_f32(vfmaq_f32(f, vmulq_f32(y, f), f), vdupq_n_f32(1.0f));
    const float32x4_t power = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
    const uint32x4_t gone = vcltq_f32(x, bottom);
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(vmulq_f32(y, power)), gone));
  }
};

using Neon = NeonKernels<UnitTarget>;

}  // namespace turboquant::kernels

#if defined(__clang__)
#pragma clang attribute pop
#elif !defined(__ARM_FEATURE_DOTPROD)
#pragma GCC pop_options
#endif

#endif
