// What every codec owes the container, whatever its code: a new codec is one line in the list below.
#include "codec/coded_side.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace {

using namespace turboquant;

template <class C>
class CodecContract : public testing::Test {};

using AllCodecs =
    testing::Types<PolarQuant<1>, PolarQuant<2>, PolarQuant<3>, PolarQuant<4>, PolarQuant<8>, ScalarQuant<2>,
                   ScalarQuant<3>, ScalarQuant<4>, ScalarQuant<8>, TrellisQuant<2>, TrellisQuant<3>, TrellisQuant<4>>;
TYPED_TEST_SUITE(CodecContract, AllCodecs);

constexpr std::size_t kDims[] = {32, 80, 96, 112, 128, 192, 256, 576, 1024};

template <class C>
std::vector<Side> sides() {
  if constexpr (KeyCodec<C>) {
    return {Side::key, Side::value};
  } else {
    return {Side::value};
  }
}

// Error of N(0, I) rows that no code of this width exceeds: the one-bit optimum is 0.363, min-max grids of few bits are
// worse than Lloyd-Max, so twice 4^(1-B) and 0.8 for two-bit grids.
template <class C>
double loose_bound() {
  return std::min(0.8, 4 * std::pow(4.0, -static_cast<double>(C::bits)) * 3);
}

TYPED_TEST(CodecContract, DecodesCloseToTheRow) {
  for (const std::size_t dim : kDims) {
    for (const Side side : sides<TypeParam>()) {
      const auto rows = test::gaussian_rows(dim, 20, dim);
      const test::CodedSide<TypeParam> coded(side, rows, dim, 32);
      for (std::size_t t = 0; t < 20; ++t) {
        EXPECT_LT(test::relative_error(rows.data() + t * dim, coded.decode(t)), loose_bound<TypeParam>())
            << TypeParam::name << " dim " << dim << " token " << t;
      }
    }
  }
}

TYPED_TEST(CodecContract, BytesAreAFunctionOfTheRows) {
  for (const Side side : sides<TypeParam>()) {
    const auto rows = test::gaussian_rows(7, 37, 96);
    const test::CodedSide<TypeParam> a(side, rows, 96, 64, {}, 0x00), b(side, rows, 96, 64, {}, 0xff);
    const auto skip = test::CodedSide<TypeParam>::kBefore;
    EXPECT_TRUE(std::equal(a.memory.begin() + skip, a.memory.end(), b.memory.begin() + skip));
    for (std::size_t t = 0; t < 64; ++t) {
      EXPECT_EQ(a.scales[t].bits, b.scales[t].bits);
      if (t >= 37) {
        EXPECT_EQ(a.scales[t].bits, 0) << "a token without a row has a scale";
      }
      if (TypeParam::zero_points) {
        EXPECT_EQ(a.zero_points[t].bits, b.zero_points[t].bits);
      }
    }
    for (std::size_t i = 0; i < skip; ++i) EXPECT_EQ(b.memory[i], 0xff) << "wrote before its section";
  }
}

// A decode loop spreads the work on a page over its steps; nothing of that may show.
TYPED_TEST(CodecContract, PartsInAnyDivisionGiveTheSameBytes) {
  constexpr std::size_t kDim = 96, kPage = 48;
  for (const Side side : sides<TypeParam>()) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{17}, std::size_t{37}, kPage}) {
      const auto rows = test::gaussian_rows(11, count, kDim);
      const test::CodedSide<TypeParam> whole(side, rows, kDim, kPage);
      for (const std::size_t step : {1u, 2u, 5u, 16u, 40u}) {
        test::CodedSide<TypeParam> parts(side, test::gaussian_rows(12, count, kDim), kDim,
                                         kPage);  // other bytes before
        CodedTarget target = parts.target();
        std::vector<std::uint8_t> scratch(TypeParam::scratch_bytes(kPage, kDim), 0x55);
        const std::size_t all = TypeParam::parts(side, kPage);
        for (std::size_t begin = 0; begin < all; begin += step) {
          const std::size_t skipped = TypeParam::by_token(side) ? std::min(begin, count) * kDim : 0;
          TypeParam::template encode_parts<test::Kernels>(side, rows.data() + skipped, count, begin,
                                                          std::min(begin + step, all), {}, target, scratch.data());
        }
        EXPECT_EQ(whole.memory, parts.memory) << "count " << count << " step " << step;
        for (std::size_t t = 0; t < kPage; ++t) {
          ASSERT_EQ(whole.scales[t].bits, parts.scales[t].bits) << "token " << t << " step " << step;
          ASSERT_EQ(whole.zero_points[t].bits, parts.zero_points[t].bits);
        }
      }
    }
  }
}

