// The Lloyd-Max tables are the fixed point of Lloyd's iteration for N(0, 1), and their integer form costs next to
// nothing.
#include <turboquant/codec/codebook.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

namespace {

double density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi); }
double below(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }
double x_density(double x) { return std::isinf(x) ? 0 : x * density(x); }

// Mean squared error of N(0, 1) on the positive half with the given levels and midpoint boundaries, both halves
// counted.
template <class Level>
double distortion(std::size_t half, Level level) {
  double total = 0;
  for (std::size_t i = 0; i < half; ++i) {
    const double a = i == 0 ? 0 : 0.5 * (level(i - 1) + level(i));
    const double b = i + 1 == half ? std::numeric_limits<double>::infinity() : 0.5 * (level(i) + level(i + 1));
    const double mass = below(b) - below(a), first = density(a) - density(b);
    const double second = mass + x_density(a) - x_density(b);
    total += second - 2 * level(i) * first + level(i) * level(i) * mass;
  }
  return 2 * total;
}

template <unsigned B>
void expect_fixed_point() {
  const auto& levels = turboquant::kLloydMaxLevels<B>;
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const double a = i == 0 ? 0 : 0.5 * (levels[i - 1] + levels[i]);
    const double b =
        i + 1 == levels.size() ? std::numeric_limits<double>::infinity() : 0.5 * (levels[i] + levels[i + 1]);
    const double centroid = (density(a) - density(b)) / (below(b) - below(a));
    // The iteration converges linearly; from 1e-13 on rounding of erfc decides.
    EXPECT_NEAR(levels[i], centroid, 1e-12) << "B = " << B << ", level " << i;
  }
}

TEST(Codebook, IsTheFixedPointOfLloydsIteration) {
  expect_fixed_point<1>();
  expect_fixed_point<2>();
  expect_fixed_point<3>();
  expect_fixed_point<4>();
}

template <unsigned B>
void expect_integer_levels(double optimum, double extra) {
  using Book = turboquant::Codebook<B>;
  const auto& levels = turboquant::kLloydMaxLevels<B>;
  EXPECT_NEAR(distortion(levels.size(), [&](std::size_t i) { return levels[i]; }), optimum, 5e-6 * optimum);
  const double integer =
      distortion(Book::magnitudes.size(), [](std::size_t i) { return Book::magnitudes[i] / Book::kSpread; });
  EXPECT_LE(integer, optimum * (1 + extra)) << "B = " << B;
  for (std::size_t c = 0; c < Book::levels.size(); ++c) {
    EXPECT_EQ(Book::levels[c], -Book::levels[Book::levels.size() - 1 - c]);
    if (c > 0) {
      EXPECT_LT(Book::levels[c - 1], Book::levels[c]);
    }
    EXPECT_NE(Book::levels[c], -128);
  }
}

// Distortion of the optimum: Max 1960, table I (0.3634, 0.1175, 0.03454, 0.009497), here to six digits.
TEST(Codebook, IntegerLevelsCostNextToNothing) {
  expect_integer_levels<1>(0.3633802, 1e-6);
  expect_integer_levels<2>(0.1174818, 1e-5);
  expect_integer_levels<3>(0.0345478, 3e-5);
  expect_integer_levels<4>(0.00950101, 6e-4);
}

}  // namespace
