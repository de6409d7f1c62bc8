// What must not change a result: how tokens were split over calls, who else is in the batch, where keys are centred.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "cache/block.hpp"
#include "cache/mirror.hpp"
#include "cache/sanitized.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4, turboquant::TQ3>;

/// Keys, values and queries of one stream, for every token.
struct Stream {
  Block keys, values, queries;
  Stream(std::uint64_t seed, std::size_t tokens, std::size_t heads, std::size_t dim)
      : keys(gaussian_block(seed, tokens, heads, dim)),
        values(gaussian_block(seed + 1, tokens, heads, dim)),
        queries(gaussian_block(seed + 2, tokens, 2 * heads, dim)) {}

  /// Appends the tokens [begin, end) with all their queries in one call.
  Outcome feed(Cache& cache, SequenceId id, std::size_t begin, std::size_t end) const {
    return attend_one(cache, 0, id, keys.slice(begin, end), values.slice(begin, end), queries.slice(begin, end));
  }
};

std::vector<CacheConfig> all_configurations() {
  std::vector<CacheConfig> all;
  for (const std::size_t page : {16U, 48U})
    for (const std::size_t recent : {0U, 9U, 32U})
      for (const std::size_t rollback : {0U, 8U, 40U})
        for (const std::size_t first : {0U, 5U}) {
          CacheConfig config;
          config.page_tokens = page;
          config.recent_tokens = recent;
          config.rollback_tokens = rollback;
          config.first_tokens = first;
          config.layers = {LayerShape{.kv_heads = 1,
                                      .head_dim = 32,
                                      .window = first == 0 && recent == 9 ? 50U : 0U,
                                      .format = page == 16 ? 0U : 1U,
                                      .center_bits = static_cast<std::uint8_t>(rollback == 0 ? 0 : 8)}};
          all.push_back(config);
        }
  return all;
}

/// Under sanitizers every fifth and one more: all pairs of values of two settings, and both windows.
std::vector<CacheConfig> configurations() {
  std::vector<CacheConfig> all = all_configurations();
  if (!kSanitized) return all;
  std::vector<CacheConfig> some;
  for (const std::size_t i : {0U, 5U, 10U, 15U, 20U, 25U, 26U, 30U, 35U}) some.push_back(all[i]);
  return some;
}

TEST(Invariance, AnySplitOverCallsGivesTheSameBits) {
  constexpr std::size_t kTokens = 170;
  std::uint64_t split = 0;
  for (const CacheConfig& config : configurations()) {
    const Stream stream(1, kTokens, 1, 32);
    Cache cache(config);
    const SequenceId whole_id = new_sequence(cache);
    const Outcome whole = stream.feed(cache, whole_id, 0, kTokens);
    ASSERT_OK(whole.status);
    ASSERT_TRUE(all_finite(whole.out));
    // One token at a time, then random pieces of 1-16, 1-64 and 1-170 tokens.
    for (const std::size_t longest : {1U, 16U, 64U, 170U}) {
      const SequenceId id = new_sequence(cache);
      Outcome pieces{{}, Block(), {}};
      for (std::size_t begin = 0; begin < kTokens;) {
        const std::size_t end = std::min(kTokens, begin + 1 + oracle::hash(5, ++split, begin) % longest);
        append_outcome(pieces, stream.feed(cache, id, begin, end));
        begin = end;
      }
      ASSERT_OK(pieces.status);
      EXPECT_TRUE(same_bits(pieces, whole))
          << "page " << config.page_tokens << " recent " << config.recent_tokens << " rollback "
          << config.rollback_tokens << " first " << config.first_tokens << " window " << config.layers[0].window
          << " pieces of at most " << longest;
      Block keys, values, whole_keys, whole_values;
      const std::size_t begin = config.layers[0].window != 0 ? kTokens - config.layers[0].window : 0;
      ASSERT_OK(read_rows(cache, id, 0, begin, kTokens, keys, values));
      ASSERT_OK(read_rows(cache, whole_id, 0, begin, kTokens, whole_keys, whole_values));
      EXPECT_TRUE(same_bits(keys, whole_keys) && same_bits(values, whole_values));
      cache.release(id);
    }
  }
}