// Rows of a page do not influence each other, except through a trellis that runs along tokens.
TYPED_TEST(CodecContract, ZeroRowsDecodeToZero) {
  for (const Side side : sides<TypeParam>()) {
    auto rows = test::gaussian_rows(8, 16, 128);
    std::fill_n(rows.begin() + 5 * 128, 128, 0.0f);
    std::fill_n(rows.begin() + 6 * 128, 128, -0.0f);
    const test::CodedSide<TypeParam> coded(side, rows, 128, 16);
    for (const std::size_t t : {5u, 6u}) {
      for (const float y : coded.decode(t)) EXPECT_EQ(y, 0.0f);
    }
    EXPECT_LT(test::relative_error(rows.data() + 7 * 128, coded.decode(7)), loose_bound<TypeParam>());
  }
}

// Powers of two change scales only.
TYPED_TEST(CodecContract, PowersOfTwoCommute) {
  for (const Side side : sides<TypeParam>()) {
    const auto rows = test::gaussian_rows(9, 16, 64);
    const test::CodedSide<TypeParam> reference(side, rows, 64, 16);
    for (const int e : {-100, -7, 1, 60, 115}) {
      auto scaled = rows;
      for (float& x : scaled) x = std::ldexp(x, e);
      const test::CodedSide<TypeParam> coded(side, scaled, 64, 16);
      EXPECT_EQ(coded.memory, reference.memory) << "exponent " << e;
      for (std::size_t t = 0; t < 16; ++t) {
        EXPECT_EQ(to_float(coded.scales[t]), std::ldexp(to_float(reference.scales[t]), e)) << "exponent " << e;
      }
    }
  }
}

// Keys: the score is the integer formula of the kernel contract, evaluated here in double on decoded levels.
TYPED_TEST(CodecContract, ScoresByTheFormula) {
  if constexpr (KeyCodec<TypeParam>) {
    for (const std::size_t dim : kDims) {
      const auto rows = test::gaussian_rows(dim + 1, 48, dim);
      const test::CodedSide<TypeParam> coded(Side::key, rows, dim, 48);
      const auto queries = test::gaussian_rows(dim + 2, 11, dim);
      constexpr std::size_t kQueries = 11;
      std::vector<float> normal(kQueries * dim), rotated(kQueries * dim), step(kQueries), unit(kQueries),
          factor(kQueries, 0.25f);
      std::vector<std::int8_t> planes(kQueries * dim * TypeParam::query_planes);
      std::vector<std::int32_t> sums(kQueries * TypeParam::query_planes);
      kernels::QueryBlock block;
      block.rows = kQueries;
      block.dim = dim;
      block.normal = normal.data();
      block.rotated = rotated.data();
      block.planes = planes.data();
      block.plane_count = TypeParam::query_planes;
      block.step = step.data();
      block.unit = unit.data();
      block.sums = sums.data();
      const Rotation rotation(42, dim);
      const std::size_t order = base_order(dim);
      const kernels::RotationView view{dim, rotation.signs(), base_matrix(order), order};
      std::copy(queries.begin(), queries.end(), normal.begin());
      test::Kernels::prepare_queries(view, block);
      std::vector<float> logits(kQueries * 48, NAN);
      test::Kernels::score(coded.part(), TypeParam::codes(), 1, 3, block, 0, kQueries, factor.data(), logits.data(),
                           48);
      for (std::size_t t = 16; t < 48; ++t) {
        const auto y = coded.decode(t);
        for (std::size_t r = 0; r < kQueries; ++r) {
          double sum = 0;
          for (std::size_t i = 0; i < dim; ++i) {
            const std::int8_t* p = planes.data() + r * TypeParam::query_planes * dim;
            const double q = TypeParam::query_planes == 1 ? p[i] : p[i] * 128.0 + p[dim + i];
            sum += q * static_cast<double>(y[i]);
          }
          const double expected = static_cast<double>(step[r]) * sum * 0.25;
          // Four float roundings of the result, and those of the decoded row.
          const double magnitude = static_cast<double>(step[r]) * 0.25 * 127 * std::sqrt(static_cast<double>(dim)) * 4;
          EXPECT_NEAR(logits[r * 48 + t], expected, 1e-6 * magnitude * std::sqrt(static_cast<double>(dim)))
              << TypeParam::name << " dim " << dim;
        }
      }
      for (std::size_t r = 0; r < kQueries; ++r) {
        for (std::size_t t = 0; t < 16; ++t) EXPECT_TRUE(std::isnan(logits[r * 48 + t])) << "wrote beyond its tiles";
      }
    }
  }
}

