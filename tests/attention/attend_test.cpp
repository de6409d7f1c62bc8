// attend against the double-precision oracle: every parameter and every border.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <turboquant/transform/rotation.hpp>
#include <vector>

#include "attention/scenario.hpp"
#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::AttentionParams;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::npos;
using turboquant::SequenceId;

TEST(Attend, EveryLengthOneTokenAtATime) {
  for (const std::size_t first_tokens : {std::size_t{0}, std::size_t{5}}) {
    CacheConfig config = small_config();
    config.first_tokens = first_tokens;
    Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
    for (int n = 0; n < 70 && !HasFailure(); ++n) run.step(1, 1);
    EXPECT_EQ(run.cache.length(run.id), 70U);
  }
}

TEST(Attend, PromptsAroundEveryBorder) {
  // Borders of tile (16), page (16 and 32), recent (16, 20) and their sums.
  for (const std::size_t page : {16U, 32U})
    for (const std::size_t recent : {0U, 16U, 20U})
      for (const std::size_t n :
           {1U, 15U, 16U, 17U, 31U, 32U, 33U, 35U, 36U, 37U, 47U, 48U, 49U, 63U, 64U, 65U, 100U}) {
        SCOPED_TRACE(testing::Message() << "page " << page << " recent " << recent << " tokens " << n);
        CacheConfig config = small_config();
        config.page_tokens = page;
        config.recent_tokens = recent;
        Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
        run.step(n, n);
        run.step(3, 2);
        run.step(40, 1);
        if (HasFailure()) return;
      }
}

template <class F>
void run_format(unsigned bits) {
  CacheConfig config = small_config(2, 128);
  config.page_tokens = 64;
  config.recent_tokens = 32;
  for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}}) {
    SCOPED_TRACE(testing::Message() << "bits " << bits << " center bits " << int{center_bits});
    config.layers[0].center_bits = center_bits;
    Scenario<KVCache<F>> run(config, codes_of(bits));
    run.step(150, 20);
    for (int i = 0; i < 30; ++i) run.step(1, 1);
    run.step(100, 3);
  }
}
TEST(Attend, Tq2) { run_format<turboquant::TQ2>(2); }
TEST(Attend, Tq3) { run_format<turboquant::TQ3>(3); }
TEST(Attend, Tq4) { run_format<turboquant::TQ4>(4); }
TEST(Attend, Tq8) { run_format<turboquant::TQ8>(8); }

TEST(Attend, DefaultConfiguration) {
  Scenario<KVCache<turboquant::TQ4>> run(CacheConfig{}, codes_of(4), 1);
  run.step(200, 50);
  run.step(1, 1);
  run.step(64, 64);
}

TEST(Attend, KeysWithALargeCommonOffset) {
  // The offset is 20 times the spread, the most that an 8-bit centre is made for.
  CacheConfig config = small_config(1, 128);
  config.recent_tokens = 0;
  for (const std::uint8_t center_bits : {std::uint8_t{8}, std::uint8_t{16}}) {
    config.layers[0].center_bits = center_bits;
    Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4), 2, 3, 20);
    AttentionParams params;
    params.scale = 0.02F;  // keeps the logits, which the offset makes large, in a range where many keys have weight
    run.step(96, 10, params);
    run.step(1, 1, params);
  }
}

TEST(Attend, HeadGroupsOfAnySize) {
  struct Heads {
    std::uint32_t kv;
    std::size_t query;
  };
  for (const Heads heads : {Heads{1, 1}, Heads{1, 2}, Heads{1, 3}, Heads{2, 12}, Heads{4, 28}, Heads{1, 5},
                            Heads{2, 16}, Heads{1, 17}, Heads{1, 48}}) {
    SCOPED_TRACE(testing::Message() << heads.query << " over " << heads.kv);
    Scenario<KVCache<turboquant::TQ3>> run(small_config(heads.kv, 32), codes_of(3), heads.query);
    run.step(60, 7);
    run.step(1, 1);
  }
}

TEST(Attend, HeadSizesOfEveryKind) {
  // One size per base matrix (orders 1, 12, 20, 28, 36) and keys wider and narrower than values.
  struct Dims {
    std::uint32_t key, value;
  };
  for (const Dims dims : {Dims{32, 0}, Dims{80, 0}, Dims{96, 0}, Dims{112, 0}, Dims{144, 0}, Dims{160, 0},
                          Dims{192, 128}, Dims{256, 64}, Dims{64, 256}, Dims{576, 512}, Dims{1024, 0}}) {
    SCOPED_TRACE(testing::Message() << dims.key << ' ' << dims.value);
    CacheConfig config = small_config(1, dims.key);
    config.layers[0].value_dim = dims.value;
    Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4), 2);
    run.step(45, 4);
    run.step(5, 5);
  }
}

