// Rounding to bfloat16 and half in double arithmetic: nearest, ties to even, with subnormals and infinities.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace oracle {

/// `x` rounded to a binary format with `precision` significant bits, smallest normal exponent `min_exponent` (a normal
/// number is at least 2^min_exponent) and values below 2^(max_exponent + 1).
inline double round_to_format(double x, int precision, int min_exponent, int max_exponent) {
  if (x == 0 || std::isnan(x) || std::isinf(x)) return x;
  int exponent = std::ilogb(x);
  if (exponent < min_exponent) exponent = min_exponent;
  const double unit = std::ldexp(1.0, exponent - precision + 1);
  const double rounded = std::nearbyint(x / unit) * unit;
  if (std::fabs(rounded) >= std::ldexp(1.0, max_exponent + 1))
    return std::copysign(std::numeric_limits<double>::infinity(), x);
  return rounded;
}

inline double round_bfloat16(double x) { return round_to_format(x, 8, -126, 127); }
inline double round_half(double x) { return round_to_format(x, 11, -14, 15); }

/// The 16 bits of a number that round_to_format has already made representable. A NaN gives one quiet NaN.
inline std::uint16_t bits_of_format(double x, int precision, int min_exponent, int max_exponent) {
  const int fraction_bits = precision - 1;
  const unsigned sign = std::signbit(x) ? 0x8000U : 0U;
  const unsigned top = static_cast<unsigned>(max_exponent - min_exponent + 2) << fraction_bits;
  if (std::isnan(x)) return static_cast<std::uint16_t>(top | (1U << (fraction_bits - 1)));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | top);
  if (x == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::ilogb(x) < min_exponent ? min_exponent : std::ilogb(x);
  const auto integer = static_cast<unsigned>(std::ldexp(std::fabs(x), fraction_bits - exponent));
  // A normal number's leading bit adds one to the exponent field, a subnormal's is absent.
  return static_cast<std::uint16_t>(sign |
                                    ((static_cast<unsigned>(exponent - min_exponent) << fraction_bits) + integer));
}

inline std::uint16_t bfloat16_bits(double x) { return bits_of_format(round_bfloat16(x), 8, -126, 127); }
inline std::uint16_t half_bits(double x) { return bits_of_format(round_half(x), 11, -14, 15); }

inline double value_of_format(std::uint16_t bits, int precision, int min_exponent, int max_exponent) {
  const int fraction_bits = precision - 1;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == max_exponent - min_exponent + 2)
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(static_cast<double>(fraction), min_exponent - fraction_bits);
  return sign *
         std::ldexp(static_cast<double>(fraction + (1 << fraction_bits)), exponent - 1 + min_exponent - fraction_bits);
}

inline double value_of_bfloat16(std::uint16_t bits) { return value_of_format(bits, 8, -126, 127); }
inline double value_of_half(std::uint16_t bits) { return value_of_format(bits, 11, -14, 15); }

}  // namespace oracle
