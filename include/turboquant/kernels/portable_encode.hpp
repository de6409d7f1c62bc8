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

/// The encoding kernels. What they write is the same for every Unit, compiler and optimisation level; see
/// PortableKernels.
template <class Unit>
struct PortableEncoders {
  /// out[i] = in[i] rounded to bfloat16, as to_bfloat16. in: [dim] float, at any address.
  static void narrow_row(const void* in, std::size_t dim, bfloat16* out) {
    for (std::size_t i = 0; i < dim; ++i) {
      float x;
      std::memcpy(&x, static_cast<const std::uint8_t*>(in) + i * sizeof x, sizeof x);
      out[i] = to_bfloat16(x);
    }
  }

  /// Computes the mean of `count` rows, stores it in `bits` (8 or 16) per coordinate with one bf16 scale, and subtracts
  /// what was stored: rows[t][i] -= scale * center[i]. The product is exact (8 + 15 bits). rows: [count][dim]. Returns
  /// the scale; zero if the mean vanishes.
  static bfloat16 center_rows(float* rows, std::size_t count, std::size_t dim, unsigned bits, std::uint8_t* center) {
    double mean[kMaxRow];
    float decoded[kMaxRow];
    std::fill_n(mean, dim, 0.0);
    for (std::size_t t = 0; t < count; ++t) {
      const float* row = rows + t * dim;
      for (std::size_t i = 0; i < dim; ++i) mean[i] += static_cast<double>(row[i]);
    }
    double largest = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      mean[i] /= static_cast<double>(count);
      largest = (std::max)(largest, std::abs(mean[i]));
    }
    const double range = bits == 8 ? 127.0 : 32767.0;
    const bfloat16 stored = bfloat16_at_least(static_cast<float>(largest / range));
    const float scale = to_float(stored);
    std::memset(center, 0, dim * bits / 8);
    if (!(scale > 0)) return bfloat16{0};
    for (std::size_t i = 0; i < dim; ++i) {
      const double level = (std::min)((std::max)(round_even(mean[i] / static_cast<double>(scale)), -range), range);
      if (bits == 8) {
        center[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(level));
      } else {
        const auto level16 = static_cast<std::uint16_t>(static_cast<std::int16_t>(level));
        center[2 * i] = static_cast<std::uint8_t>(level16 & 255u);
        center[2 * i + 1] = static_cast<std::uint8_t>(level16 >> 8);
      }
      decoded[i] = scale * static_cast<float>(level);
    }
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t i = 0; i < dim; ++i) rows[t * dim + i] -= decoded[i];
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
    std::int16_t level[kMaxRow], thresholds[kHalf] = {}, best_thresholds[kHalf] = {};
    double best = -1, best_dot = 0, best_norm = 1;
    for (std::size_t g = 0; g < (search && B > 1 ? std::size(kSearchGrid) : 1); ++g) {
      const double unit = base * (search ? kSearchGrid[g] : 1.0);
      for (std::size_t k = 0; k + 1 < kHalf; ++k) {
        thresholds[k] = static_cast<std::int16_t>(
            (std::min)(std::ceil(unit * (0.5 * (magnitudes[k] + magnitudes[k + 1]))), 32767.0));
      }
      // Simple loops, one per level, which compilers turn into vectors.
      std::fill_n(level, dim, static_cast<std::int16_t>(magnitudes[0]));
      for (std::size_t k = 0; k + 1 < kHalf; ++k) {
        add_above(magnitude, thresholds[k], static_cast<std::int16_t>(magnitudes[k + 1] - magnitudes[k]), dim, level);
      }
      const double d = static_cast<double>(integer_dot(magnitude, level, dim)),
                   n = static_cast<double>(integer_dot(level, level, dim)), quality = d * d / n;
      if (quality > best) {
        best = quality, best_dot = d, best_norm = n;
        std::copy_n(thresholds, kHalf, best_thresholds);
      }
    }
    std::int16_t* index = level;
    std::fill_n(index, dim, std::int16_t{0});
    for (std::size_t k = 0; k + 1 < kHalf; ++k) add_above(magnitude, best_thresholds[k], 1, dim, index);
    for (std::size_t i = 0; i < dim; ++i) {
      const int sign = fixed[i] < 0 ? -1 : 0;  // -1 - index is index ^ -1
      codes[i] = static_cast<std::uint8_t>(static_cast<int>(kHalf) + (index[i] ^ sign));
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
    constexpr std::int32_t kShift = B == 8 ? 0 : static_cast<std::int32_t>(kMiddle);
    const float scale = to_float(best_scale), zero = to_float(zero_point);
    // Not a choice within the loop: there clang divides by a scale of zero too, and picks afterwards.
    if (!(scale > 0)) {
      std::memset(codes, kShift, dim);
      return best_scale;
    }
    for (std::size_t i = 0; i < dim; ++i) {
      codes[i] = static_cast<std::uint8_t>(grid_level<B>(x[i], zero, scale) + kShift);
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
        std::uint8_t unpacked[layout::kFragmentCodes] = {};
        for (std::size_t t = first; t < last; ++t) {
          const std::uint8_t* row = codes + (t - begin) * dim + group * 16;
          if (side == layout::Side::key) {
            std::uint8_t* to = unpacked + layout::code_position(layout::Side::key, t % 16, 0);
            for (std::size_t s = 0; s < 4; ++s) std::memcpy(to + s * layout::kSlotCodes, row + 4 * s, 4);
          } else {
            std::uint8_t* to = unpacked + layout::code_position(layout::Side::value, t % 16, 0);
            for (std::size_t c = 0; c < 16; ++c) to[4 * c] = row[c];
          }
        }
        add_codes<B>(unpacked, fragments + fragment_index(side, tile, group, tiles, groups) * kBytes);
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

  // Nearest integer, ties to even, for |x| < 2^22 (2^51): the addition leaves the integer in the low bits. Subtracted
  // as bits: of a float subtraction -ffast-math would leave x as it is.
  static std::int32_t round_even(float x) {
    return std::bit_cast<std::int32_t>(x + 12582912.0f) - std::bit_cast<std::int32_t>(12582912.0f);
  }
  static double round_even(double x) {
    return static_cast<double>(std::bit_cast<std::int64_t>(x + 6755399441055744.0) -
                               std::bit_cast<std::int64_t>(6755399441055744.0));
  }

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

  // level[i] += step where magnitude[i] >= threshold > -32768.
  static void add_above(const std::int16_t* magnitude, std::int16_t threshold, std::int16_t step, std::size_t dim,
                        std::int16_t* level) {
    const auto below = static_cast<std::int16_t>(threshold - 1);
    for (std::size_t i = 0; i < dim; ++i) {
      level[i] = static_cast<std::int16_t>(level[i] + (magnitude[i] > below ? step : std::int16_t{0}));
    }
  }

  // sum of a[i] b[i] with |b[i]| <= 127: 256 of them stay below 2^31.
  static std::int64_t integer_dot(const std::int16_t* a, const std::int16_t* b, std::size_t dim) {
    std::int64_t sum = 0;
    for (std::size_t begin = 0; begin < dim; begin += 256) {
      const std::size_t end = (std::min)(dim, begin + 256);
      std::int32_t part = 0;
      for (std::size_t i = begin; i < end; ++i) part += std::int32_t{a[i]} * b[i];
      sum += part;
    }
    return sum;
  }

  // Writes an unpacked fragment of codes over zeros: the fields of layout/fragment.hpp, written out per width.
  template <unsigned B>
  static void add_codes(const std::uint8_t* unpacked, std::uint8_t* fragment) {
    const std::uint8_t *s0 = unpacked, *s1 = s0 + 64, *s2 = s1 + 64, *s3 = s2 + 64;
    const auto add = [](std::uint8_t& to, unsigned bits) { to = static_cast<std::uint8_t>(to | bits); };
    for (std::size_t i = 0; i < 64; ++i) {
      if constexpr (B == 8) {
        for (std::size_t s = 0; s < 4; ++s) add(fragment[64 * s + i], unpacked[64 * s + i]);
      } else if constexpr (B == 4) {
        add(fragment[i], (s0[i] & 15u) | (s1[i] & 15u) << 4);
        add(fragment[64 + i], (s2[i] & 15u) | (s3[i] & 15u) << 4);
      } else if constexpr (B != 1) {
        add(fragment[i], (s0[i] & 3u) | (s1[i] & 3u) << 2 | (s2[i] & 3u) << 4 | (s3[i] & 3u) << 6);
      }
    }
    if constexpr (B == 1 || B == 3) {
      std::uint8_t* masks = fragment + (B == 3 ? 64 : 0);
      for (std::size_t byte = 0; byte < 32; ++byte) {
        unsigned mask = 0;
        for (std::size_t i = 0; i < 8; ++i) mask |= (unpacked[8 * byte + i] >> (B - 1) & 1u) << i;
        add(masks[byte], mask);
      }
    }
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
