// Encoding in portable C++: centring a page, choosing codes and scales, packing fragments.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include <turboquant/core/dtype.hpp>
#include <turboquant/kernels/operands.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant::kernels {

/// The encoding kernels. What they write is the same for every V, compiler and optimisation level; see PortableKernels.
template <class V>
struct PortableEncoders {
  /// Computes the mean of `count` rows, stores it in `bits` (8 or 16) per coordinate with one bf16 scale, and subtracts
  /// what was stored: rows[t][i] -= scale * center[i]. The product is exact (8 + 15 bits). rows: [count][dim]. Returns
  /// the scale; zero if the mean vanishes.
  static bfloat16 center_rows(float* rows, std::size_t count, std::size_t dim, unsigned bits, std::uint8_t* center) {
    constexpr std::size_t kChunk = 64;
    double mean[kChunk];
    double largest = 0;
    const auto mean_of = [&](std::size_t begin, std::size_t n) {
      std::fill_n(mean, n, 0.0);
      for (std::size_t t = 0; t < count; ++t) {
        for (std::size_t i = 0; i < n; ++i) mean[i] += static_cast<double>(rows[t * dim + begin + i]);
      }
      for (std::size_t i = 0; i < n; ++i) mean[i] /= static_cast<double>(count);
    };
    for (std::size_t begin = 0; begin < dim; begin += kChunk) {
      const std::size_t n = (std::min)(kChunk, dim - begin);
      mean_of(begin, n);
      for (std::size_t i = 0; i < n; ++i) largest = (std::max)(largest, std::abs(mean[i]));
    }
    const double range = bits == 8 ? 127.0 : 32767.0;
    const bfloat16 stored = bfloat16_at_least(static_cast<float>(largest / range));
    const float scale = to_float(stored);
    std::memset(center, 0, dim * bits / 8);
    if (!(scale > 0)) return bfloat16{0};
    for (std::size_t begin = 0; begin < dim; begin += kChunk) {
      const std::size_t n = (std::min)(kChunk, dim - begin);
      mean_of(begin, n);
      float decoded[kChunk];
      for (std::size_t i = 0; i < n; ++i) {
        const double level = (std::min)((std::max)(round_even(mean[i] / static_cast<double>(scale)), -range), range);
        if (bits == 8) {
          center[begin + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(level));
        } else {
          const auto level16 = static_cast<std::uint16_t>(static_cast<std::int16_t>(level));
          center[2 * (begin + i)] = static_cast<std::uint8_t>(level16 & 255u);
          center[2 * (begin + i) + 1] = static_cast<std::uint8_t>(level16 >> 8);
        }
        decoded[i] = scale * static_cast<float>(level);
      }
      for (std::size_t t = 0; t < count; ++t) {
        for (std::size_t i = 0; i < n; ++i) rows[t * dim + begin + i] -= decoded[i];
      }
    }
    return stored;
  }

