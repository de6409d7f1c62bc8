// Numeric faults from public bug reports that concern queries, logits, weights and sums. Where a report names side
// data, files or instruction sets that this library does not have, the test takes the nearest thing that it has. Those
// that concern codes are in cases_numeric_test.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "cache/block.hpp"
#include "cache/coded_rows.hpp"
#include "cache/counting_source.hpp"
#include "cache/mirror.hpp"
#include "cache/sanitized.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::TQ3;
using turboquant::TQ4;
using turboquant::TQ8;

TEST(NumericCases, N06_N19_HugeFiniteQueriesAndBiasesGiveNoNaN) {
  for (const bool coded : {false, true})
    for (const float size : {1e30F, 3e38F, -3e38F})
      for (const float scale : {0.0F, 1e30F, -1.0F})
        for (const float softcap : {0.0F, 5.0F}) {
          CacheConfig config = coded_config(1, 32);
          if (!coded) config.recent_tokens = 1000;
          KVCache<TQ4> cache(config);
          const SequenceId id = new_sequence(cache);
          const Block keys = gaussian_block(1, 40, 1, 32, 5e27);
          Block query = gaussian_block(3, 1, 1, 32, 0.1);
          for (float& x : query.numbers) x *= size;
          ASSERT_OK(append_only(cache, 0, id, keys, gaussian_block(2, 40, 1, 32)));
          if (coded) ASSERT_OK(cache.seal(id));
          CallOptions options;
          options.params.scale = scale;
          options.params.softcap = softcap;
          const Outcome outcome = attend_only(cache, 0, id, query, options);
          ASSERT_OK(outcome.status);
          EXPECT_TRUE(all_finite(outcome.out)) << coded << ' ' << size << ' ' << scale << ' ' << softcap;
          EXPECT_FALSE(std::isnan(outcome.lse[0]));
          // A bias that overflows for all keys but the nearest leaves that one.
          const std::array<float, 1> slope{1e38F};
          options = {};
          options.params.alibi_slopes = slope;
          const Outcome biased = attend_only(cache, 0, id, gaussian_block(4, 1, 1, 32, 2e-29), options);
          Block last_keys, last_values;
          ASSERT_OK(read_rows(cache, id, 0, 39, 40, last_keys, last_values));
          EXPECT_LE(distance_of(biased.out.row(0), last_values.row(0), 32), 1e-3 * norm_of(last_values.row(0), 32));
        }
}

TEST(NumericCases, N07_N08_NonFiniteInput) {
  for (const float bad : {kNaN, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()})
    for (const bool in_keys : {true, false}) {
      KVCache<TQ4> cache(coded_config(1, 128));
      const SequenceId id = new_sequence(cache), other = new_sequence(cache);
      const Block keys = gaussian_block(1, 20, 1, 128), values = gaussian_block(2, 20, 1, 128);
      Block bad_block = in_keys ? keys : values;
      bad_block.row(5)[2] = bad;
      ASSERT_OK(append_only(cache, 0, id, keys.slice(0, 3), values.slice(0, 3)));
      EXPECT_STATUS(non_finite_input, append_only(cache, 0, id, in_keys ? bad_block.slice(3, 20) : keys.slice(3, 20),
                                                  in_keys ? values.slice(3, 20) : bad_block.slice(3, 20)));
      EXPECT_EQ(cache.length(id), 3U);
      // The neighbours are as if it had never come.
      ASSERT_OK(append_only(cache, 0, id, keys.slice(3, 20), values.slice(3, 20)));
      ASSERT_OK(append_only(cache, 0, other, keys, values));
      Block a_keys, a_values, b_keys, b_values;
      ASSERT_OK(read_rows(cache, id, 0, 0, 20, a_keys, a_values));
      ASSERT_OK(read_rows(cache, other, 0, 0, 20, b_keys, b_values));
      EXPECT_TRUE(same_bits(a_keys, b_keys) && same_bits(a_values, b_values));
    }
  CacheConfig absurd = coded_config(1, (std::size_t{1} << 30) + 1);
  EXPECT_NE(turboquant::why_invalid(absurd, 1), "");
}

