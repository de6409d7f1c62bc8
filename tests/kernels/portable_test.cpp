// The portable kernels, the oracle of all others, against double precision.
#include <turboquant/kernels/portable.hpp>
#include <turboquant/transform/rotation.hpp>

#include "oracle/random.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using namespace turboquant;
using Kernels = kernels::Portable;

constexpr float kLargest = std::numeric_limits<float>::max();

std::vector<std::size_t> supported_dims() {
  std::vector<std::size_t> dims;
  for (std::size_t d = 1; d <= 1024; ++d) {
    if (is_supported_dim(d)) dims.push_back(d);
  }
  return dims;
}

kernels::RotationView view(const Rotation& rotation) {
  const std::size_t order = base_order(rotation.dim());
  return {rotation.dim(), rotation.signs(), base_matrix(order), order};
}

std::vector<float> gaussian(std::uint64_t seed, std::size_t n, double scale = 1) {
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(scale * oracle::gaussian(seed, 3, i));
  return x;
}

// R x by its definition, in double.
std::vector<double> rotate_exactly(const kernels::RotationView& r, const std::vector<float>& x) {
  const std::size_t inner = r.dim / r.order;
  std::vector<double> y(r.dim);
  for (std::size_t i = 0; i < r.dim; ++i) {
    for (std::size_t j = 0; j < r.dim; ++j) {
      const double base = r.order == 1 ? 1.0 : static_cast<double>(r.base[i / inner * r.order + j / inner]);
      const double sylvester = std::popcount((i % inner) & (j % inner)) % 2 == 0 ? 1 : -1;
      y[i] += base * sylvester * static_cast<double>(r.signs[j]) * static_cast<double>(x[j]);
    }
    y[i] /= std::sqrt(static_cast<double>(r.dim));
  }
  return y;
}

double norm(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

// N10, L02: at every supported size, forward against the definition and back again. Each of log2(d) stages (plus the
// base) may round by 2^-24 of the norm.
TEST(Portable, L02_RotationIsItsDefinitionAndInvertsItself) {
  for (const std::size_t dim : supported_dims()) {
    const Rotation rotation(42, dim);
    const auto r = view(rotation);
    const auto x = gaussian(dim, dim);
    std::vector<float> y(dim), back(dim);
    Kernels::rotate(r, x.data(), y.data());
    const auto exact = rotate_exactly(r, x);
    const double bound = 4 * (std::log2(static_cast<double>(dim)) + static_cast<double>(r.order)) * 0x1p-24 * norm(x);
    for (std::size_t i = 0; i < dim; ++i) ASSERT_NEAR(y[i], exact[i], bound) << "dim " << dim;
    Kernels::rotate_back(r, y.data(), back.data());
    for (std::size_t i = 0; i < dim; ++i) ASSERT_NEAR(back[i], x[i], 2 * bound) << "dim " << dim;
  }
}

// N10: one huge coordinate over small ones survives the inverse.
TEST(Portable, N10_InverseKeepsSmallCoordinatesBesideALargeOne) {
  const Rotation rotation(1, 128);
  std::vector<float> y(128), there(128), back(128);
  for (std::size_t i = 0; i < 128; ++i) y[i] = 1e-2f * (static_cast<float>(i % 7) - 3);
  y[0] = 30000;
  Kernels::rotate_back(view(rotation), y.data(), there.data());
  Kernels::rotate(view(rotation), there.data(), back.data());
  for (std::size_t i = 0; i < 128; ++i) EXPECT_NEAR(back[i], y[i], 4 * 7 * 0x1p-24 * norm(y));
}

// Magnitudes from the smallest subnormal to the largest float: nothing overflows, nothing vanishes before it must.
TEST(Portable, RotationKeepsItsRange) {
  const Rotation rotation(42, 64);
  const auto r = view(rotation);
  for (const float magnitude : {1.4e-45f, 1e-40f, 1e-38f, 1e-20f, 1.0f, 1e20f, 0x1p120f}) {
    std::vector<float> x(64, magnitude), y(64);
    Kernels::rotate(r, x.data(), y.data());
    EXPECT_NEAR(norm(y) / norm(x), 1, magnitude < 1e-37f ? 0.5 : 1e-6) << magnitude;
    for (const float v : y) EXPECT_TRUE(is_finite(v));
  }
  std::vector<float> x(64, 0.0f), y(64, 1.0f);
  Kernels::rotate(r, x.data(), y.data());
  for (const float v : y) EXPECT_EQ(v, 0.0f);
}

TEST(Portable, ExpOfNegativeNumbers) {
  double worst = 0;
  for (int i = 0; i <= 870000; ++i) {
    const float x = -1e-4f * static_cast<float>(i);
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(Kernels::exp_negative(x)) / exact - 1));
  }
  EXPECT_LE(worst, 2e-7);
  EXPECT_EQ(Kernels::exp_negative(0.0f), 1.0f);
  EXPECT_EQ(Kernels::exp_negative(-87.5f), 0.0f);
  EXPECT_EQ(Kernels::exp_negative(-kLargest), 0.0f);
  EXPECT_EQ(Kernels::exp_negative(-std::numeric_limits<float>::infinity()), 0.0f);
}

