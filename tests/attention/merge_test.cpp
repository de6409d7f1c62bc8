// merge_partials and finish_partials: attention over parts joins to attention over the whole.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "cache/block.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Partial {
  Block out;
  std::vector<float> lse;
};

Partial random_partial(std::uint64_t seed, double lse_spread = 2) {
  Partial partial{gaussian_block(seed, 3, 5, 48), std::vector<float>(15)};
  for (std::size_t i = 0; i < 15; ++i) partial.lse[i] = static_cast<float>(lse_spread * oracle::gaussian(seed, 999, i));
  return partial;
}
Partial empty_partial() { return {Block(3, 5, 48), std::vector<float>(15, kMinusInfinity)}; }

Partial merged(Partial a, const Partial& b) {
  turboquant::merge_partials(a.out.rows(), a.lse.data(), b.out.rows(), b.lse.data());
  return a;
}

void expect_near(const Partial& a, const Partial& b, double tolerance) {
  for (std::size_t i = 0; i < a.out.numbers.size(); ++i)
    ASSERT_NEAR(static_cast<double>(a.out.numbers[i]), static_cast<double>(b.out.numbers[i]), tolerance) << i;
  for (std::size_t i = 0; i < a.lse.size(); ++i)
    ASSERT_NEAR(static_cast<double>(a.lse[i]), static_cast<double>(b.lse[i]),
                tolerance * (1 + std::fabs(static_cast<double>(b.lse[i]))))
        << i;
}

TEST(Merge, IsTheWeightedMean) {
  for (const double spread : {0.1, 2.0, 30.0, 2000.0}) {
    const Partial a = random_partial(1, spread), b = random_partial(2, spread);
    oracle::Tensor out = a.out.exact();
    std::vector<double> lse(a.lse.begin(), a.lse.end());
    oracle::merge(out, lse, b.out.exact(), std::vector<double>(b.lse.begin(), b.lse.end()));
    const Partial found = merged(a, b);
    // fp32: a few 2^-24 of outputs up to 5; the weights' exponents are exact differences or beyond exp's range.
    for (std::size_t i = 0; i < out.numbers.size(); ++i)
      ASSERT_NEAR(static_cast<double>(found.out.numbers[i]), out.numbers[i], 4e-6);
    for (std::size_t i = 0; i < 15; ++i)
      ASSERT_NEAR(static_cast<double>(found.lse[i]), lse[i], 1e-6 * (1 + std::fabs(lse[i])));
  }
}

TEST(Merge, AssociativeAndCommutativeUpToRounding) {
  const Partial a = random_partial(1), b = random_partial(2), c = random_partial(3);
  expect_near(merged(merged(a, b), c), merged(a, merged(b, c)), 4e-6);
  expect_near(merged(a, b), merged(b, a), 4e-6);
}

TEST(Merge, AnEmptyPartChangesNoBit) {
  const Partial a = random_partial(1);
  const Partial left = merged(a, empty_partial()), right = merged(empty_partial(), a),
                none = merged(empty_partial(), empty_partial());
  EXPECT_TRUE(same_bits(left.out, a.out) && same_bits(left.lse, a.lse));
  EXPECT_TRUE(same_bits(right.out, a.out) && same_bits(right.lse, a.lse));
  for (const float x : none.out.numbers) EXPECT_EQ(x, 0.0F);
  for (const float x : none.lse) EXPECT_EQ(x, kMinusInfinity);
}