TEST(NumericCases, N10_ValuesWithALargeCommonPart) {
  Block values = gaussian_block(2, 4096, 1, 64);
  for (std::size_t t = 0; t < 4096; ++t)
    for (std::size_t i = 0; i < 64; ++i) values.row(t)[i] += static_cast<float>(100 * oracle::gaussian(9, 9, i));
  CodedRows<TQ4> rows(coded_config(1, 64, 0, 8, 64), gaussian_block(1, 4096, 1, 64), values);
  const Block queries = gaussian_block(3, 3, 1, 64);
  const Outcome outcome = rows.attend(queries);
  oracle::Options options;
  options.causal = false;
  const oracle::Tensor truth =
      oracle::attend(rows.decoded_keys.exact(), rows.decoded_values.exact(), queries.exact(), 0, options);
  for (std::size_t q = 0; q < 3; ++q)
    EXPECT_LE(oracle::distance(outcome.out.exact().row(q, 0), truth.row(q, 0), 64),
              1e-5 * oracle::norm(truth.row(q, 0), 64));
}

template <class F>
void n16(unsigned bits) {
  constexpr std::size_t kTokens = 1024, kDim = 64;
  Block keys = gaussian_block(1, kTokens, 1, kDim), values(kTokens, 1, kDim), query(1, 1, kDim);
  std::vector<double> direction(kDim);
  double size = 0;
  for (std::size_t i = 0; i < kDim; ++i) size += std::pow(direction[i] = oracle::gaussian(5, 5, i), 2);
  for (std::size_t i = 0; i < kDim; ++i) {
    keys.row(0)[i] = static_cast<float>(50 * direction[i] / std::sqrt(size));
    query.row(0)[i] = static_cast<float>(1.85 * direction[i] / std::sqrt(size) + 0.3 * oracle::gaussian(6, 6, i));
  }
  values.row(0)[0] = 1;  // the output's first coordinate is the weight of token 0
  const oracle::Tensor exact_keys = keys.bfloat16_rounded(), exact_values = values.bfloat16_rounded();
  const double truth = oracle::attend(exact_keys, exact_values, query.exact(), kTokens - 1, {}).numbers[0];
  ASSERT_GT(truth, 0.8);
  ASSERT_LT(truth, 0.97);
  for (const std::size_t first_tokens : {0U, 4U}) {
    CacheConfig config = coded_config(1, kDim, 0, 8, 64);
    config.first_tokens = first_tokens;
    KVCache<F> cache(config);
    const SequenceId id = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, id, keys, values));
    const Outcome outcome = attend_only(cache, 0, id, query);
    ASSERT_OK(outcome.status);
    std::vector<float> logits(kTokens);
    ASSERT_OK(turboquant::logits(cache, id, 0, query.rows(), logits.data()));
    const double exact_logit = oracle::dot(query.exact().row(0, 0), exact_keys.row(0, 0), kDim);
    const double query_norm = norm_of(query.row(0), kDim);
    if (first_tokens == 0) {
      // The last few tokens of 1,024 in pages of 64 are all coded; so is token 0.
      EXPECT_LE(std::fabs(static_cast<double>(logits[0]) - exact_logit), 1.1 * six_sigma(bits, kDim) * query_norm * 50);
      continue;
    }
    EXPECT_NEAR(static_cast<double>(logits[0]), exact_logit, 1e-4);
    // The other logits are off by sigma = |q||k| sqrt(D / d) / 8, which raises the mean of their exponentials by half
    // its square, 1e-3 of them at most; they are a tenth of the sum.
    EXPECT_NEAR(static_cast<double>(outcome.out.numbers[0]), truth, 1e-3) << bits;
    SequenceId child;
    ASSERT_OK(cache.fork(id, kTokens, child));
    EXPECT_TRUE(same_bits(attend_only(cache, 0, child, query), outcome));
    ASSERT_OK(cache.truncate(child, 2));
    Block left_keys, left_values;
    ASSERT_OK(read_rows(cache, child, 0, 0, 2, left_keys, left_values));
    EXPECT_EQ(left_keys.exact().numbers, keys.slice(0, 2).bfloat16_rounded().numbers);
  }
}
TEST(NumericCases, N16_SinksKeptExactTq4) { n16<TQ4>(4); }
TEST(NumericCases, N16_SinksKeptExactTq8) { n16<TQ8>(8); }

