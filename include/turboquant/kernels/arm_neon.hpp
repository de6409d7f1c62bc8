// Kernels for 64-bit Arm with the dot product extension, for programs built with any flags or none: the functions of
// this file carry their target.
#pragma once

#include <turboquant/kernels/arm_neon_score_accumulate.hpp>
#include <turboquant/kernels/portable.hpp>

// A unit with SVE but without dot products is for a CPU that has none, and g++ could not take it to the target below.
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__) && \
    (defined(__ARM_FEATURE_DOTPROD) || !defined(__ARM_FEATURE_SVE))
#define TURBOQUANT_HAS_NEON 1

#include <arm_neon.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

// The region adds sdot to what the translation unit may use anyway. g++ inlines its intrinsic into nothing less than
// Armv8.2, and every CPU with dot products is one. Nothing but this library may be defined in here.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#elif !defined(__ARM_FEATURE_DOTPROD)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace turboquant::kernels {

/// The kernels of portable.hpp for 64-bit Arm with dot products: the same bytes where bytes are written, the same
/// integers, and float sums of its order, with fused products. See PortableKernels.
///
/// What is not here is portable text that a compiler vectorises for any 64-bit Arm.
template <class Unit>
struct NeonKernels : NeonProducts<Unit> {
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

  // ---- queries

  static void prepare_queries(const RotationView& rotation, QueryBlock& block) {
    Base::prepare_queries_by(rotation, block,
                             [](const RotationView& v, const float* in, float* out) { rotate(v, in, out); });
  }

  // ---- logits of the raw tail

  static void score_raw(const bfloat16* keys, std::size_t count, const QueryBlock& block, std::size_t row_begin,
                        std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
    for (std::size_t first = row_begin; first < row_end; first += kSums) {
      Products::template with_count<kSums>(row_end - first, [&](auto n) {
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

  static void weigh(std::span<const CodedPart> parts, const float* p, std::size_t begin, std::size_t end,
                    std::int16_t* weights, WeightSums* sums, std::size_t sum_stride) {
    float product[kMaxPage];
    float32x4_t most = vdupq_n_f32(0);
    Base::for_parts(parts, begin, end, [&](std::size_t part, std::size_t from, std::size_t until) {
      const std::size_t first = part * parts[part].page_tokens;
      const bfloat16* zero_points = parts[part].zero_points;
      NeonArray<float32x4_t> lanes = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
      for (std::size_t c = from; c < until; c += 16) {
        NeonArray<float32x4_t> scales, zero;
        widen16(parts[part].scales + (c - first), scales);
        if (zero_points != nullptr) widen16(zero_points + (c - first), zero);
        for (std::size_t k = 0; k < 4; ++k) {
          const float32x4_t of = vld1q_f32(p + c + 4 * k), x = vmulq_f32(of, scales[k]);
          most = vmaxq_f32(most, x);
          vst1q_f32(product + c + 4 * k, x);
          if (zero_points != nullptr) lanes[k] = vfmaq_f32(lanes[k], of, zero[k]);
        }
      }
      sums[part * sum_stride] = WeightSums{0, sum_by_lane(p, from, until), zero_points != nullptr ? tree(lanes) : 0.0f};
    });
    const float largest = vmaxvq_f32(most), coefficient = largest / static_cast<float>(kWeightMax);
    for (std::size_t k = 0; k < parts.size(); ++k) sums[k * sum_stride].coefficient = coefficient;
    // round_even of the portable text, its product fused: the integer is in the low bits.
    const float32x4_t by = vdupq_n_f32(largest > 0 ? largest : 1.0f), middle = vdupq_n_f32(12582912.0f);
    for (std::size_t c = begin; c < end; c += 4) {
      const float32x4_t relative = vdivq_f32(vld1q_f32(product + c), by);
      const float32x4_t shifted = vfmaq_n_f32(middle, relative, static_cast<float>(kWeightMax));
      vst1_s16(weights + c, vmovn_s32(vreinterpretq_s32_f32(shifted)));
    }
  }

  template <class Codes>
  static void score_pages(std::span<const CodedPart> parts, const Codes& codes, const QueryBlock& block,
                          const float* factor, float* logits, std::size_t stride) {
    Base::template score_each<NeonKernels>(parts, codes, block, factor, logits, stride);
  }

  static void soften_rows(std::span<const CodedPart> parts, std::size_t begin, std::size_t end, std::size_t rows,
                          float* logits, std::size_t stride, SoftmaxState* states, std::int16_t* weights,
                          WeightSums* sums, float* acc, std::size_t dim) {
    Base::template soften_each<NeonKernels>(parts, begin, end, rows, logits, stride, states, weights, sums, acc, dim);
  }

  // ---- accumulation of the raw tail

  static void accumulate_raw(const bfloat16* values, std::size_t count, std::size_t dim, std::size_t rows,
                             const float* p, std::size_t p_stride, float* out, std::size_t out_stride) {
    for (std::size_t first = 0; first < rows; first += kSums) {
      Products::template with_count<kSums>(rows - first, [&](auto n) {
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
  using Base = PortableKernels<Unit>;
  using Trellis = PortableTrellis<NeonKernels>;
  friend Trellis;
  using Base::kMaxPage;
  using Products = NeonProducts<Unit>;
  using Products::kSums, Products::widen16, Products::tree;

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