// Values: the same for accumulation, several rows, one of them without weight.
TYPED_TEST(CodecContract, AccumulatesByTheFormula) {
  for (const std::size_t dim : kDims) {
    const auto rows = test::gaussian_rows(dim + 3, 40, dim);
    const test::CodedSide<TypeParam> coded(Side::value, rows, dim, 48);
    const kernels::CodedPart part = coded.part();
    constexpr std::size_t kRows = 10;
    std::vector<std::int16_t> weights(kRows * 48);
    std::vector<kernels::WeightSums> sums(kRows);
    std::vector<float> p(48), out(kRows * dim, 1.0f);
    for (std::size_t r = 0; r < kRows; ++r) {
      for (std::size_t t = 0; t < 48; ++t) {
        p[t] = t < 16 || t >= 40 || r == 4 ? 0.0f : static_cast<float>(std::exp(-std::abs(oracle::gaussian(r, 5, t))));
      }
      test::Kernels::weigh({&part, 1}, p.data(), 16, 48, weights.data() + r * 48, &sums[r], 1);
    }
    test::Kernels::accumulate({&part, 1}, TypeParam::codes(), 16, 48, kRows, weights.data(), 48, sums.data(), kRows,
                              out.data(), dim);
    std::vector<std::vector<float>> decoded;
    for (std::size_t t = 0; t < 40; ++t) decoded.push_back(coded.decode(t));
    for (std::size_t r = 0; r < kRows; ++r) {
      for (std::size_t i = 0; i < dim; i += 7) {
        double expected = 1, magnitude = 1;
        for (std::size_t t = 16; t < 40; ++t) {
          const double scale = to_float(coded.scales[t]);
          const double zero = TypeParam::zero_points ? static_cast<double>(to_float(coded.zero_points[t])) : 0.0;
          const double level = scale > 0 ? (static_cast<double>(decoded[t][i]) - zero) / scale : 0;
          const double term = static_cast<double>(sums[r].coefficient) * weights[r * 48 + t] * level;
          expected += term;
          magnitude += std::abs(term);
        }
        expected += static_cast<double>(sums[r].zero_point);
        EXPECT_NEAR(out[r * dim + i], expected, 1e-5 * magnitude) << TypeParam::name << " dim " << dim << " row " << r;
      }
    }
    for (std::size_t i = 0; i < dim; ++i) EXPECT_EQ(out[4 * dim + i], 1.0f) << "a row without weight was touched";
  }
}

}  // namespace