TEST(NumericCases, N19_ExtremeLogits) {
  const std::array<double, 8> wanted{2000, 1999, 0, -2000, 89, 88, 88.73, -104};
  Block keys(8, 1, 32), values(8, 1, 32);
  for (std::size_t t = 0; t < 8; ++t) {
    double rest = wanted[t];  // a sum of bfloat16 numbers
    for (std::size_t i = 0; i < 4; ++i) {
      keys.row(t)[i] = static_cast<float>(oracle::round_bfloat16(rest));
      rest -= static_cast<double>(keys.row(t)[i]);
    }
    values.row(t)[t] = 1;  // the output shows the weights
  }
  Block query(1, 1, 32);
  for (std::size_t i = 0; i < 4; ++i) query.row(0)[i] = 1;
  KVCache<TQ4> cache(CacheConfig{.layers = {LayerShape{.kv_heads = 1, .head_dim = 32}}});
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, keys, values));
  CallOptions options;
  options.params.scale = 1;
  const Outcome outcome = attend_only(cache, 0, id, query, options);
  ASSERT_OK(outcome.status);
  // fp32 logits near 2000: 1.2e-4 each.
  EXPECT_NEAR(outcome.out.numbers[0], 0.7310586F, 1e-4F);
  EXPECT_NEAR(outcome.out.numbers[1], 0.2689414F, 1e-4F);
  for (std::size_t t = 2; t < 8; ++t) EXPECT_EQ(outcome.out.numbers[t], 0.0F);
  EXPECT_NEAR(outcome.out.numbers[0] + outcome.out.numbers[1], 1, 1e-6F);
  EXPECT_NEAR(outcome.lse[0], 2000.3133F, 1e-3F);
}

TEST(NumericCases, N19_EqualLogitsAtTheEndOfTheRange) {
  for (const bool coded : {false, true})
    for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}})
      for (const float sign : {1.0F, -1.0F}) {
        CacheConfig config = coded_config(1, 32, 0, center_bits);
        if (!coded) config.recent_tokens = 100;
        Block keys(16, 1, 32), values(16, 1, 32), query(1, 1, 32);
        for (std::size_t t = 0; t < 16; ++t) {
          keys.row(t)[0] = sign * 0x1p95F;
          values.row(t)[t] = 1;
        }
        query.row(0)[0] = 450 * 0x1p24F;  // 450 * 2^119 = 2.99e38
        KVCache<TQ8> cache(config);
        const SequenceId id = new_sequence(cache);
        ASSERT_OK(append_only(cache, 0, id, keys, values));
        CallOptions options;
        options.params.scale = 1;
        const Outcome outcome = attend_only(cache, 0, id, query, options);
        ASSERT_OK(outcome.status);
        // 8-bit values: a hundredth of the largest coordinate at most.
        for (std::size_t t = 0; t < 16; ++t)
          EXPECT_NEAR(outcome.out.numbers[t], 0.0625F, coded ? 2e-3F : 1e-6F) << coded << sign << int{center_bits};
        EXPECT_NEAR(outcome.lse[0] / (sign * 450 * 0x1p119F), 1, 0.02F);
      }
}

