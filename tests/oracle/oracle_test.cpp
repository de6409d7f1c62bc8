// The oracle checked against hand-computed numbers and against its own redundancies, without the library.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "oracle/attention.hpp"
#include "oracle/random.hpp"
#include "oracle/rounding.hpp"

namespace {

using oracle::Options;
using oracle::Tensor;

Tensor gaussian_tensor(std::uint64_t seed, std::size_t tokens, std::size_t heads, std::size_t dim) {
  Tensor tensor(tokens, heads, dim);
  for (std::size_t i = 0; i < tensor.numbers.size(); ++i) tensor.numbers[i] = oracle::gaussian(seed, 0, i);
  return tensor;
}

TEST(OracleRandom, HasTheMomentsOfTheNormalDistribution) {
  constexpr int kCount = 200000;
  double sum = 0, squares = 0, fourth = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const double x = oracle::gaussian(1, 2, i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  // Five standard errors: 1, sqrt(2) and sqrt(96) over the root of the count.
  EXPECT_NEAR(sum / kCount, 0, 0.0112);
  EXPECT_NEAR(squares / kCount, 1, 0.0158);
  EXPECT_NEAR(fourth / kCount, 3, 0.11);
}

TEST(OracleRandom, IsPinned) {
  EXPECT_EQ(oracle::hash(1, 2, 3), 0x6ae515c1c0ac7e37U);
  EXPECT_EQ(oracle::gaussian(1, 2, 3), -851687 * 0x1p-20);
}

TEST(OracleRounding, AgreesWithTheBitsOfAFloat) {
  for (std::uint64_t i = 0; i < 100000; ++i) {
    auto bits = static_cast<std::uint32_t>(oracle::hash(7, 7, i));
    if (i % 4 == 0) bits = (bits & 0xffff0000U) | 0x8000U;  // ties
    if (i % 8 == 0) bits &= 0x80ffffffU;                    // small and subnormal
    float x = 0;
    std::memcpy(&x, &bits, 4);
    if (std::isnan(x)) continue;
    const std::uint32_t kept = bits >> 16, rest = bits & 0xffffU;
    const bool up = rest > 0x8000U || (rest == 0x8000U && (kept & 1U) != 0);
    EXPECT_EQ(oracle::bfloat16_bits(x), static_cast<std::uint16_t>(kept + (up ? 1 : 0))) << std::hex << bits;
  }
}

TEST(OracleRounding, EveryHalfAndBfloat16SurvivesARoundTrip) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto b = static_cast<std::uint16_t>(bits);
    const double half = oracle::value_of_half(b), brain = oracle::value_of_bfloat16(b);
    EXPECT_TRUE(std::isnan(half) || oracle::half_bits(half) == b) << bits;
    EXPECT_TRUE(std::isnan(brain) || oracle::bfloat16_bits(brain) == b) << bits;
  }
  EXPECT_EQ(oracle::half_bits(65504), 0x7bff);
  EXPECT_EQ(oracle::half_bits(65519.99), 0x7bff);
  EXPECT_EQ(oracle::half_bits(65520), 0x7c00);
  EXPECT_EQ(oracle::half_bits(0x1p-24), 1);
  EXPECT_EQ(oracle::half_bits(0x1p-25), 0);
  EXPECT_EQ(oracle::half_bits(0x1.8p-25), 1);
  EXPECT_EQ(oracle::half_bits(1 + 0x1p-11), 0x3c00);
  EXPECT_EQ(oracle::half_bits(1 + 0x1.8p-10), 0x3c02);
  EXPECT_EQ(oracle::value_of_bfloat16(0x3f80), 1.0);
}