TEST(Invariance, LongContextsGiveTheSameBitsByEveryRoute) {
  // Long enough that a decode step is split; the prompt with many queries is not.
  for (const std::uint32_t window : {0U, 1500U}) {
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32, .window = window}};
    config.recent_tokens = 40;
    config.first_tokens = 3;
    constexpr std::size_t kTokens = 3300;
    const Stream stream(1, kTokens, 1, 32);
    Cache cache(config);
    const SequenceId whole_id = new_sequence(cache), id = new_sequence(cache);
    const Outcome whole = stream.feed(cache, whole_id, 0, kTokens);
    ASSERT_OK(whole.status);
    Outcome pieces = stream.feed(cache, id, 0, 900);
    for (std::size_t begin = 900; begin < kTokens;) {
      const std::size_t end = std::min(kTokens, begin + (begin % 200 == 0 ? 150 : begin % 7 + 1));
      append_outcome(pieces, stream.feed(cache, id, begin, end));
      begin = end;
    }
    ASSERT_OK(pieces.status);
    EXPECT_TRUE(same_bits(pieces, whole)) << window;
    // And it is attention: the last query against the oracle on what can be read.
    const std::size_t begin = window == 0 ? 0 : kTokens - window;
    Block keys, values;
    ASSERT_OK(read_rows(cache, id, 0, begin, kTokens, keys, values));
    const Tensor truth = oracle::attend(keys.exact(), values.exact(),
                                        stream.queries.slice(kTokens - 1, kTokens).exact(), kTokens - begin, {});
    // 3,000 keys: an int8 query's errors, below 0.02 per logit, average out to a hundredth of the output.
    for (std::size_t h = 0; h < 2; ++h)
      EXPECT_LE(oracle::distance(whole.out.slice(kTokens - 1, kTokens).exact().row(0, h), truth.row(0, h), 32),
                0.05 * oracle::norm(truth.row(0, h), 32));
  }
}

TEST(Invariance, F03_DraftsVerifiedAtOnceEqualOneAtATime) {
  for (const CacheConfig& config : configurations()) {
    const Stream stream(1, 130, 1, 32);
    Cache cache(config);
    const SequenceId at_once = new_sequence(cache), one_by_one = new_sequence(cache);
    ASSERT_OK(stream.feed(cache, at_once, 0, 46).status);
    ASSERT_OK(stream.feed(cache, one_by_one, 0, 46).status);
    for (std::size_t begin = 46; begin + 7 <= 130; begin += 7) {
      const Outcome together = stream.feed(cache, at_once, begin, begin + 7);
      Outcome single{{}, Block(), {}};
      for (std::size_t t = begin; t < begin + 7; ++t) append_outcome(single, stream.feed(cache, one_by_one, t, t + 1));
      ASSERT_OK(together.status);
      ASSERT_OK(single.status);
      EXPECT_TRUE(same_bits(together, single)) << begin;
    }
  }
}

/// A random tree of drafts: word i has bit i and the bits of all ancestors of i.
std::vector<std::uint64_t> random_tree(std::uint64_t seed, std::size_t tokens) {
  std::vector<std::uint64_t> tree(tokens);
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::size_t parent = oracle::hash(seed, 5, i) % (i + 1);  // i: no parent
    tree[i] = std::uint64_t{1} << i | (parent < i ? tree[parent] : 0);
  }
  return tree;
}
std::vector<std::uint32_t> branch_of(std::uint64_t word) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t i = 0; i < 64; ++i)
    if ((word >> i & 1) != 0) tokens.push_back(i);
  return tokens;
}