  /// Nearest-level coding of one row x with a symmetric table of 2^B levels (B = 1..4; `magnitudes`: the upper half,
  /// ascending). `spread` is sqrt(mean of x^2) in level units. With `search` the scale is searched on a grid before
  /// rounding: the candidate with the largest <x, c>^2 / |c|^2 wins, the first among equals. codes: [dim], index into
  /// the ascending table. Works on integers: x is first rounded to 15 bits relative to its largest magnitude. Returns
  /// the scale to store; zero for the zero row, whose codes are all those of +0.
  template <unsigned B>
  static bfloat16 encode_levels(const float* x, std::size_t dim, const std::int8_t* magnitudes, double spread,
                                ScaleRule rule, bool search, std::uint8_t* codes) {
    constexpr std::size_t kHalf = std::size_t{1} << (B - 1);
    std::int16_t fixed[kMaxRow];
    const Fixed row = to_fixed(x, dim, fixed);
    if (row.energy == 0) {
      std::memset(codes, static_cast<int>(kHalf), dim);
      return bfloat16{0};
    }
    const double base = std::sqrt(static_cast<double>(row.energy) / static_cast<double>(dim)) / spread;
    std::int16_t magnitude[kMaxRow];
    for (std::size_t i = 0; i < dim; ++i) magnitude[i] = static_cast<std::int16_t>(fixed[i] < 0 ? -fixed[i] : fixed[i]);
    std::int16_t thresholds[kHalf] = {};
    std::int16_t best_thresholds[kHalf] = {};
    double best = -1, best_dot = 0, best_norm = 1;
    for (std::size_t g = 0; g < (search && B > 1 ? std::size(kSearchGrid) : 1); ++g) {
      const double unit = base * (search ? kSearchGrid[g] : 1.0);
      for (std::size_t k = 0; k + 1 < kHalf; ++k) {
        thresholds[k] = static_cast<std::int16_t>(
            (std::min)(std::ceil(unit * (0.5 * (magnitudes[k] + magnitudes[k + 1]))), 32767.0));
      }
      // 16 sums, each of at most 64 products of 32767 * 127: below 2^31.
      std::int32_t dots[16] = {}, norms[16] = {};
      for (std::size_t begin = 0; begin < dim; begin += 16) {
        std::int16_t level[16];
        for (std::size_t i = 0; i < 16; ++i) level[i] = magnitudes[0];
        for (std::size_t k = 0; k + 1 < kHalf; ++k) {
          const auto threshold = static_cast<std::int16_t>(thresholds[k] - 1);
          const auto step = static_cast<std::int16_t>(magnitudes[k + 1] - magnitudes[k]);
          for (std::size_t i = 0; i < 16; ++i) {
            const auto above = static_cast<std::int16_t>(magnitude[begin + i] > threshold ? -1 : 0);
            level[i] = static_cast<std::int16_t>(level[i] + (above & step));
          }
        }
        for (std::size_t i = 0; i < 16; ++i) {
          dots[i] += static_cast<std::int32_t>(magnitude[begin + i]) * level[i];
          norms[i] += static_cast<std::int32_t>(level[i]) * level[i];
        }
      }
      std::int64_t dot = 0, norm = 0;
      for (std::size_t i = 0; i < 16; ++i) dot += dots[i], norm += norms[i];
      const double d = static_cast<double>(dot), n = static_cast<double>(norm);
      const double quality = d * d / n;
      if (quality > best) {
        best = quality, best_dot = d, best_norm = n;
        std::copy_n(thresholds, kHalf, best_thresholds);
      }
    }
    for (std::size_t i = 0; i < dim; ++i) {
      std::size_t index = 0;
      for (std::size_t k = 0; k + 1 < kHalf; ++k) index += magnitude[i] >= best_thresholds[k] ? 1u : 0u;
      codes[i] = static_cast<std::uint8_t>(fixed[i] < 0 ? kHalf - 1 - index : kHalf + index);
    }
    return final_scale(row, best_dot, best_norm, rule);
  }

