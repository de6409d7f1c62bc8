// ScalarQuant: half a step of the stored grid, for any range.
#include "codec/coded_side.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace {

using turboquant::ScalarQuant;
using turboquant::Side;
using turboquant::to_float;

// The grid from minimum to maximum, without looking for a narrower one.
constexpr turboquant::EncodeOptions kWholeRange{turboquant::ScaleRule::least_squares, false};

template <unsigned B>
void expect_half_step(const std::vector<float>& rows, std::size_t dim) {
  const std::size_t count = rows.size() / dim;
  const test::CodedSide<ScalarQuant<B>> coded(Side::value, rows, dim, 16, kWholeRange);
  for (std::size_t t = 0; t < count; ++t) {
    const auto y = coded.decode(t);
    const double step = to_float(coded.scales[t]), zero = to_float(coded.zero_points[t]);
    // At the ends the rounding of the zero point (half a unit in its 8th bit) may add to half a step.
    const double bound = 0.5 * step + std::abs(zero) * 0x1p-8 + 1e-6 * std::abs(zero);
    for (std::size_t i = 0; i < dim; ++i) EXPECT_NEAR(y[i], rows[t * dim + i], bound) << "B = " << B << " i = " << i;
  }
}

TEST(ScalarQuant, ErrorIsAtMostHalfAStep) {
  for (const float scale : {1e-20f, 1.0f, 1e20f}) {
    auto rows = test::gaussian_rows(3, 16, 80);
    for (float& x : rows) x *= scale;
    expect_half_step<2>(rows, 80);
    expect_half_step<3>(rows, 80);
    expect_half_step<4>(rows, 80);
    expect_half_step<8>(rows, 80);
  }
}

TEST(ScalarQuant, OffsetsAndOutliers) {
  auto rows = test::gaussian_rows(4, 16, 64);
  for (std::size_t t = 0; t < 16; ++t) rows[t * 64 + 5] = -125000.0f;  // N04
  for (std::size_t i = 0; i < 64; ++i) rows[i] += 4000.0f;             // N05
  expect_half_step<3>(rows, 64);
  expect_half_step<4>(rows, 64);
  expect_half_step<8>(rows, 64);
}

// N03: a constant row has no range. Its code is the zero point alone: exact where bf16 is.
TEST(ScalarQuant, N03_ConstantRows) {
  for (const float constant : {3.25f, -65536.0f, 0.0f, -0.0f, 1.0f}) {
    const std::vector<float> rows(128, constant);
    const test::CodedSide<ScalarQuant<4>> coded(Side::value, rows, 128, 16);
    EXPECT_EQ(coded.scales[0].bits, 0);
    for (const float y : coded.decode(0)) EXPECT_EQ(y, constant);
  }
  std::vector<float> rows(128, 1.0f);
  rows[17] = 1.0f + 0x1p-23f;
  const test::CodedSide<ScalarQuant<4>> coded(Side::value, rows, 128, 16);
  for (const float y : coded.decode(0)) EXPECT_NEAR(y, 1.0f, 0x1p-11);
}

// Clipping the ends of the range: mean error of N(0, I) rows, d = 128, before and after. The best uniform grids for a
// Gaussian have 0.1188, 0.0374 and 0.0115 (Max 1960, table II) with one grid for all; a grid per row does better at
// short rows.
template <unsigned B>
void expect_search_pays(double without, double with) {
  double plain = 0, searched = 0;
  constexpr std::size_t kRows = 64, kDim = 128;
  for (std::uint64_t page = 0; page < 10; ++page) {
    const auto rows = test::gaussian_rows(page, kRows, kDim);
    const test::CodedSide<ScalarQuant<B>> whole(Side::value, rows, kDim, kRows, kWholeRange);
    const test::CodedSide<ScalarQuant<B>> best(Side::value, rows, kDim, kRows);
    for (std::size_t t = 0; t < kRows; ++t) {
      const double a = test::relative_error(rows.data() + t * kDim, whole.decode(t));
      const double b = test::relative_error(rows.data() + t * kDim, best.decode(t));
      EXPECT_LE(b, a * 1.0001) << "the whole range is one of the candidates";
      plain += a / (10 * kRows);
      searched += b / (10 * kRows);
    }
  }
  EXPECT_NEAR(plain, without, 0.03 * without) << "B = " << B;  // 640 rows: 1 % sampling error
  EXPECT_NEAR(searched, with, 0.03 * with) << "B = " << B;
}

TEST(ScalarQuant, ClippingTheEndsPays) {
  expect_search_pays<2>(0.251, 0.118);
  expect_search_pays<3>(0.0457, 0.0337);
  expect_search_pays<4>(0.00998, 0.00886);
}

// N24: ties go to even, everywhere in the row alike. Step exactly 1, values at every half.
TEST(ScalarQuant, N24_TiesToEven) {
  std::vector<float> rows(64, 0.0f);
  for (std::size_t i = 0; i <= 30; ++i) rows[i] = rows[32 + i] = 0.5f * static_cast<float>(i);
  rows[63] = 15;
  const test::CodedSide<ScalarQuant<4>> coded(Side::value, rows, 64, 16, kWholeRange);
  ASSERT_EQ(to_float(coded.scales[0]), 1.0f);
  const auto y = coded.decode(0);
  for (std::size_t i = 0; i <= 30; ++i) {
    EXPECT_EQ(y[i], std::nearbyint(rows[i])) << i;
    EXPECT_EQ(y[i], y[32 + i]) << i;
  }
}

}  // namespace
