// Qjl and TurboProd reproduce the papers: unbiased, with the published variance; and the unbiased scale beats them.
#include "codec/coded_side.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace {

using namespace turboquant;

constexpr std::size_t kDim = 128;

struct Pair {
  std::vector<float> a, b;
};

// Unit vectors with <a, b> = t.
Pair pair(std::uint64_t seed, double t) {
  std::vector<double> a(kDim), b(kDim);
  double aa = 0, ab = 0, bb = 0;
  for (std::size_t i = 0; i < kDim; ++i) a[i] = oracle::gaussian(seed, 1, i), b[i] = oracle::gaussian(seed, 2, i);
  for (std::size_t i = 0; i < kDim; ++i) aa += a[i] * a[i], ab += a[i] * b[i];
  for (std::size_t i = 0; i < kDim; ++i) b[i] -= ab / aa * a[i], bb += b[i] * b[i];
  Pair p{std::vector<float>(kDim), std::vector<float>(kDim)};
  for (std::size_t i = 0; i < kDim; ++i) {
    p.a[i] = static_cast<float>(a[i] / std::sqrt(aa));
    p.b[i] = static_cast<float>(t * a[i] / std::sqrt(aa) + std::sqrt(1 - t * t) * b[i] / std::sqrt(bb));
  }
  return p;
}

struct Moments {
  double sum = 0, squares = 0;
  std::size_t n = 0;
  void add(double x) { sum += x, squares += x * x, ++n; }
  double mean() const { return sum / static_cast<double>(n); }
  double variance() const { return squares / static_cast<double>(n) - mean() * mean(); }
  double deviation_of_mean() const { return std::sqrt(variance() / static_cast<double>(n)); }
};

// N13, over independent seeds. With Gaussian rows the variance is at most (pi / 2 |q|^2 |k|^2 - <q, k>^2) / d (QJL,
// lemma 3.5, arXiv 2406.03482). Orthonormal rows have less: given S k = v, the part of S q across v is uniform on a
// sphere, and |sign(v)|^2 across v is d (1 - 2/pi); the part along v brings the variance of the sum of |v_i|, d^0 (1 -
// 3/pi). Together
// ((pi/2 - 1)(1 - t^2) + (pi/2 - 3/2) t^2) / d. The constant sqrt(pi/2)/sqrt(d) leaves a bias of 1/(4d) = 0.2 %.
TEST(Qjl, N13_UnbiasedWithThePublishedVariance) {
  for (const double t : {0.0, 0.5, 1.0}) {
    const Pair p = pair(3, t);
    Moments moments;
    for (std::uint64_t seed = 0; seed < 20000; ++seed) {
      const Qjl qjl(seed, kDim);
      std::uint8_t signs[kDim / 8];
      float projected[kDim];
      const float norm = qjl.encode(p.a.data(), signs);
      qjl.project(p.b.data(), projected);
      moments.add(static_cast<double>(qjl.estimate(projected, norm, signs)));
    }
    EXPECT_NEAR(moments.mean(), t, 4 * moments.deviation_of_mean() + 0.003 * t) << t;
    const double gaussian_rows = (std::numbers::pi / 2 - t * t) / kDim;
    EXPECT_LE(moments.variance(), gaussian_rows) << t;
    const double orthonormal_rows =
        ((std::numbers::pi / 2 - 1) * (1 - t * t) + (std::numbers::pi / 2 - 1.5) * t * t) / kDim;
    // 4 %: four standard deviations of a variance of 20,000 samples.
    EXPECT_NEAR(moments.variance(), orthonormal_rows, 0.04 * orthonormal_rows) << t;
  }
}

// N15: a zero vector contributes exactly nothing, and the second stage of TurboProd is alive.
TEST(Qjl, N15_ZeroAndSecondStage) {
  const Qjl qjl(1, kDim);
  const std::vector<float> zero(kDim), q = test::gaussian_rows(2, 1, kDim);
  std::uint8_t signs[kDim / 8];
  float projected[kDim];
  qjl.project(q.data(), projected);
  const float norm = qjl.encode(zero.data(), signs);
  EXPECT_EQ(norm, 0.0f);
  for (const std::uint8_t byte : signs) EXPECT_EQ(byte, 0xff) << "sign(0) is +1";
  EXPECT_EQ(qjl.estimate(projected, norm, signs), 0.0f);

  const TurboProd<3> prod(1, kDim);
  TurboProd<3>::Code code;
  TurboProd<3>::Query query;
  const auto k = test::gaussian_rows(4, 1, kDim);
  prod.encode(k.data(), code);
  prod.prepare(q.data(), query);
  EXPECT_NE(prod.estimate(query, code), prod.estimate(query, code, false));
}

