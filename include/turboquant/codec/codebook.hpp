// Lloyd-Max levels of the standard normal distribution and their integer tables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace turboquant {

/// The positive levels of the quantizer of N(0, 1) with 2^B levels; the table is symmetric. The fixed point of Lloyd's
/// iteration, each level the mean of its cell and each boundary the middle of two levels;
/// tests/codec/codebook_test.cpp proves it. Source: J. Max, "Quantizing for minimum distortion", IRE Trans. Inform.
/// Theory 6 (1960), table I, prints the same to four digits.
template <unsigned B>
inline constexpr std::array<double, (std::size_t{1} << (B - 1))> kLloydMaxLevels{};
/// @cond
template <>
inline constexpr std::array<double, 1> kLloydMaxLevels<1>{0.7978845608028654};
template <>
inline constexpr std::array<double, 2> kLloydMaxLevels<2>{0.4527800346364925, 1.5104176084990963};
template <>
inline constexpr std::array<double, 4> kLloydMaxLevels<3>{0.24509417894422178, 0.7560052812058784, 1.343909278505002,
                                                          2.151945704536988};
template <>
inline constexpr std::array<double, 8> kLloydMaxLevels<4>{0.12839502985114687, 0.38804829949028974, 0.6567591185324629,
                                                          0.9423404564869626,  1.2562311973471765,  1.618046386021885,
                                                          2.069017226531381,   2.73258957099517};
/// @endcond

/// Levels as integers: level(code) * step is within 0.5 step of the Lloyd-Max level of N(0, 1). The largest integer
/// level is chosen, up to 127, so that rounding costs least error: 0.001 % (2 bits), 0.003 % (3 bits), 0.06 % (4 bits).
template <unsigned B>
struct Codebook {
  /// Number of positive levels.
  static constexpr std::size_t kHalf = std::size_t{1} << (B - 1);
  /// The largest integer level.
  static constexpr int kLargest = B == 1 ? 1 : B == 2 ? 100 : B == 3 ? 88 : 104;
  /// Standard deviation of the source in level units: 1 / step.
  static constexpr double kSpread = kLargest / kLloydMaxLevels<B>.back();

  /// The positive levels, ascending.
  static constexpr std::array<std::int8_t, kHalf> magnitudes = [] {
    std::array<std::int8_t, kHalf> table{};
    for (std::size_t i = 0; i < kHalf; ++i) table[i] = static_cast<std::int8_t>(kLloydMaxLevels<B>[i] * kSpread + 0.5);
    return table;
  }();

  /// All levels, ascending; code c decodes to levels[c].
  static constexpr std::array<std::int8_t, 2 * kHalf> levels = [] {
    std::array<std::int8_t, 2 * kHalf> table{};
    for (std::size_t i = 0; i < kHalf; ++i) {
      table[kHalf + i] = magnitudes[i];
      table[kHalf - 1 - i] = static_cast<std::int8_t>(-magnitudes[i]);
    }
    return table;
  }();
};

}  // namespace turboquant
