// Element types of the caller's rows and their exact conversions to and from float.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace turboquant {

/// Element type of a row view.
enum class DType : std::uint8_t {
  f32,  ///< float, IEEE 754 binary32
  f16,  ///< half
  bf16  ///< bfloat16
};

/// IEEE 754 binary16: 1 sign, 5 exponent and 10 fraction bits.
struct half {
  std::uint16_t bits;  ///< as in memory
};

/// The upper half of an IEEE 754 binary32: 1 sign, 8 exponent and 7 fraction bits.
struct bfloat16 {
  std::uint16_t bits;  ///< as in memory
};

/// Bytes per element; 0 for a value that is no DType.
[[nodiscard]] constexpr std::size_t size_of(DType type) noexcept {
  switch (type) {
    case DType::f32:
      return 4;
    case DType::f16:
      return 2;
    case DType::bf16:
      return 2;
  }
  return 0;
}

/// True for all but infinities and NaN. A test of bits, so that -ffast-math cannot remove it.
[[nodiscard]] constexpr bool is_finite(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}

/// Exact. A NaN keeps sign and payload and becomes quiet.
[[nodiscard]] constexpr float to_float(half x) noexcept {
  // Three cases by selection, not by branch, so that a loop over a row vectorises. Subnormals go through an integer:
  // a multiplication of float subnormals would lose them where the caller has switched on denormals-are-zero.
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  const std::uint32_t sign = std::uint32_t(x.bits & 0x8000u) << 16;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(float(std::int32_t(magnitude)) * 0x1p-24f);
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  const std::uint32_t value = magnitude < 0x0400u ? subnormal : magnitude < 0x7c00u ? normal : special;
  return std::bit_cast<float>(sign | value);
}

/// Exact: the same bits, followed by 16 zeros.
[[nodiscard]] constexpr float to_float(bfloat16 x) noexcept {
  return std::bit_cast<float>(std::uint32_t(x.bits) << 16);
}

/// Nearest half, ties to even, with subnormals; from 65520 on infinity. NaN stays NaN and becomes quiet.
[[nodiscard]] constexpr half to_half(float x) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t value = 0;
  if (magnitude > 0x7f800000u) {
    value = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, half way between the largest half and the next power of two
    value = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal half
    value = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude >= 0x33000000u) {  // 2^-25, half of the smallest subnormal
    const std::uint32_t shift = 126u - (magnitude >> 23);
    const std::uint32_t significand = (magnitude & 0x007fffffu) | 0x00800000u;
    const std::uint32_t rest = significand & ((1u << shift) - 1u);
    const std::uint32_t middle = 1u << (shift - 1u);
    value = significand >> shift;
    value += std::uint32_t(rest > middle || (rest == middle && (value & 1u) != 0));
  }
  return half{std::uint16_t(sign | value)};
}

/// Nearest bfloat16, ties to even, with subnormals; above the largest finite value infinity. NaN stays NaN and becomes
/// quiet.
[[nodiscard]] constexpr bfloat16 to_bfloat16(float x) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x0040u;
  return bfloat16{std::uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

}  // namespace turboquant