TEST(NumericCases, N20_LongContexts) {
  // 65,536 tokens of equal weight (an eighth under sanitizers); token strides of zero stand for rows that are all the
  // same.
  constexpr std::size_t kTokens = kSanitized ? std::size_t{1} << 13 : std::size_t{1} << 16;
  CacheConfig config = coded_config(1, 64, 0, 8, 64);
  const std::vector<float> zero(64, 0.0F), large(64, 60000.0F);
  const auto append = [](auto& cache, SequenceId id, std::size_t tokens, const float* key, const float* value) {
    BatchItem item;
    item.sequence = id;
    item.keys = turboquant::ConstRows(key, tokens, 1, cache.config().layers[0].head_dim);
    item.values = turboquant::ConstRows(value, tokens, 1, cache.config().layers[0].head_dim);
    item.keys.token_stride = item.values.token_stride = 0;
    return turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1));
  };
  {
    KVCache<TQ4> cache(config);
    const SequenceId id = new_sequence(cache);
    ASSERT_OK(append(cache, id, kTokens, zero.data(), large.data()));
    const Outcome outcome = attend_only(cache, 0, id, gaussian_block(1, 1, 1, 64));
    ASSERT_OK(outcome.status);
    Block keys, values;
    ASSERT_OK(read_rows(cache, id, 0, 0, 1, keys, values));
    const double size = norm_of(large.data(), 64);
    EXPECT_LE(distance_of(outcome.out.row(0), values.row(0), 64), 1e-5 * size);
    EXPECT_LE(distance_of(outcome.out.row(0), large.data(), 64), 0.0114 * std::sqrt(3 * distortion_bound(4)) * size);
    EXPECT_NEAR(outcome.lse[0], std::log(static_cast<float>(kTokens)), 1e-5F);
  }
  {  // Alternating signs cancel: codes are symmetric. (A constant row would have rotated coordinates of exactly zero.)
    KVCache<TQ4> cache(config);
    const SequenceId id = new_sequence(cache);
    const Block direction = gaussian_block(7, 1, 1, 64, 60000);
    Block keys(1024, 1, 64), values(1024, 1, 64);
    for (std::size_t i = 0; i < values.numbers.size(); ++i)
      values.numbers[i] = i / 64 % 2 == 0 ? direction.numbers[i % 64] : -direction.numbers[i % 64];
    for (std::size_t n = 0; n < kTokens; n += 1024) ASSERT_OK(append_only(cache, 0, id, keys, values));
    const Outcome outcome = attend_only(cache, 0, id, gaussian_block(1, 1, 1, 64));
    ASSERT_OK(outcome.status);
    for (const float x : outcome.out.numbers) EXPECT_LE(std::fabs(x), 60000 * 0x1p-11F);
  }
  {  // 2^20 tokens (2^17), the last of them alone with a value; plain levels, which are quick to write
    config = coded_config(1, 32, 0, 8, 64);
    config.recent_tokens = 1;
    KVCache<turboquant::Format<turboquant::PolarQuant<2>, turboquant::PolarQuant<2>>> cache(config);
    const SequenceId id = new_sequence(cache);
    const std::size_t most = 16 * kTokens - 1;
    ASSERT_OK(append(cache, id, most, zero.data(), zero.data()));
    std::vector<float> last(32, 0.0F);
    last[0] = 16 * static_cast<float>(kTokens);
    ASSERT_OK(append(cache, id, 1, zero.data(), last.data()));
    EXPECT_EQ(cache.length(id), most + 1);
    const Outcome outcome = attend_only(cache, 0, id, gaussian_block(1, 1, 1, 32));
    ASSERT_OK(outcome.status);
    EXPECT_NEAR(outcome.lse[0], std::log(16 * static_cast<float>(kTokens)), 1e-5F);
    EXPECT_NEAR(outcome.out.numbers[0], 1, 1e-4F);
  }
}

TEST(NumericCases, N21_PaddedSlotsTakeNoPart) {
  for (const std::size_t page : {16U, 64U})
    for (const std::size_t recent : {0U, 1000U})
      for (const std::size_t n : {1U, 15U, 16U, 17U, 31U, 32U, 33U, 63U, 64U, 65U, 127U, 128U, 129U, 200U})
        for (const float softcap : {0.0F, 2.0F})
          for (const bool sealed : {false, true})
            for (const bool causal : {true, false}) {
              CacheConfig config = coded_config(1, 32, 0, 8, page);
              config.recent_tokens = recent;
              KVCache<TQ4> cache(config);
              const SequenceId id = new_sequence(cache);
              ASSERT_OK(append_only(cache, 0, id, Block(n, 1, 32), Block(n, 1, 32, 1.0F)));
              if (sealed) ASSERT_OK(cache.seal(id));
              CallOptions options;
              options.params.softcap = softcap;
              options.params.causal = causal;
              const Outcome outcome = attend_only(cache, 0, id, gaussian_block(1, 1, 1, 32), options);
              ASSERT_OK(outcome.status);
              // Each row is read as 1 within what codes in a centred page of equal rows cost.
              const bool raw = recent != 0 && !sealed;
              for (const float x : outcome.out.numbers) ASSERT_NEAR(x, 1, raw ? 1e-6F : 0.02F) << n;
              ASSERT_NEAR(outcome.lse[0], std::log(static_cast<double>(n)),
                          1e-6 * (1 + std::log(static_cast<double>(n))))
                  << n << " page " << page;
            }
}