// N19: logits of any finite size.
TEST(Portable, N19_SoftmaxOfHugeLogits) {
  std::vector<float> logits{2000, 1999, 0, -2000, 89, 88, 88.73f, -104, 7, 7, 7, 7, 7, 7, 7, 7};
  kernels::SoftmaxState state{0, 0};
  EXPECT_EQ(Kernels::softmax_step(logits.data(), 0, 16, 0, 8, state), 0.0f);
  EXPECT_NEAR(logits[0] / state.sum, 0.7310586, 1e-6);
  EXPECT_NEAR(logits[1] / state.sum, 0.2689414, 1e-6);
  for (std::size_t t = 2; t < 16; ++t) EXPECT_EQ(logits[t], 0.0f) << "far below, or masked";
  EXPECT_NEAR(static_cast<double>(state.largest) + std::log(static_cast<double>(state.sum)), 2000.3133, 1e-3);
  for (const float extreme : {3e38f, -3e38f}) {
    std::vector<float> equal(16, extreme);
    kernels::SoftmaxState of_equal{0, 0};
    Kernels::softmax_step(equal.data(), 0, 16, 0, 8, of_equal);
    EXPECT_EQ(of_equal.sum, 8.0f);
    for (std::size_t t = 0; t < 8; ++t) EXPECT_EQ(equal[t] / of_equal.sum, 0.125f);
  }
}

// A later, larger logit rescales what came before.
TEST(Portable, SoftmaxStepsCompose) {
  const auto all = gaussian(5, 160, 5);
  kernels::SoftmaxState state{0, 0};
  double weighted = 0;
  for (std::size_t begin = 0; begin < 160; begin += 16) {
    std::vector<float> logits(all.begin() + static_cast<std::ptrdiff_t>(begin),
                              all.begin() + static_cast<std::ptrdiff_t>(begin) + 16);
    const float factor = Kernels::softmax_step(logits.data(), 0, 16, 0, 16, state);
    weighted *= static_cast<double>(factor);
    for (std::size_t t = 0; t < 16; ++t) weighted += static_cast<double>(logits[t]) * static_cast<double>(begin + t);
  }
  double sum = 0, expected = 0;
  for (std::size_t t = 0; t < 160; ++t) {
    const double p = std::exp(static_cast<double>(all[t]) - static_cast<double>(state.largest));
    sum += p;
    expected += p * static_cast<double>(t);
  }
  EXPECT_NEAR(state.sum, sum, 2e-6 * sum);
  EXPECT_NEAR(weighted / static_cast<double>(state.sum), expected / sum, 1e-3);
}

TEST(Portable, SoftCapIsTanh) {
  auto logits = gaussian(6, 64, 30);
  logits[0] = kLargest, logits[1] = -kLargest, logits[2] = 0, logits[3] = 1e-3f;
  const auto before = logits;
  Kernels::soft_cap(logits.data(), 0, 64, 20.0f);
  // Absolute: (1 - e) / (1 + e) rounds at 2^-24 of 1.
  for (std::size_t t = 0; t < 64; ++t)
    EXPECT_NEAR(logits[t], 20 * std::tanh(static_cast<double>(before[t]) / 20), 20 * 4e-7);
}

// Raw twins against double: 16 partial sums of d / 16 products each.
TEST(Portable, RawTwins) {
  for (const std::size_t dim : {32u, 80u, 128u, 576u, 1024u}) {
    const Rotation rotation(42, dim);
    constexpr std::size_t kTokens = 13, kRows = 3;
    const auto k = gaussian(dim, kTokens * dim), q = gaussian(dim + 1, kRows * dim);
    std::vector<bfloat16> keys(k.size());
    for (std::size_t i = 0; i < k.size(); ++i) keys[i] = to_bfloat16(k[i]);
    std::vector<float> normal(kRows * dim), rotated(kRows * dim), step(kRows), unit(kRows), factor(kRows),
        logits(kRows * 16, -1);
    std::vector<std::int8_t> planes(kRows * dim);
    std::vector<std::int32_t> sums(kRows);
    kernels::QueryBlock block{kRows, dim,         normal.data(), rotated.data(), planes.data(),
                              1,     step.data(), unit.data(),   sums.data()};
    std::copy(q.begin(), q.end(), normal.begin());
    Kernels::prepare_queries(view(rotation), block);
    for (std::size_t r = 0; r < kRows; ++r) factor[r] = unit[r];
    Kernels::score_raw(keys.data(), kTokens, block, 1, kRows, factor.data(), logits.data(), 16);
    for (std::size_t r = 1; r < kRows; ++r) {
      for (std::size_t t = 0; t < kTokens; ++t) {
        double dot = 0, magnitude = 0;
        for (std::size_t i = 0; i < dim; ++i) {
          const double term = static_cast<double>(q[r * dim + i]) * static_cast<double>(to_float(keys[t * dim + i]));
          dot += term;
          magnitude += std::abs(term);
        }
        EXPECT_NEAR(logits[(r - 1) * 16 + t], dot, (static_cast<double>(dim) / 16 + 8) * 0x1p-24 * magnitude);
      }
      EXPECT_EQ(logits[(r - 1) * 16 + kTokens], -1) << "wrote beyond the tokens";
    }
    std::vector<float> p(kRows * 16), out(kRows * dim);
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = i % 5 == 0 ? 0.0f : static_cast<float>(i) / 64;
    Kernels::accumulate_raw(keys.data(), kTokens, dim, kRows, p.data(), 16, out.data(), dim);
    for (std::size_t r = 0; r < kRows; ++r) {
      for (std::size_t i = 0; i < dim; ++i) {
        double expected = 0;
        for (std::size_t t = 0; t < kTokens; ++t) {
          expected += static_cast<double>(p[r * 16 + t]) * static_cast<double>(to_float(keys[t * dim + i]));
        }
        EXPECT_NEAR(out[r * dim + i], expected, 1e-5);
      }
    }
  }
}