// Unbiased at every width; variance is about pi/2 D / d |q|^2 |k|^2 with the distortion D of the first stage (arXiv
// 2504.19874, theorem 2).
template <unsigned B>
void expect_prod(double first_stage) {
  const Pair p = pair(11, 0.5);
  Moments moments;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    const TurboProd<B> prod(seed, kDim);
    typename TurboProd<B>::Code code;
    typename TurboProd<B>::Query query;
    prod.encode(p.a.data(), code);
    prod.prepare(p.b.data(), query);
    moments.add(static_cast<double>(prod.estimate(query, code)));
  }
  EXPECT_NEAR(moments.mean(), 0.5, 4 * moments.deviation_of_mean() + 0.003 * first_stage) << B;
  EXPECT_LE(moments.variance(), 1.1 * std::numbers::pi / 2 * first_stage / kDim) << B;
}

TEST(TurboProd, UnbiasedWithThePublishedVariance) {
  expect_prod<2>(0.3608);
  expect_prod<3>(0.1154);
  expect_prod<4>(0.0335);
}

// The point of leaving them: at equal bits PolarQuant with the unbiased scale has no bias either and less error.
template <unsigned B>
void expect_unbiased_scale_wins() {
  double polar = 0, prod = 0, bias = 0;
  constexpr std::uint64_t kPairs = 3000;
  const Rotation rotation(7, kDim);
  const kernels::RotationView view{kDim, rotation.signs(), base_matrix(1), 1};
  const TurboProd<B> sketch(7, kDim);
  for (std::uint64_t seed = 0; seed < kPairs; ++seed) {
    const Pair p = pair(seed, 0.5);
    std::vector<float> k(kDim), q(kDim);
    test::Kernels::rotate(view, p.a.data(), k.data());
    test::Kernels::rotate(view, p.b.data(), q.data());
    const test::CodedSide<PolarQuant<B>> coded(Side::key, k, kDim, 16, {ScaleRule::unbiased, true});
    const auto y = coded.decode(0);
    double estimate = 0;
    for (std::size_t i = 0; i < kDim; ++i) estimate += static_cast<double>(q[i]) * static_cast<double>(y[i]);
    typename TurboProd<B>::Code code;
    typename TurboProd<B>::Query query;
    sketch.encode(p.a.data(), code);
    sketch.prepare(p.b.data(), query);
    const double other = static_cast<double>(sketch.estimate(query, code));
    polar += (estimate - 0.5) * (estimate - 0.5);
    prod += (other - 0.5) * (other - 0.5);
    bias += estimate - 0.5;
  }
  EXPECT_LT(polar, 0.75 * prod) << "B = " << B;
  EXPECT_NEAR(bias / kPairs, 0, 0.002) << "B = " << B;  // N14
}

TEST(TurboProd, TheUnbiasedScaleBeatsItAtEqualBits) {
  expect_unbiased_scale_wins<2>();
  expect_unbiased_scale_wins<3>();
  expect_unbiased_scale_wins<4>();
}

// N14 at the cosines of the case.
TEST(PolarQuant, N14_NoBiasOnCorrelatedPairs) {
  const Rotation rotation(7, kDim);
  const kernels::RotationView view{kDim, rotation.signs(), base_matrix(1), 1};
  for (const double t : {0.5, 0.8, 0.95}) {
    double three = 0, four = 0;
    constexpr std::uint64_t kPairs = 4096;
    for (std::uint64_t seed = 0; seed < kPairs; ++seed) {
      const Pair p = pair(seed, t);
      std::vector<float> k(kDim), q(kDim);
      test::Kernels::rotate(view, p.a.data(), k.data());
      test::Kernels::rotate(view, p.b.data(), q.data());
      const auto y3 = test::CodedSide<PolarQuant<3>>(Side::key, k, kDim, 16, {ScaleRule::unbiased, true}).decode(0);
      const auto y4 = test::CodedSide<PolarQuant<4>>(Side::key, k, kDim, 16, {ScaleRule::unbiased, true}).decode(0);
      double e3 = -t, e4 = -t;
      for (std::size_t i = 0; i < kDim; ++i) {
        e3 += static_cast<double>(q[i]) * static_cast<double>(y3[i]);
        e4 += static_cast<double>(q[i]) * static_cast<double>(y4[i]);
      }
      three += e3;
      four += e4;
    }
    EXPECT_NEAR(three / kPairs, 0, 0.002) << t;
    EXPECT_NEAR(four / kPairs, 0, 0.002) << t;
  }
}

}  // namespace