TEST(NumericCases, N22_EmptyPartial) {
  KVCache<TQ4> cache(CacheConfig{.layers = {LayerShape{.kv_heads = 1, .head_dim = 32}}});
  const SequenceId empty = new_sequence(cache), id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 3, 1, 32), gaussian_block(2, 3, 1, 32)));
  const Block query = gaussian_block(3, 1, 2, 32);
  CallOptions options;
  options.position = 2;
  const Outcome nothing = attend_only(cache, 0, empty, query, options);  // outputs were NaN before
  const Outcome three = attend_only(cache, 0, id, query);
  ASSERT_OK(nothing.status);
  for (const float x : nothing.out.numbers) EXPECT_EQ(x, 0.0F);
  for (const float x : nothing.lse) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
  Outcome merged = nothing;
  turboquant::merge_partials(merged.out.rows(), merged.lse.data(), three.out.rows(), three.lse.data());
  EXPECT_TRUE(same_bits(merged, three));
  merged = three;
  turboquant::merge_partials(merged.out.rows(), merged.lse.data(), nothing.out.rows(), nothing.lse.data());
  EXPECT_TRUE(same_bits(merged, three));
}

TEST(NumericCases, N23_UnwrittenMemoryReachesNoResult) {
  std::vector<Outcome> outcomes;
  for (const int fill : {0x00, 0xff, 0x7f}) {
    CountingSource memory(static_cast<unsigned char>(fill));
    CacheConfig config = coded_config(2, 64, 0, 8, 64);
    config.memory = memory.source();
    Outcome all{{}, Block(), {}};
    for (const std::size_t recent : {0U, 16U}) {
      config.recent_tokens = recent;
      KVCache<TQ4, TQ4Scalar, TQ3> cache(config);
      for (const std::size_t n : {13U, 1U, 70U, 5U}) {  // each reuses what the one before gave back
        const SequenceId id = new_sequence(cache);
        append_outcome(all, attend_one(cache, 0, id, gaussian_block(1, n, 2, 64), gaussian_block(2, n, 2, 64),
                                       gaussian_block(3, n, 2, 64)));
        ASSERT_OK(cache.seal(id));
        append_outcome(all, attend_only(cache, 0, id, gaussian_block(4, 1, 2, 64)));
        SequenceId child;
        ASSERT_OK(cache.fork(id, n / 2, child));
        append_outcome(all, attend_one(cache, 0, child, gaussian_block(5, 3, 2, 64), gaussian_block(6, 3, 2, 64),
                                       gaussian_block(7, 3, 2, 64)));
        cache.release(id);
        cache.release(child);
      }
      ASSERT_OK(all.status);
    }
    EXPECT_TRUE(all_finite(all.out));
    outcomes.push_back(all);
  }
  EXPECT_TRUE(same_bits(outcomes[0], outcomes[1]));
  EXPECT_TRUE(same_bits(outcomes[0], outcomes[2]));
}

TEST(NumericCases, N25_SlopeOfEstimatedAgainstTrueLogits) {
  for (const std::size_t dim : {80U, 96U, 112U, 144U, 192U, 576U}) {
    const std::size_t pairs = (dim == 576 ? 500 : 1000) / (kSanitized ? 10 : 1);
    const Block keys = gaussian_block(1, pairs, 1, dim);
    Block queries = keys;
    for (std::size_t i = 0; i < queries.numbers.size(); ++i)
      queries.numbers[i] += static_cast<float>(0.1 * oracle::gaussian(9, 9, i));
    const CodedRows<TQ3> three(coded_config(1, dim, 0, 0, 16), keys, keys);
    const CodedRows<TQ4> four(coded_config(1, dim, 0, 0, 16), keys, keys);
    // The estimate through the kernels: page-sized pieces, so that only pairs are asked for.
    double three_sum = 0, four_sum = 0, squares = 0;
    std::vector<float> logits(pairs);
    for (std::size_t t = 0; t < pairs; t += pairs / 50) {
      const Block query = queries.slice(t, t + 1);
      const double truth = product_of(queries.row(t), keys.row(t), dim);
      squares += truth * truth;
      three_sum += truth * static_cast<double>(three.logits(query)[t]);
      four_sum += truth * static_cast<double>(four.logits(query)[t]);
    }
    EXPECT_NEAR(three_sum / squares, 1, 0.005) << dim;
    EXPECT_NEAR(four_sum / squares, 1, 0.005) << dim;
  }
}

