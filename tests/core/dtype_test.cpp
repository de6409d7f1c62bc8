// half and bfloat16: every pattern, and rounding against a reference that computes in double.
#include <turboquant/core/dtype.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tq = turboquant;

namespace {

float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

struct Format {
  int fraction_bits, min_exponent, max_exponent;
};
constexpr Format kHalf{10, -14, 15}, kBfloat16{7, -126, 127};

/// The value of a 16-bit pattern by definition; no infinities, no NaN.
double decode(const Format& format, std::uint32_t bits) {
  const int fraction = int(bits & ((1u << format.fraction_bits) - 1u));
  const int exponent = int((bits & 0x7fffu) >> format.fraction_bits);
  const int hidden = exponent == 0 ? 0 : 1 << format.fraction_bits;
  const int scale = format.min_exponent + (exponent == 0 ? 0 : exponent - 1) - format.fraction_bits;
  const double magnitude = std::ldexp(double(hidden + fraction), scale);
  return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

/// x rounded to the format, as a double: nearest multiple of the spacing at x (std::nearbyint: ties to even).
double round_to(const Format& format, float x) {
  if (x == 0.0f || std::isinf(x)) return x;
  const int exponent = (std::max)(std::ilogb(x), format.min_exponent);
  const int spacing = exponent - format.fraction_bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(double(x), -spacing)), spacing);
  if (std::fabs(rounded) >= std::ldexp(1.0, format.max_exponent + 1)) {
    return std::copysign(std::numeric_limits<double>::infinity(), rounded);
  }
  return rounded;
}

/// True if both are the same number with the same sign; zeros are told apart.
bool same(double a, double b) { return a == b && std::signbit(a) == std::signbit(b); }

void expect_both_round(float x) {
  const float as_half = tq::to_float(tq::to_half(x)), as_bfloat16 = tq::to_float(tq::to_bfloat16(x));
  ASSERT_TRUE(same(as_half, round_to(kHalf, x))) << std::hexfloat << x << " gave half " << as_half;
  ASSERT_TRUE(same(as_bfloat16, round_to(kBfloat16, x))) << std::hexfloat << x << " gave bfloat16 " << as_bfloat16;
}

void expect_both_round_around(float x) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float near : {x, std::nextafter(x, infinity), std::nextafter(x, -infinity)}) {
    expect_both_round(near);
    expect_both_round(-near);
  }
}

}  // namespace

TEST(Dtype, SizesInBytes) {
  EXPECT_EQ(tq::size_of(tq::DType::f32), sizeof(float));
  EXPECT_EQ(tq::size_of(tq::DType::f16), sizeof(tq::half));
  EXPECT_EQ(tq::size_of(tq::DType::bf16), sizeof(tq::bfloat16));
  EXPECT_EQ(tq::size_of(tq::DType(200)), 0u);
}

TEST(Dtype, KnownValuesAtCompileTime) {
  static_assert(tq::to_float(tq::half{0x3c00}) == 1.0f);
  static_assert(tq::to_float(tq::half{0x0001}) == 0x1p-24f);
  static_assert(tq::to_float(tq::half{0xfbff}) == -65504.0f);
  static_assert(tq::to_half(65519.0f).bits == 0x7bff);
  static_assert(tq::to_half(65520.0f).bits == 0x7c00);
  static_assert(tq::to_half(0x1p-25f).bits == 0);
  static_assert(tq::to_half(0x1.000002p-25f).bits == 1);
  static_assert(tq::to_bfloat16(1.0f).bits == 0x3f80);
  static_assert(tq::to_bfloat16(1.00390625f).bits == 0x3f80);  // 1 + 2^-8, a tie
  static_assert(tq::to_bfloat16(1.01171875f).bits == 0x3f82);  // 1 + 3 * 2^-8, a tie
  static_assert(tq::is_finite(0.0f));
  SUCCEED() << "checked by the compiler";
}

TEST(Dtype, EveryHalfWidensByDefinitionAndComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const tq::half x{std::uint16_t(bits)};
    const float wide = tq::to_float(x);
    const std::uint32_t magnitude = bits & 0x7fffu;
    if (magnitude > 0x7c00u) {
      ASSERT_TRUE((bits_of(wide) & 0x7fffffffu) > 0x7f800000u) << bits;
      ASSERT_NE(bits_of(wide) & 0x00400000u, 0u) << "signalling from " << bits;
      ASSERT_EQ(tq::to_half(wide).bits, bits | 0x0200u);
      ASSERT_FALSE(tq::is_finite(wide));
    } else if (magnitude == 0x7c00u) {
      ASSERT_EQ(bits_of(wide), bits == 0x7c00u ? 0x7f800000u : 0xff800000u);
      ASSERT_EQ(tq::to_half(wide).bits, bits);
      ASSERT_FALSE(tq::is_finite(wide));
    } else {
      ASSERT_TRUE(same(wide, decode(kHalf, bits))) << bits;
      ASSERT_EQ(tq::to_half(wide).bits, bits);
      ASSERT_TRUE(tq::is_finite(wide));
    }
  }
}