TEST(Invariance, F03_ATreeOfDraftsEqualsItsBranchesOneAtATime) {
  std::uint64_t count = 0;
  for (CacheConfig config : configurations()) {
    config.recent_tokens += 11;
    config.rollback_tokens += 11;
    Cache cache(config);
    // Under sanitizers a third of the rounds, each configuration others than the one before.
    for (std::uint64_t round = kSanitized ? count++ % 3 : 0; round < 8; round += kSanitized ? 3 : 1) {
      const std::size_t begin = 3 + 13 * round, tokens = 2 + round;
      const Stream stream(round, begin + tokens, 1, 32), more(round + 100, 50, 1, 32);
      const SequenceId drafted = new_sequence(cache), later = new_sequence(cache);
      for (const SequenceId id : {drafted, later}) ASSERT_OK(stream.feed(cache, id, 0, begin).status);
      const std::vector<std::uint64_t> tree = random_tree(round, tokens);
      const Block queries = stream.queries.slice(begin, begin + tokens);
      CallOptions options;
      options.tree = tree.data();
      const Outcome together = attend_one(cache, 0, drafted, stream.keys.slice(begin, begin + tokens),
                                          stream.values.slice(begin, begin + tokens), queries, options);
      ASSERT_OK(together.status);
      // Layers that share these keys ask again later.
      ASSERT_OK(append_only(cache, 0, later, stream.keys.slice(begin, begin + tokens),
                            stream.values.slice(begin, begin + tokens)));
      EXPECT_TRUE(same_bits(together, attend_only(cache, 0, later, queries, options)));
      for (std::size_t i = 0; i < tokens; ++i) {
        const std::vector<std::uint32_t> branch = branch_of(tree[i]);
        SequenceId accepted, plain = new_sequence(cache);
        ASSERT_OK(stream.feed(cache, plain, 0, begin).status);
        Outcome last;
        for (const std::uint32_t t : branch) last = stream.feed(cache, plain, begin + t, begin + t + 1);
        EXPECT_TRUE(same_bits(together.out.slice(i, i + 1), last.out)) << "round " << round << " draft " << i;
        EXPECT_EQ(together.lse[2 * i], last.lse[0]);
        EXPECT_EQ(together.lse[2 * i + 1], last.lse[1]);
        // The accepted branch goes on as if the others had never come.
        ASSERT_OK(cache.fork(drafted, begin + tokens, accepted));
        ASSERT_OK(cache.keep(accepted, begin, branch));
        EXPECT_EQ(cache.length(accepted), begin + branch.size());
        EXPECT_TRUE(same_bits(more.feed(cache, accepted, 0, 50), more.feed(cache, plain, 0, 50)));
        cache.release(accepted);
        cache.release(plain);
      }
      cache.release(drafted);
      cache.release(later);
    }
  }
}

TEST(Invariance, TreesThatAreNone) {
  CacheConfig config;
  config.layers = {{.kv_heads = 1, .head_dim = 32}};
  config.recent_tokens = 8;
  Cache cache(config);
  const Stream stream(1, 40, 1, 32);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(stream.feed(cache, id, 0, 20).status);
  const auto refused = [&](const std::vector<std::uint64_t>& tree, std::size_t queries, bool causal = true) {
    CallOptions options;
    options.tree = tree.data();
    options.params.causal = causal;
    const Outcome outcome =
        attend_one(cache, 0, id, stream.keys.slice(20, 20 + tree.size()), stream.values.slice(20, 20 + tree.size()),
                   stream.queries.slice(0, queries), options);
    EXPECT_EQ(cache.length(id), 20U);
    return outcome.status;
  };
  EXPECT_STATUS(bad_shape, refused({0b01, 0b01}, 2));           // does not see itself
  EXPECT_STATUS(bad_shape, refused({0b11, 0b10}, 2));           // sees a later one
  EXPECT_STATUS(bad_shape, refused({0b001, 0b011, 0b110}, 3));  // sees its parent, not that one's
  EXPECT_STATUS(bad_shape, refused({0b001, 0b010, 0b111}, 3));  // two parents
  EXPECT_STATUS(bad_shape, refused({0b01, 0b11}, 1));           // a query is missing
  EXPECT_STATUS(bad_shape, refused({0b01, 0b11}, 2, false));    // not causal
  EXPECT_STATUS(bad_shape, refused(random_tree(1, 9), 9));      // more than recent_tokens
  CallOptions options;
  const std::vector<std::uint64_t> tree = random_tree(1, 8);
  options.tree = tree.data();
  const SequenceId empty = new_sequence(cache);
  EXPECT_STATUS(bad_shape, attend_only(cache, 0, empty, stream.queries.slice(0, 8), options).status);
  for (const std::vector<std::uint32_t>& tokens : {std::vector<std::uint32_t>{1, 1}, {2, 1}, {0, 5}})
    EXPECT_STATUS(bad_shape, cache.keep(id, 15, tokens));
  EXPECT_STATUS(bad_shape, cache.keep(id, 21, {}));
  EXPECT_EQ(cache.length(id), 20U);
}