TEST(NumericCases, N26_WideAccumulators) {
  for (const std::size_t dim : {512U, 576U, 1024U}) {
    const CacheConfig config = coded_config(1, dim, 0, 0);
    // One-hot rotates to coordinates of one size: all codes and all query bytes at their largest, signs in step.
    Block keys(16, 1, dim), query(2, 1, dim);
    for (std::size_t t = 0; t < 16; ++t) keys.row(t)[0] = t % 2 == 0 ? 1.0F : -1.0F;
    query.row(0)[0] = 1;
    query.row(1)[0] = -1;
    for_each_format([&](auto tag, unsigned) {
      using F = typename decltype(tag)::type;
      CodedRows<F> rows(config, keys, keys);
      const std::vector<float> logits = rows.logits(query);
      for (std::size_t q = 0; q < 2; ++q)
        for (std::size_t t = 0; t < 16; ++t) {
          const double wanted = product_of(query.row(q), rows.decoded_keys.row(t), dim);
          EXPECT_NEAR(static_cast<double>(logits[q * 16 + t]), wanted, 1e-5) << dim;
          EXPECT_GT(std::fabs(wanted), 0.98);
        }
      // The odd rows have weight e^-80, the even ones nearly the same.
      const Outcome outcome = rows.attend(query.slice(0, 1), 40.0F);
      Block expected(1, 1, dim);
      double sum = 0;
      for (std::size_t t = 0; t < 16; t += 2) sum += std::exp(40 * static_cast<double>(logits[t] - logits[0]));
      for (std::size_t t = 0; t < 16; t += 2) {
        const double weight = std::exp(40 * static_cast<double>(logits[t] - logits[0])) / sum;
        for (std::size_t i = 0; i < dim; ++i) {
          expected.row(0)[i] += static_cast<float>(weight * static_cast<double>(rows.decoded_values.row(t)[i]));
        }
      }
      EXPECT_LE(distance_of(outcome.out.row(0), expected.row(0), dim), 2e-4);
    });
    // More and more coordinates in step: the logit grows with every one. q = all ones in the rotated domain is one-hot.
    Block partly = gaussian_block(3, 64, 1, dim, 0.001);
    for (std::size_t t = 0; t < 64; ++t) partly.row(t)[0] += static_cast<float>(t + 1) / 64;
    const CodedRows<TQ4> growing(config, partly, partly);
    const std::vector<float> logits = growing.logits(query.slice(0, 1));
    for (std::size_t t = 1; t < 64; ++t) EXPECT_GT(logits[t], logits[t - 1]) << dim;
  }
}

TEST(NumericCases, N27_ManySplitsOfFewKeys) {
  for (const bool coded : {false, true}) {
    CacheConfig config = coded_config(1, 32, 0, 8, 16);
    config.recent_tokens = coded ? 0 : 1000;
    config.layers[0].window = 50;
    config.rollback_tokens = 200;
    for (const std::size_t n : {1U, 2U, 3U, 15U, 16U, 17U, 47U, 100U, 200U}) {
      KVCache<TQ4> cache(config);
      const SequenceId id = new_sequence(cache);
      ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, n, 1, 32), gaussian_block(2, n, 1, 32)));
      const Block query = gaussian_block(3, 1, 2, 32);
      const Outcome whole = attend_only(cache, 0, id, query);
      ASSERT_OK(whole.status);
      for (const std::size_t parts : {1U, 2U, 3U, 7U, 16U, 64U}) {
        Outcome joined{{}, Block(1, 2, 32), std::vector<float>(2, -std::numeric_limits<float>::infinity())};
        for (std::size_t part = 0; part < parts; ++part) {  // many are empty, many lie before the window
          CallOptions options;
          options.key_begin = n * part / parts;
          options.key_end = n * (part + 1) / parts;
          const Outcome piece = attend_only(cache, 0, id, query, options);
          ASSERT_OK(piece.status);
          turboquant::merge_partials(joined.out.rows(), joined.lse.data(), piece.out.rows(), piece.lse.data());
        }
        // Raw: fp32. Coded: 14-bit weights relative to the largest of another set of keys.
        for (std::size_t i = 0; i < 64; ++i)
          ASSERT_NEAR(joined.out.numbers[i], whole.out.numbers[i], coded ? 3e-4F : 2e-6F) << n << " in " << parts;
        for (std::size_t h = 0; h < 2; ++h) ASSERT_NEAR(joined.lse[h], whole.lse[h], 4e-6F);
      }
    }
  }
}

}  // namespace