TEST(OracleAttention, TwoKeysByHand) {
  Tensor keys(2, 1, 1), values(2, 1, 1), query(1, 1, 1);
  keys.numbers = {0.0, 1.0};
  values.numbers = {10.0, 20.0};
  query.numbers = {std::log(3.0)};
  std::vector<double> lse;
  Tensor out = oracle::attend(keys, values, query, 1, {}, &lse);
  EXPECT_NEAR(out.numbers[0], (10 + 3 * 20) / 4.0, 1e-12);
  EXPECT_NEAR(lse[0], std::log(4.0), 1e-12);

  Options options;
  options.sink_logits = {std::log(4.0)};
  out = oracle::attend(keys, values, query, 1, options, &lse);
  EXPECT_NEAR(out.numbers[0], (10 + 3 * 20) / 8.0, 1e-12);
  EXPECT_NEAR(lse[0], std::log(8.0), 1e-12);

  options = {};
  options.alibi_slopes = {std::log(3.0)};  // key 0 is one position back: exp(0 - log 3) = 1/3 against 3
  out = oracle::attend(keys, values, query, 1, options);
  EXPECT_NEAR(out.numbers[0], (10 / 3.0 + 3 * 20) / (1 / 3.0 + 3), 1e-12);

  options = {};
  options.softcap = 1;
  options.scale = 5;
  out = oracle::attend(keys, values, query, 1, options, &lse);
  EXPECT_NEAR(lse[0], std::log(1 + std::exp(std::tanh(5 * std::log(3.0)))), 1e-12);

  EXPECT_EQ(oracle::attend(keys, values, query, 0, {}).numbers[0], 10.0);  // causal: key 1 is in the future
  options = {};
  options.window = 1;
  EXPECT_EQ(oracle::attend(keys, values, query, 1, options).numbers[0], 20.0);
  options = {};
  options.key_end = 0;
  out = oracle::attend(keys, values, query, 1, options, &lse);
  EXPECT_EQ(out.numbers[0], 0.0);
  EXPECT_EQ(lse[0], oracle::kMinusInfinity);
}

TEST(OracleAttention, PartsMergeToTheWhole) {
  const Tensor keys = gaussian_tensor(1, 37, 2, 8), values = gaussian_tensor(2, 37, 2, 5),
               queries = gaussian_tensor(3, 4, 6, 8);
  Options options;
  options.alibi_slopes = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6};
  options.softcap = 3;
  options.window = 30;
  std::vector<double> lse, part_lse;
  Options with_sinks = options;
  with_sinks.sink_logits = {1, 2, 3, -1, -2, -3};
  const Tensor whole = oracle::attend(keys, values, queries, 33, with_sinks, &lse);
  for (std::size_t parts : {1U, 2U, 5U, 50U}) {
    Tensor out(4, 6, 5);
    std::vector<double> out_lse(24, oracle::kMinusInfinity);
    for (std::size_t part = 0; part < parts; ++part) {
      options.key_begin = 37 * part / parts;
      options.key_end = 37 * (part + 1) / parts;
      const Tensor piece = oracle::attend(keys, values, queries, 33, options, &part_lse);
      oracle::merge(out, out_lse, piece, part_lse);
    }
    oracle::add_sinks(out, out_lse, with_sinks.sink_logits);
    for (std::size_t i = 0; i < out.numbers.size(); ++i) EXPECT_NEAR(out.numbers[i], whole.numbers[i], 1e-12);
    for (std::size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(out_lse[i], lse[i], 1e-12);
  }
}

TEST(OracleAttention, CodedTokensFollowTheRule) {
  EXPECT_EQ(oracle::coded_tokens(0, 0, 64, 64), 0U);
  EXPECT_EQ(oracle::coded_tokens(127, 0, 64, 64), 0U);
  EXPECT_EQ(oracle::coded_tokens(128, 0, 64, 64), 64U);
  EXPECT_EQ(oracle::coded_tokens(191, 0, 64, 64), 64U);
  EXPECT_EQ(oracle::coded_tokens(192, 0, 64, 64), 128U);
  EXPECT_EQ(oracle::coded_tokens(3, 4, 16, 0), 3U);
  EXPECT_EQ(oracle::coded_tokens(19, 4, 16, 0), 4U);
  EXPECT_EQ(oracle::coded_tokens(20, 4, 16, 0), 20U);
}

}  // namespace