TEST(Invariance, RejectedDraftsLeaveNoTrace) {
  for (const CacheConfig& config : configurations()) {
    if (config.rollback_tokens == 0) continue;
    const Stream stream(1, 150, 1, 32), wrong(50, 150, 1, 32);
    Cache cache(config);
    const SequenceId drafted = new_sequence(cache), plain = new_sequence(cache);
    std::size_t round = 0;
    for (std::size_t begin = 0; begin < 150;) {
      const std::size_t accepted = std::min<std::size_t>(150 - begin, 1 + oracle::hash(8, begin, 0) % 12);
      const std::size_t rejected =
          std::min<std::size_t>(150 - begin - accepted, oracle::hash(8, begin, 1) % (config.rollback_tokens + 1));
      Outcome with_drafts = stream.feed(cache, drafted, begin, begin + accepted);
      if (rejected != 0) {
        ASSERT_OK(wrong.feed(cache, drafted, begin + accepted, begin + accepted + rejected).status);
        ASSERT_OK(cache.truncate(drafted, begin + accepted));
      }
      const Outcome without = stream.feed(cache, plain, begin, begin + accepted);
      ASSERT_OK(with_drafts.status);
      ASSERT_OK(without.status);
      EXPECT_TRUE(same_bits(with_drafts, without)) << "round " << ++round << " at " << begin;
      begin += accepted;
    }
    Block keys, values, plain_keys, plain_values;
    const std::size_t begin = config.layers[0].window != 0 ? 150 - config.layers[0].window : 0;
    ASSERT_OK(read_rows(cache, drafted, 0, begin, 150, keys, values));
    ASSERT_OK(read_rows(cache, plain, 0, begin, 150, plain_keys, plain_values));
    EXPECT_TRUE(same_bits(keys, plain_keys) && same_bits(values, plain_values));
  }
}

TEST(Invariance, AForkContinuesAsIfItWereTheSource) {
  for (const CacheConfig& config : configurations()) {
    const Stream stream(1, 140, 1, 32), other(60, 140, 1, 32);
    Cache cache(config);
    const SequenceId source = new_sequence(cache), reference = new_sequence(cache);
    ASSERT_OK(stream.feed(cache, source, 0, 90).status);
    ASSERT_OK(stream.feed(cache, reference, 0, 90).status);
    SequenceId child, shorter;
    ASSERT_OK(cache.fork(source, 90, child));
    const std::size_t kept = 90 - config.rollback_tokens;
    ASSERT_OK(cache.fork(source, kept, shorter));
    EXPECT_EQ(cache.length(child), 90U);
    EXPECT_EQ(cache.length(shorter), kept);
    ASSERT_OK(other.feed(cache, source, 90, 140).status);  // what the source goes on with is its own business
    for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{90, 91}, {91, 110}, {110, 140}}) {
      const Outcome of_child = stream.feed(cache, child, begin, end),
                    of_reference = stream.feed(cache, reference, begin, end);
      ASSERT_OK(of_child.status);
      EXPECT_TRUE(same_bits(of_child, of_reference)) << begin << " first " << config.first_tokens;
    }
    cache.release(source);
    cache.release(child);
    const SequenceId fresh = new_sequence(cache);
    ASSERT_OK(stream.feed(cache, fresh, 0, kept).status);
    for (const std::size_t begin : {kept, kept + 1}) {
      const std::size_t end = begin == kept ? kept + 1 : 140;
      const Outcome of_shorter = stream.feed(cache, shorter, begin, end);
      ASSERT_OK(of_shorter.status);
      EXPECT_TRUE(same_bits(of_shorter, stream.feed(cache, fresh, begin, end))) << begin;
    }
  }
}