TEST(Attend, Softcap) {
  AttentionParams params;
  params.softcap = 1.5F;
  params.scale = 0.5F;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params);
  run.step(1, 1, params);
}

TEST(Attend, Alibi) {
  const std::array<float, 4> slopes{0.5F, 0.25F, 0.0625F, 0.0F};
  AttentionParams params;
  params.alibi_slopes = slopes;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params);
  run.step(1, 1, params);
  params.causal = false;
  run.step(3, 2, params);
}

TEST(Attend, SinksWithAndWithoutLogSumExp) {
  const std::array<float, 4> sinks{3.0F, -1.0F, 0.5F, 20.0F};
  AttentionParams params;
  params.sink_logits = sinks;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params, false);
  run.step(1, 1, params, false);
  run.step(5, 5, params, true);  // a partial: sinks are left to the merge
}

TEST(Attend, EverythingAtOnce) {
  const std::array<float, 4> slopes{0.5F, 0.25F, 0.0625F, 0.01F}, sinks{3.0F, -1.0F, 0.5F, 2.0F};
  AttentionParams params;
  params.scale = 0.2F;
  params.softcap = 2;
  params.alibi_slopes = slopes;
  params.sink_logits = sinks;
  CacheConfig config = small_config();
  config.layers[0].window = 60;
  config.rollback_tokens = 32;
  Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
  for (const std::size_t n : {30U, 20U, 1U, 17U, 25U, 1U, 1U, 30U}) run.step(n, n, params, n % 2 == 0);
}

TEST(Attend, NotCausal) {
  AttentionParams params;
  params.causal = false;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params);
  run.step(20, 20, params);
  // Cross-attention: queries of another stream, at positions that mean nothing.
  const Block queries = run.queries(6, 1000);
  CallOptions options;
  options.params = params;
  options.position = 0;
  run.mirror.check(queries, attend_only(run.cache, 0, run.id, queries, options), params,
                   {.position = 0, .own_call = false});
}

TEST(Attend, ScaleZeroIsOneOverTheRootOfTheHeadSize) {
  CacheConfig config = small_config(1, 64);
  Scenario<KVCache<turboquant::TQ4>> a(config, codes_of(4)), b(config, codes_of(4));
  const Block keys = a.keys(50), values = a.values(50), queries = a.queries(3, 0);
  CallOptions explicit_scale;
  explicit_scale.params.scale = 0.125F;
  EXPECT_TRUE(same_bits(attend_one(a.cache, 0, a.id, keys, values, queries),
                        attend_one(b.cache, 0, b.id, keys, values, queries, explicit_scale)));
}

TEST(Attend, WindowsOfEverySize) {
  // The twin without a window tells what the codes are worth that the windowed layer has let go.
  for (const std::uint32_t window : {1U, 2U, 8U, 16U, 17U, 33U, 64U, 90U, 200U})
    for (const std::size_t recent : {0U, 16U, 40U}) {
      SCOPED_TRACE(testing::Message() << "window " << window << " recent " << recent);
      CacheConfig config = small_config(1, 64);
      config.recent_tokens = recent;
      CacheConfig twin_config = config;
      config.layers[0].window = window;
      KVCache<turboquant::TQ4> cache(config), twin(twin_config);
      const SequenceId id = new_sequence(cache), twin_id = new_sequence(twin);
      Mirror mirror(config, 0, codes_of(4)), twin_mirror(twin_config, 0, codes_of(4));
      for (const std::size_t n : {10U, 1U, 30U, 1U, 1U, 100U, 1U, 3U, 16U, 1U}) {
        const std::size_t first = mirror.length();
        const Block keys = gaussian_block(1, n, 1, 64, 1, first), values = gaussian_block(2, n, 1, 64, 1, first),
                    queries = gaussian_block(3, n, 2, 64, 1, first);
        const Outcome outcome = attend_one(cache, 0, id, keys, values, queries);
        ASSERT_OK(append_only(twin, 0, twin_id, keys, values));
        mirror.append(keys, values);
        twin_mirror.append(keys, values);
        twin_mirror.learn(twin, twin_id);
        mirror.learn_from(twin_mirror);
        mirror.check(queries, outcome, {}, {.position = first});
        if (HasFailure()) return;
      }
      EXPECT_EQ(cache.length(id), 164U);
    }
}