TEST(Dtype, EveryBfloat16WidensByDefinitionAndComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const tq::bfloat16 x{std::uint16_t(bits)};
    const float wide = tq::to_float(x);
    const std::uint32_t magnitude = bits & 0x7fffu;
    ASSERT_EQ(bits_of(wide), bits << 16);
    ASSERT_EQ(tq::is_finite(wide), magnitude < 0x7f80u) << bits;
    if (magnitude > 0x7f80u) {
      ASSERT_EQ(tq::to_bfloat16(wide).bits, bits | 0x0040u);
    } else {
      ASSERT_EQ(tq::to_bfloat16(wide).bits, bits);
      ASSERT_TRUE(magnitude == 0x7f80u || same(wide, decode(kBfloat16, bits))) << bits;
    }
  }
}

TEST(Dtype, RoundsToNearestEvenAtEveryHalfAndEveryMiddleBetweenTwo) {
  for (std::uint32_t bits = 0; bits < 0x7bffu; ++bits) {
    const double low = decode(kHalf, bits), high = decode(kHalf, bits + 1);
    expect_both_round_around(float(low));
    expect_both_round_around(float((low + high) / 2));
    if (HasFatalFailure()) return;
  }
  expect_both_round_around(65504.0f);
  expect_both_round_around(65520.0f);
  expect_both_round_around(65536.0f);
}

TEST(Dtype, RoundsToNearestEvenAtEveryBfloat16AndEveryMiddleBetweenTwo) {
  for (std::uint32_t bits = 0; bits < 0x7f7fu; ++bits) {
    expect_both_round_around(float_of(bits << 16));
    expect_both_round_around(float_of((bits << 16) | 0x8000u));
    if (HasFatalFailure()) return;
  }
  expect_both_round(float_of(0x7f7f7fffu));
  expect_both_round(float_of(0x7f7f8000u));
  expect_both_round(float_of(0x7f7fffffu));
  EXPECT_EQ(tq::to_bfloat16(float_of(0x7f7f7fffu)).bits, 0x7f7f);
  EXPECT_EQ(tq::to_bfloat16(float_of(0x7f7f8000u)).bits, 0x7f80);
}

TEST(Dtype, RoundsToNearestEvenAllOverTheRange) {
  // A prime step through all finite magnitudes meets every exponent about 8,000 times with all kinds of fractions.
  for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += 1021u) {
    expect_both_round(float_of(bits));
    expect_both_round(float_of(bits | 0x80000000u));
    if (HasFatalFailure()) return;
  }
}

TEST(Dtype, InfinitiesStayAndNanStaysQuietNan) {
  for (const std::uint32_t sign : {0u, 0x8000u}) {
    EXPECT_EQ(tq::to_half(float_of(sign << 16 | 0x7f800000u)).bits, sign | 0x7c00u);
    EXPECT_EQ(tq::to_bfloat16(float_of(sign << 16 | 0x7f800000u)).bits, sign | 0x7f80u);
    // Payloads that truncation would lose, that rounding would carry into the sign, and plain ones.
    for (const std::uint32_t nan : {0x7f800001u, 0x7f801fffu, 0x7f80ffffu, 0x7fc00000u, 0x7fbfffffu, 0x7fffffffu}) {
      const float x = float_of(sign << 16 | nan);
      const std::uint32_t as_half = tq::to_half(x).bits, as_bfloat16 = tq::to_bfloat16(x).bits;
      EXPECT_EQ(as_half & 0xfe00u, sign | 0x7e00u) << std::hex << nan;
      EXPECT_EQ(as_bfloat16 & 0xffc0u, sign | 0x7fc0u) << std::hex << nan;
      EXPECT_FALSE(tq::is_finite(x)) << std::hex << nan;
    }
  }
}

TEST(Dtype, FiniteMeansNeitherInfinityNorNan) {
  EXPECT_TRUE(tq::is_finite(-0.0f));
  EXPECT_TRUE(tq::is_finite(float_of(1u)));
  EXPECT_TRUE(tq::is_finite(-(std::numeric_limits<float>::max)()));
  EXPECT_FALSE(tq::is_finite(std::numeric_limits<float>::infinity()));
  EXPECT_FALSE(tq::is_finite(-std::numeric_limits<float>::infinity()));
  EXPECT_FALSE(tq::is_finite(std::numeric_limits<float>::quiet_NaN()));
}