// The centre: what is stored is subtracted exactly, in both widths; the scale never clips the largest coordinate.
TEST(Portable, CenterRows) {
  for (const unsigned bits : {8u, 16u}) {
    for (const float offset : {0.0f, 1.0f, 300.0f, 1e30f}) {
      constexpr std::size_t kCount = 50, kDim = 144;
      auto rows = gaussian(3, kCount * kDim, offset == 1e30f ? 1e27 : 1);
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] += offset * static_cast<float>(i % kDim % 5);
      const auto before = rows;
      std::vector<std::uint8_t> center(kDim * bits / 8);
      const float scale = to_float(Kernels::center_rows(rows.data(), kCount, kDim, bits, center.data()));
      for (std::size_t i = 0; i < kDim; ++i) {
        const int level =
            bits == 8 ? static_cast<std::int8_t>(center[i])
                      : static_cast<std::int16_t>(static_cast<std::uint16_t>(center[2 * i] | center[2 * i + 1] << 8));
        double mean = 0;
        for (std::size_t t = 0; t < kCount; ++t) {
          mean += static_cast<double>(before[t * kDim + i]) / kCount;
          EXPECT_EQ(rows[t * kDim + i], before[t * kDim + i] - scale * static_cast<float>(level));
        }
        EXPECT_NEAR(mean, static_cast<double>(scale) * level, 0.5001 * static_cast<double>(scale))
            << bits << " bits, offset " << offset;
      }
    }
  }
}

// The largest levels at the largest size fit the sums, and more of them mean more.
TEST(Portable, N26_LargestLevelsDoNotWrap) {
  for (const std::size_t dim : {512u, 576u, 1024u}) {
    const std::int8_t table[16] = {-127, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 127};
    const kernels::LevelCodes<4> codes{table};
    for (const unsigned plane_count : {1u, 2u}) {
      std::vector<std::int8_t> planes(dim * plane_count, 127);
      if (plane_count == 2) std::fill(planes.begin() + static_cast<std::ptrdiff_t>(dim), planes.end(), std::int8_t{63});
      std::vector<float> rotated(dim), step{1}, unit{1}, factor{1}, logits(16);
      kernels::QueryBlock block{1,           dim,         rotated.data(), rotated.data(), planes.data(),
                                plane_count, step.data(), unit.data()};
      double before = -1e30;
      for (std::size_t ones = 0; ones <= dim; ones += dim / 16) {
        std::vector<std::uint8_t> matrix(16 * dim, 0);
        for (std::size_t t = 0; t < 16; ++t)
          std::fill_n(matrix.begin() + static_cast<std::ptrdiff_t>(t * dim), ones, std::uint8_t{15});
        std::vector<std::uint8_t> fragments(dim / 16 * 128);
        Kernels::pack<4>(layout::Side::key, matrix.data(), 0, 16, 16, dim, fragments.data());
        std::vector<bfloat16> scales(16, to_bfloat16(1));
        kernels::CodedPart part;
        part.dim = dim;
        part.page_tokens = 16;
        part.scales = scales.data();
        part.fragments = fragments.data();
        Kernels::score(part, codes, 0, 1, block, 0, 1, factor.data(), logits.data(), 16);
        const double q = plane_count == 1 ? 127 : 127 * 128 + 63;
        const double expected = q * 127 * (2 * static_cast<double>(ones) - static_cast<double>(dim));
        EXPECT_NEAR(logits[0], expected, std::abs(expected) * 0x1p-23);
        EXPECT_GT(logits[0], before);
        before = logits[0];
      }
    }
  }
}

}  // namespace