TEST(Attend, KeyRanges) {
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(90, 1);
  const Block queries = run.queries(2, 88);
  struct Range {
    std::size_t begin, end;
  };
  for (const Range range :
       {Range{0, 90}, Range{0, 0}, Range{0, 1}, Range{7, 7}, Range{5, 12}, Range{16, 32}, Range{15, 33}, Range{30, 80},
        Range{70, npos}, Range{89, npos}, Range{90, npos}, Range{0, 1000}}) {
    SCOPED_TRACE(testing::Message() << range.begin << " to " << range.end);
    CallOptions options;
    options.key_begin = range.begin;
    options.key_end = range.end;
    const Outcome outcome = attend_only(run.cache, 0, run.id, queries, options);
    run.mirror.check(queries, outcome, {},
                     {.position = 88, .own_call = false, .key_begin = range.begin, .key_end = range.end});
  }
}

TEST(Attend, LaterQueriesAtOldPositionsReadCodesWhereRawRowsAreGone) {
  CacheConfig config = small_config();
  config.rollback_tokens = 20;
  Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
  for (const std::size_t n : {40U, 30U, 1U, 1U, 9U, 20U}) {
    run.step(n, 1);
    for (std::size_t position = 0; position < run.mirror.length(); position += 3) {
      const Block query = run.queries(1, position);
      CallOptions options;
      options.position = position;
      run.mirror.check(query, attend_only(run.cache, 0, run.id, query, options), {},
                       {.position = position, .own_call = false});
    }
  }
}

/// y = H diag(signs) x / sqrt(d) for d a power of two (Sylvester), in double precision.
std::vector<double> rotate(std::vector<double> x, const float* signs) {
  const std::size_t d = x.size();
  for (std::size_t i = 0; i < d; ++i) x[i] *= static_cast<double>(signs[i]);
  for (std::size_t step = 1; step < d; step *= 2)
    for (std::size_t i = 0; i < d; ++i)
      if ((i & step) == 0) {
        const double a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  for (double& y : x) y /= std::sqrt(static_cast<double>(d));
  return x;
}

TEST(Attend, ExactAgainstThePublishedQueryRounding) {
  // Without centring the logit of a code is the dot product of the decoded key with the rotated query rounded to
  // multiples of max / 127. Recomputed here in double, what is left is fp32 rounding and the 14-bit weights.
  CacheConfig config = small_config(1, 128);
  config.layers[0].center_bits = 0;
  config.recent_tokens = 0;
  Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4), 1);
  run.step(160, 1);
  const turboquant::Rotation rotation(config.seed, 128);
  for (std::size_t trial = 0; trial < 20; ++trial) {
    const Block query = run.queries(1, 500 + trial);
    std::vector<double> rotated = rotate(query.exact().numbers, rotation.signs());
    double largest = 0;
    for (const double x : rotated) largest = std::max(largest, std::fabs(x));
    const double step = largest / 127;
    double nearest_tie = 1;
    for (double& x : rotated) {
      nearest_tie = std::min(nearest_tie, std::fabs(std::fabs(x / step - std::floor(x / step)) - 0.5));
      x = std::nearbyint(x / step) * step;
    }
    if (nearest_tie < 1e-4) continue;  // fp32 may round the other way
    // The keys are in the original domain: rotate them instead of the query back.
    oracle::Tensor rounded(1, 1, 128), keys(160, 1, 128);
    rounded.numbers = rotated;
    for (std::size_t j = 0; j < 160; ++j) {
      const double* key = run.mirror.decoded_keys().row(j, 0);
      const std::vector<double> turned = rotate(std::vector<double>(key, key + 128), rotation.signs());
      std::copy(turned.begin(), turned.end(), keys.row(j, 0));
    }
    std::vector<double> lse;
    const oracle::Tensor truth = oracle::attend(keys, run.mirror.decoded_values(), rounded, 159, {}, &lse);
    const Outcome outcome = attend_only(run.cache, 0, run.id, query);
    ASSERT_OK(outcome.status);
    // 160 weights, each off by at most 2^-15 of its page's largest (here about 10 times the average).
    EXPECT_LE(oracle::distance(outcome.out.exact().row(0, 0), truth.row(0, 0), 128),
              3e-4 * oracle::norm(truth.row(0, 0), 128));
    EXPECT_NEAR(static_cast<double>(outcome.lse[0]), lse[0], 2e-5);
  }
}

}  // namespace