TEST(Invariance, PermutingSequencesPermutesResults) {
  CacheConfig config = all_configurations()[2];
  constexpr std::size_t kCount = 6;
  const auto run = [&](const std::array<std::size_t, kCount>& order) {
    Cache cache(config);
    std::array<Outcome, kCount> outcomes;
    std::array<SequenceId, kCount> ids;
    for (const std::size_t s : order) ids[s] = new_sequence(cache);
    for (const std::size_t count : {33U, 1U, 20U}) {
      std::array<Block, kCount> keys, values, queries;
      std::array<BatchItem, kCount> items;
      for (std::size_t place = 0; place < kCount; ++place) {
        const std::size_t s = order[place], n = count + s, first = cache.length(ids[s]);
        keys[s] = gaussian_block(10 + s, n, 1, 32, 1, first);
        values[s] = gaussian_block(20 + s, n, 1, 32, 1, first);
        queries[s] = gaussian_block(30 + s, n, 2, 32, 1, first);
        outcomes[s] = Outcome{{}, Block(n, 2, 32, kNaN), std::vector<float>(2 * n, kNaN)};
        items[place].sequence = ids[s];
        items[place].keys = keys[s].rows();
        items[place].values = values[s].rows();
        items[place].queries = queries[s].rows();
        items[place].out = outcomes[s].out.rows();
        items[place].lse = outcomes[s].lse.data();
      }
      EXPECT_OK(turboquant::attend(cache, 0, items));
    }
    return outcomes;
  };
  const auto straight = run({0, 1, 2, 3, 4, 5}), permuted = run({4, 2, 5, 0, 3, 1});
  for (std::size_t s = 0; s < kCount; ++s) EXPECT_TRUE(same_bits(straight[s], permuted[s])) << s;
  EXPECT_FALSE(same_bits(straight[0].out.slice(0, 1), straight[1].out.slice(0, 1)));
}

TEST(Invariance, QueriesOfOneCallDoNotKnowEachOther) {
  const CacheConfig config = all_configurations()[4];
  const Stream stream(1, 120, 1, 32);
  Cache cache(config);
  const SequenceId id = new_sequence(cache), other = new_sequence(cache);
  const Outcome all = stream.feed(cache, id, 0, 120);
  // The same tokens with the last query alone, and with a single head of the group.
  const Outcome last = attend_one(cache, 0, other, stream.keys, stream.values, stream.queries.slice(119, 120));
  ASSERT_OK(last.status);
  EXPECT_TRUE(same_bits(last.out, all.out.slice(119, 120)));
  const SequenceId third = new_sequence(cache);
  Block head(120, 1, 32);
  for (std::size_t t = 0; t < 120; ++t) std::copy_n(stream.queries.row(t, 1), 32, head.row(t));
  const Outcome single = attend_one(cache, 0, third, stream.keys, stream.values, head);
  ASSERT_OK(single.status);
  for (std::size_t t = 0; t < 120; ++t)
    for (std::size_t i = 0; i < 32; ++i) ASSERT_EQ(single.out.row(t)[i], all.out.row(t, 1)[i]) << t;
}

/// Root mean square distance of attention outputs from exact attention on the keys as given.
double output_error(const CacheConfig& config, const Block& keys, const Block& values, const Block& queries) {
  Cache cache(config);
  const SequenceId id = new_sequence(cache);
  EXPECT_OK(append_only(cache, 0, id, keys, values));
  CallOptions options;
  options.params.causal = false;
  options.position = 0;
  const Outcome outcome = attend_only(cache, 0, id, queries, options);
  EXPECT_OK(outcome.status);
  oracle::Options exact;
  exact.causal = false;
  const oracle::Tensor truth =
      oracle::attend(keys.bfloat16_rounded(), values.bfloat16_rounded(), queries.exact(), 0, exact);
  const oracle::Tensor found = outcome.out.exact();
  return oracle::distance(found.numbers.data(), truth.numbers.data(), truth.numbers.size()) /
         std::sqrt(static_cast<double>(truth.numbers.size()));
}