TEST(Merge, AnswersInTheTypeOfTheOutput) {
  const Partial a = random_partial(1), b = random_partial(2);
  const Partial wanted = merged(a, b);
  std::vector<turboquant::half> halves(a.out.numbers.size());
  std::vector<turboquant::half> others(halves.size());
  for (std::size_t i = 0; i < halves.size(); ++i) {
    halves[i].bits = oracle::half_bits(static_cast<double>(a.out.numbers[i]));
    others[i].bits = oracle::half_bits(static_cast<double>(b.out.numbers[i]));
  }
  std::vector<float> lse = a.lse;
  turboquant::merge_partials(turboquant::Rows(halves.data(), 3, 5, 48), lse.data(),
                             turboquant::ConstRows(others.data(), 3, 5, 48), b.lse.data());
  EXPECT_TRUE(same_bits(lse, wanted.lse));
  // Two inputs and one result rounded to 11 bits.
  for (std::size_t i = 0; i < halves.size(); ++i)
    ASSERT_NEAR(oracle::value_of_half(halves[i].bits), static_cast<double>(wanted.out.numbers[i]), 3 * 0x1p-11 * 5);
}

TEST(Merge, FinishAddsTheSinks) {
  const std::array<float, 5> sinks{1.0F, -3.0F, 100.0F, 0.0F, -100.0F};
  const Partial a = random_partial(1);
  oracle::Tensor out = a.out.exact();
  std::vector<double> lse(a.lse.begin(), a.lse.end());
  oracle::add_sinks(out, lse, std::vector<double>(sinks.begin(), sinks.end()));
  Partial found = a;
  turboquant::finish_partials(found.out.rows(), found.lse.data(), sinks);
  for (std::size_t i = 0; i < out.numbers.size(); ++i)
    ASSERT_NEAR(static_cast<double>(found.out.numbers[i]), out.numbers[i], 4e-6);
  for (std::size_t i = 0; i < 15; ++i)
    ASSERT_NEAR(static_cast<double>(found.lse[i]), lse[i], 1e-6 * (1 + std::fabs(lse[i])));

  Partial empty = empty_partial();
  turboquant::finish_partials(empty.out.rows(), empty.lse.data(), sinks);
  for (const float x : empty.out.numbers) EXPECT_EQ(x, 0.0F);
  for (std::size_t i = 0; i < 15; ++i) EXPECT_EQ(empty.lse[i], sinks[i % 5]);
}

TEST(Merge, SplitAttentionEqualsTheWhole) {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 64}};
  config.page_tokens = 16;
  config.recent_tokens = 32;
  const std::array<float, 4> sinks{1.0F, -3.0F, 4.0F, 0.0F};
  for (const bool coded : {false, true}) {
    config.recent_tokens = coded ? 0 : 1000;
    KVCache<turboquant::TQ4> cache(config);
    const SequenceId id = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 200, 1, 64), gaussian_block(2, 200, 1, 64)));
    const Block queries = gaussian_block(3, 2, 4, 64);
    CallOptions options;
    options.params.sink_logits = sinks;
    options.with_lse = false;
    const Outcome whole = attend_only(cache, 0, id, queries, options);
    ASSERT_OK(whole.status);
    options.with_lse = true;
    for (const std::size_t parts : {1U, 2U, 3U, 7U, 64U, 300U}) {
      Block out(2, 4, 64);
      std::vector<float> lse(8, kMinusInfinity);
      for (std::size_t part = 0; part < parts; ++part) {
        options.key_begin = 200 * part / parts;
        options.key_end = 200 * (part + 1) / parts;
        const Outcome piece = attend_only(cache, 0, id, queries, options);
        ASSERT_OK(piece.status);
        turboquant::merge_partials(out.rows(), lse.data(), piece.out.rows(), piece.lse.data());
      }
      turboquant::finish_partials(out.rows(), lse.data(), sinks);
      // Raw: fp32 rounding of at most 300 merges. Coded: 14-bit weights relative to another maximum, 16 keys of norm 8
      // in each of 13 pages whose largest weight is below 0.2.
      for (std::size_t i = 0; i < out.numbers.size(); ++i)
        ASSERT_NEAR(static_cast<double>(out.numbers[i]), static_cast<double>(whole.out.numbers[i]), coded ? 2e-4 : 4e-6)
            << parts;
    }
  }
}

}  // namespace