  /// Uniform coding of one row x on int8: code = level = round(127 x / max |x|). codes: [dim] int8 bits.
  static bfloat16 encode_int8(const float* x, std::size_t dim, ScaleRule rule, std::uint8_t* codes) {
    std::int16_t fixed[kMaxRow];
    const Fixed row = to_fixed(x, dim, fixed);
    if (row.energy == 0) {
      std::memset(codes, 0, dim);
      return bfloat16{0};
    }
    std::int16_t largest = 1;
    for (std::size_t i = 0; i < dim; ++i) {
      largest = (std::max)(largest, static_cast<std::int16_t>(fixed[i] < 0 ? -fixed[i] : fixed[i]));
    }
    std::int64_t dot = 0, norm = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      const std::int32_t level = round_even(static_cast<float>(fixed[i] * 127) / static_cast<float>(largest));
      codes[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(level));
      dot += static_cast<std::int64_t>(fixed[i]) * level;
      norm += static_cast<std::int64_t>(level) * level;
    }
    return final_scale(row, static_cast<double>(dot), static_cast<double>(norm), rule);
  }

  /// Min-max grid over one row: x ~ zero_point + scale * level, level = code - 2^(B-1). Codes come from the stored
  /// (rounded) scale and zero point. With `search` narrower grids, down to half the range, are tried too: clipping the
  /// ends may cost less than it saves; the least squared error wins, the widest among equals. A constant row has scale
  /// zero. codes: [dim]; for B = 8 the int8 bits of the level.
  template <unsigned B>
  static bfloat16 encode_minmax(const float* x, std::size_t dim, bool search, bfloat16& zero_point,
                                std::uint8_t* codes) {
    constexpr float kSteps = static_cast<float>((1u << B) - 1);
    constexpr float kMiddle = static_cast<float>(1u << (B - 1));
    float lowest = x[0], highest = x[0];
    for (std::size_t i = 1; i < dim; ++i) {
      lowest = (std::min)(lowest, x[i]);
      highest = (std::max)(highest, x[i]);
    }
    // In double the range of two finite floats is finite.
    const double range = static_cast<double>(highest) - static_cast<double>(lowest);
    bfloat16 best_scale{0};
    zero_point = to_bfloat16(lowest);
    double best = -1;
    for (int shrink = 0; shrink < (search && B < 8 ? 11 : 1); ++shrink) {
      const double width = opaque(range * ((20 - shrink) / 20.0));  // a product that meets a subtraction below
      const bfloat16 stored = bfloat16_at_least(static_cast<float>(width / static_cast<double>(kSteps)));
      const float scale = to_float(stored);
      if (!(scale > 0)) break;
      const double begin = static_cast<double>(lowest) + 0.5 * (range - width);
      const bfloat16 middle =
          to_bfloat16(static_cast<float>(begin + static_cast<double>(kMiddle) * static_cast<double>(scale)));
      const float zero = to_float(middle);
      // Exact products and a fixed order: 8 sums of every eighth coordinate, then a tree.
      double errors[8] = {};
      for (std::size_t i = 0; i < dim; ++i) {
        const auto level = static_cast<float>(grid_level<B>(x[i], zero, scale));
        const auto error = static_cast<double>(x[i] - (zero + scale * level));
        errors[i % 8] += error * error;
      }
      const double error =
          ((errors[0] + errors[4]) + (errors[2] + errors[6])) + ((errors[1] + errors[5]) + (errors[3] + errors[7]));
      if (best < 0 || error < best) best = error, best_scale = stored, zero_point = middle;
    }
    const float scale = to_float(best_scale), zero = to_float(zero_point);
    for (std::size_t i = 0; i < dim; ++i) {
      const std::int32_t level = scale > 0 ? grid_level<B>(x[i], zero, scale) : 0;
      codes[i] = static_cast<std::uint8_t>(B == 8 ? level : level + static_cast<std::int32_t>(kMiddle));
    }
    return best_scale;
  }

  /// Packs the codes of the tokens [begin, end) of one side of a page into fragments. With begin == 0 all codes of the
  /// page are cleared first: the tokens of a page come in order, and those that never come have code zero. codes:
  /// [end - begin][dim].
  template <unsigned B>
  static void pack(layout::Side side, const std::uint8_t* codes, std::size_t begin, std::size_t end,
                   std::size_t page_tokens, std::size_t dim, std::uint8_t* fragments) {
    const std::size_t tiles = page_tokens / 16, groups = dim / 16;
    constexpr std::size_t kBytes = layout::fragment_bytes(B);
    if (begin == 0) std::memset(fragments, 0, tiles * groups * kBytes);
    for (std::size_t tile = begin / 16; tile * 16 < end; ++tile) {
      const std::size_t first = (std::max)(begin, tile * 16), last = (std::min)(end, tile * 16 + 16);
      for (std::size_t group = 0; group < groups; ++group) {
        std::uint8_t* fragment = fragments + fragment_index(side, tile, group, tiles, groups) * kBytes;
        for (std::size_t t = first; t < last; ++t) {
          const std::uint8_t* row = codes + (t - begin) * dim + group * 16;
          for (std::size_t c = 0; c < 16; ++c) {
            const std::size_t position = layout::code_position(side, t % 16, c);
            const auto low = layout::low_field(B, position);
            fragment[low.byte] =
                static_cast<std::uint8_t>(fragment[low.byte] | (row[c] & ((1u << low.count) - 1)) << low.shift);
            if constexpr (B == 3) {
              const auto high = layout::high_field(position);
              fragment[high.byte] = static_cast<std::uint8_t>(fragment[high.byte] | (row[c] >> 2 & 1u) << high.shift);
            }
          }
        }
      }
    }
  }

 protected:
  static constexpr std::size_t kMaxRow = 1024;  // coordinates

  // Scales tried around sqrt(mean of x^2), as multiples of it.
  static constexpr double kSearchGrid[] = {1.0,  0.96, 1.04, 0.92, 1.08, 0.88, 1.12, 0.84,
                                           1.16, 0.80, 1.20, 0.76, 1.24, 0.72, 1.28};

  // A row in 15-bit fixed point: x = fixed * unit, exactly up to rounding to the nearest integer.
  struct Fixed {
    double unit;
    std::int64_t energy;  // sum of fixed^2
  };

  // Keeps a product from being fused with a following addition.
  static double opaque(double x) {
#if defined(__GNUC__)
    __asm__("" : "+m"(x));
#endif
    return x;
  }

  // Nearest integer, ties to even, for |x| < 2^22 (2^51): the addition leaves the integer in the low bits.
  static std::int32_t round_even(float x) {
    return std::bit_cast<std::int32_t>(x + 12582912.0f) - std::bit_cast<std::int32_t>(12582912.0f);
  }
  static double round_even(double x) { return x + 6755399441055744.0 - 6755399441055744.0; }

  // The smallest bfloat16 that is at least x >= 0.
  static bfloat16 bfloat16_at_least(float x) {
    return bfloat16{static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(x) + 0xffffu) >> 16)};
  }

  static float largest_magnitude(const float* x, std::size_t dim) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < dim; ++i)
      largest = (std::max)(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
    return std::bit_cast<float>(largest);
  }

  // Power of two of the exponent of x, which is finite and not negative: x / 2^result in [1, 2), or less for
  // subnormals.
  static int exponent(float x) {
    return (std::max)(static_cast<int>(std::bit_cast<std::uint32_t>(x) >> 23) - 127, -126);
  }
  static float power_of_two(int e) { return std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23); }

  static Fixed to_fixed(const float* x, std::size_t dim, std::int16_t* fixed) {
    // The largest magnitude comes to [2^14, 2^15); vectors below 2^-112 keep fewer bits.
    const int e = (std::max)(exponent(largest_magnitude(x, dim)), -112);
    const float up = power_of_two(14 - e);
    std::int64_t energy = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      const std::int32_t rounded = (std::min)((std::max)(round_even(x[i] * up), -32767), 32767);
      fixed[i] = static_cast<std::int16_t>(rounded);
      energy += static_cast<std::int64_t>(rounded) * rounded;
    }
    return {std::ldexp(1.0, e - 14), energy};
  }

  template <unsigned B>
  static std::int32_t grid_level(float x, float zero, float scale) {
    constexpr float kMiddle = static_cast<float>(1u << (B - 1));
    return round_even((std::min)((std::max)((x - zero) / scale, -kMiddle), kMiddle - 1));
  }

  static bfloat16 final_scale(const Fixed& row, double dot, double norm, ScaleRule rule) {
    const double scale = rule == ScaleRule::unbiased ? static_cast<double>(row.energy) / dot : dot / norm;
    return to_bfloat16(static_cast<float>(scale * row.unit));
  }

  static std::size_t fragment_index(layout::Side side, std::size_t tile, std::size_t group, std::size_t tiles,
                                    std::size_t groups) {
    return side == layout::Side::key ? tile * groups + group : group * tiles + tile;
  }
};

}  // namespace turboquant::kernels