TEST(Invariance, AnOffsetOfAllKeysCostsOnlyTheRoundingOfTheCentre) {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 64}};
  config.page_tokens = 64;
  config.recent_tokens = 0;
  // Keys and offsets are multiples of 1/16 below 16, exact in bfloat16.
  Block keys = gaussian_block(1, 256, 1, 64), values = gaussian_block(2, 256, 1, 64),
        queries = gaussian_block(3, 40, 1, 64), shifted = keys;
  for (float& x : keys.numbers) x = std::nearbyint(x * 16) / 16;
  for (std::size_t t = 0; t < 256; ++t)
    for (std::size_t i = 0; i < 64; ++i)
      shifted.row(t)[i] = keys.row(t)[i] + static_cast<float>(std::nearbyint(64 * oracle::uniform(9, 9, i)) / 16 + 4) *
                                               (i % 2 == 0 ? 1.0F : -1.0F);
  const double plain = output_error(config, keys, values, queries),
               moved = output_error(config, shifted, values, queries);
  // An offset of 6 per coordinate leaves a rounding error of about 0.0114 * 6 = 0.07 of the spread in what is coded:
  // its energy rises by half a per cent. Another sample of code errors scatters by some per cent more.
  EXPECT_LE(moved, 1.15 * plain);
  EXPECT_GE(moved, 0.85 * plain);
  config.layers[0].center_bits = 0;
  EXPECT_GE(output_error(config, shifted, values, queries), 3 * plain) << "the test has lost its teeth";

  // Raw rows: nothing is rounded but fp32 sums, whose terms are up to |q||offset|.
  config.recent_tokens = 1000;
  EXPECT_LE(output_error(config, shifted, values, queries), 1e-5);
}

TEST(Invariance, ScalingKeysByAPowerOfTwoScalesLogitsExactly) {
  for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}}) {
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 1, .head_dim = 96, .center_bits = center_bits}};
    config.page_tokens = 32;
    config.recent_tokens = 16;
    Cache cache(config);
    const Block keys = gaussian_block(1, 100, 1, 96), values = gaussian_block(2, 100, 1, 96),
                queries = gaussian_block(3, 2, 2, 96);
    const SequenceId id = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, id, keys, values));
    std::vector<float> logits(400);
    ASSERT_OK(turboquant::logits(cache, id, 0, queries.rows(), logits.data()));
    for (const int exponent : {-30, -3, 1, 10, 40}) {
      Block scaled = keys;
      for (float& x : scaled.numbers) x = std::ldexp(x, exponent);
      const SequenceId scaled_id = new_sequence(cache);
      ASSERT_OK(append_only(cache, 0, scaled_id, scaled, values));
      std::vector<float> scaled_logits(400);
      ASSERT_OK(turboquant::logits(cache, scaled_id, 0, queries.rows(), scaled_logits.data()));
      for (std::size_t i = 0; i < 400; ++i)
        ASSERT_EQ(scaled_logits[i], std::ldexp(logits[i], exponent)) << i << " exponent " << exponent;
    }
  }
}

TEST(Invariance, SeedZeroIsASeedAndSeedsDiffer) {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 64}};
  config.page_tokens = 16;
  config.recent_tokens = 0;
  std::vector<Block> decoded;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{42}, ~std::uint64_t{0}}) {
    config.seed = seed;
    Cache cache(config);
    const SequenceId id = new_sequence(cache);
    Mirror mirror(config, 0, codes_of(4));
    const Block keys = gaussian_block(1, 16, 1, 64), values = gaussian_block(2, 16, 1, 64);
    ASSERT_OK(append_only(cache, 0, id, keys, values));
    mirror.append(keys, values);
    mirror.learn(cache, id);
    Block read_keys, read_values;
    ASSERT_OK(read_rows(cache, id, 0, 0, 16, read_keys, read_values));
    for (const Block& before : decoded) EXPECT_FALSE(same_bits(before, read_keys));
    decoded.push_back(read_keys);
  }
}

}  // namespace
