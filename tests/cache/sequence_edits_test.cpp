// What happens to the tokens that a sequence has: truncation, rollback, forks, seals, erasure. Names like F02 are cases
// of public reports.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <vector>

#include "cache/mirror.hpp"
#include "cache/small_cache.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::MemoryUse;
using turboquant::npos;
using turboquant::SequenceId;

using Cache = KVCache<turboquant::TQ4>;

TEST(KVCache, TruncateRealignsLayersAfterAHalfFinishedStep) {
  Cache cache(small_config(2)), plain(small_config(2));
  const SequenceId id = new_sequence(cache), plain_id = new_sequence(plain);
  ASSERT_OK(feed_all(cache, id, 1, 0, 45));
  ASSERT_OK(feed_all(plain, plain_id, 1, 0, 45));
  ASSERT_OK(feed(cache, id, 7, 45, 50, 0));  // layer 1 never came
  EXPECT_EQ(cache.length(id), 45U);
  ASSERT_OK(cache.truncate(id, cache.length(id)));
  ASSERT_OK(feed_all(cache, id, 1, 45, 80));
  ASSERT_OK(feed_all(plain, plain_id, 1, 45, 80));
  for (std::size_t layer = 0; layer < 2; ++layer)
    EXPECT_TRUE(same_bits(snapshot(cache, id, layer), snapshot(plain, plain_id, layer)));
  expect_same(cache.memory(), plain.memory());
}

TEST(KVCache, TruncateBeyondTheEndIsRefused) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 20));
  SequenceId child;
  EXPECT_STATUS(bad_shape, cache.truncate(id, 21));
  EXPECT_STATUS(bad_shape, cache.truncate(id, npos));
  EXPECT_STATUS(bad_shape, cache.fork(id, 21, child));
  EXPECT_OK(cache.truncate(id, 20));
  EXPECT_EQ(cache.length(id), 20U);
  EXPECT_TRUE(child == SequenceId{});
}

TEST(KVCache, RollbackIsExactAtEveryLength) {
  // Truncating by up to rollback_tokens leaves no trace, whatever the length: across tile, page and recent borders.
  for (const std::size_t first_tokens : {0U, 3U}) {
    CacheConfig config = small_config();
    config.first_tokens = first_tokens;
    for (std::size_t n = 0; n <= 72; ++n) {
      Cache cache(config), plain(config);
      const SequenceId plain_id = new_sequence(plain), id = new_sequence(cache);
      const std::size_t dropped = 1 + n % 8;
      ASSERT_OK(feed(plain, plain_id, 1, 0, n));
      ASSERT_OK(feed(cache, id, 1, 0, n));
      ASSERT_OK(feed(cache, id, 9, n, n + dropped));
      ASSERT_OK(cache.truncate(id, n));
      EXPECT_EQ(cache.length(id), n);
      EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(plain, plain_id))) << n << " first " << first_tokens;
      ASSERT_OK(feed(cache, id, 1, n, n + 40));
      ASSERT_OK(feed(plain, plain_id, 1, n, n + 40));
      EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(plain, plain_id))) << n << " first " << first_tokens;
      expect_same(cache.memory(), plain.memory());
    }
  }
}

TEST(KVCache, RepeatedRollbackWithinTheBoundIsExact) {
  // Eight tokens are dropped, six times, with progress between: each time at most rollback_tokens below the longest.
  Cache cache(small_config()), plain(small_config());
  const SequenceId id = new_sequence(cache), plain_id = new_sequence(plain);
  for (std::size_t n = 0; n < 66; n += 11) {
    ASSERT_OK(feed(cache, id, 1, n, n + 11));
    ASSERT_OK(feed(plain, plain_id, 1, n, n + 11));
    ASSERT_OK(feed(cache, id, 5, n + 11, n + 19));
    ASSERT_OK(cache.truncate(id, n + 15));
    ASSERT_OK(cache.truncate(id, n + 11));
    EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(plain, plain_id))) << n;
  }
}

TEST(KVCache, DeepTruncationKeepsTheCodesAndStartsANewPage) {
  for (const std::size_t kept : {0U, 1U, 10U, 16U, 17U, 40U, 64U, 70U}) {
    SCOPED_TRACE(kept);
    const CacheConfig config = small_config();
    Cache cache(config);
    const SequenceId id = new_sequence(cache);
    Mirror mirror(config, 0, codes_of(4));
    ASSERT_OK(feed(cache, id, 1, 0, 120));
    mirror.append(keys_of(1, 0, 120), values_of(1, 0, 120));
    mirror.learn(cache, id);
    const std::size_t coded = mirror.coded(120);
    ASSERT_EQ(coded, 96U);
    ASSERT_OK(cache.truncate(id, kept));
    mirror.truncate(kept);
    EXPECT_EQ(cache.length(id), kept);
    Block keys, values;
    ASSERT_OK(read_rows(cache, id, 0, 0, kept, keys, values));
    EXPECT_EQ(keys.exact().numbers, mirror.decoded_keys().numbers);  // nothing was encoded again
    EXPECT_EQ(values.exact().numbers, mirror.decoded_values().numbers);
    for (const std::size_t n : {1U, 30U, 20U}) {
      const std::size_t first = mirror.length();
      const Block new_keys = keys_of(4, first, first + n), new_values = values_of(4, first, first + n),
                  queries = queries_of(4, first, first + n);
      const Outcome outcome = attend_one(cache, 0, id, new_keys, new_values, queries);
      mirror.append(new_keys, new_values);
      mirror.learn(cache, id);
      mirror.check(queries, outcome, {}, {.position = first});
    }
  }
}

TEST(KVCache, ForksOfSharedFirstTokensAndTailTiles) {
  // Partial tiles shared by source and child: each goes on in single tokens, both see what a fresh sequence sees.
  for (const std::size_t first_tokens : {0U, 3U, 16U, 20U, 40U})
    for (const std::size_t length : {1U, 3U, 10U, 16U, 21U, 33U, 50U}) {
      SCOPED_TRACE(testing::Message() << "first " << first_tokens << " length " << length);
      CacheConfig config = small_config();
      config.first_tokens = first_tokens;
      Cache cache(config), fresh(config);
      const SequenceId source = new_sequence(cache), fresh_source = new_sequence(fresh),
                       fresh_child = new_sequence(fresh);
      ASSERT_OK(feed(cache, source, 1, 0, length));
      SequenceId child;
      ASSERT_OK(cache.fork(source, length, child));
      ASSERT_OK(feed(fresh, fresh_source, 1, 0, length));
      ASSERT_OK(feed(fresh, fresh_child, 1, 0, length));
      for (std::size_t n = length; n < length + 20; ++n) {
        ASSERT_OK(feed(cache, source, 2, n, n + 1));
        ASSERT_OK(feed(cache, child, 3, n, n + 1));
        ASSERT_OK(feed(fresh, fresh_source, 2, n, n + 1));
        ASSERT_OK(feed(fresh, fresh_child, 3, n, n + 1));
        ASSERT_TRUE(same_bits(snapshot(cache, source), snapshot(fresh, fresh_source))) << n;
        ASSERT_TRUE(same_bits(snapshot(cache, child), snapshot(fresh, fresh_child))) << n;
      }
      cache.release(source);
      EXPECT_TRUE(same_bits(snapshot(cache, child), snapshot(fresh, fresh_child)));
      cache.release(child);
      EXPECT_EQ(cache.memory().tail_bytes, 0U);
    }
}

TEST(KVCache, ForkSharesWhatIsCodedAndCopiesNothingElse) {
  Cache cache(small_config());
  const SequenceId source = new_sequence(cache);
  ASSERT_OK(feed(cache, source, 1, 0, 200));
  const Snapshot before = snapshot(cache, source);
  const MemoryUse alone = cache.memory();
  std::vector<SequenceId> children(10);
  for (SequenceId& child : children) {
    ASSERT_OK(cache.fork(source, 200, child));
    EXPECT_EQ(cache.length(child), 200U);
    EXPECT_TRUE(same_bits(snapshot(cache, child), before));
  }
  EXPECT_EQ(cache.memory().page_bytes, alone.page_bytes);
  // A child owns at most its unfinished tail tile.
  const std::size_t tile = 16 * 2 * 2 * 32 * 2;
  EXPECT_LE(cache.memory().tail_bytes, alone.tail_bytes + 10 * tile);
  for (std::size_t i = 0; i < children.size(); ++i) ASSERT_OK(feed(cache, children[i], 10 + i, 200, 240));
  EXPECT_TRUE(same_bits(snapshot(cache, source), before));
  cache.release(source);
  for (std::size_t i = 0; i < children.size(); ++i) {
    Cache fresh(small_config());
    const SequenceId id = new_sequence(fresh);
    ASSERT_OK(feed(fresh, id, 1, 0, 200));
    ASSERT_OK(feed(fresh, id, 10 + i, 200, 240));
    EXPECT_TRUE(same_bits(snapshot(cache, children[i]), snapshot(fresh, id))) << i;
    cache.release(children[i]);
  }
  EXPECT_EQ(cache.memory().page_bytes, 0U);
  EXPECT_EQ(cache.memory().tail_bytes, 0U);
}

TEST(KVCache, ForkOfAPrefix) {
  for (const std::size_t length : {0U, 1U, 16U, 50U, 95U, 96U, 112U, 119U, 120U}) {
    SCOPED_TRACE(length);
    Cache cache(small_config());
    const SequenceId source = new_sequence(cache);
    ASSERT_OK(feed(cache, source, 1, 0, 120));
    SequenceId child;
    ASSERT_OK(cache.fork(source, length, child));
    EXPECT_EQ(cache.length(child), length);
    EXPECT_EQ(cache.length(source), 120U);
    Block keys, values, source_keys, source_values;
    ASSERT_OK(read_rows(cache, child, 0, 0, length, keys, values));
    ASSERT_OK(read_rows(cache, source, 0, 0, length, source_keys, source_values));
    EXPECT_TRUE(tests::same_bits(keys, source_keys) && tests::same_bits(values, source_values));
    // The child reads what a truncated source would read.
    ASSERT_OK(cache.truncate(source, length));
    ASSERT_OK(read_rows(cache, source, 0, 0, length, source_keys, source_values));
    EXPECT_TRUE(tests::same_bits(keys, source_keys) && tests::same_bits(values, source_values));
    ASSERT_OK(feed(cache, child, 3, length, length + 50));
    ASSERT_OK(feed(cache, source, 3, length, length + 50));
    EXPECT_TRUE(same_bits(snapshot(cache, child), snapshot(cache, source)));
  }
}

TEST(KVCache, SealCodesTheTail) {
  for (const std::size_t first_tokens : {0U, 5U})
    for (const std::size_t n : {0U, 1U, 4U, 16U, 33U, 40U, 77U}) {
      SCOPED_TRACE(testing::Message() << n << " tokens, first " << first_tokens);
      CacheConfig config = small_config();
      config.first_tokens = first_tokens;
      Cache cache(config);
      const SequenceId id = new_sequence(cache);
      Mirror mirror(config, 0, codes_of(4));
      ASSERT_OK(feed(cache, id, 1, 0, n));
      mirror.append(keys_of(1, 0, n), values_of(1, 0, n));
      mirror.learn(cache, id);
      ASSERT_OK(cache.seal(id));
      mirror.seal();
      EXPECT_EQ(cache.length(id), n);
      EXPECT_TRUE(first_tokens != 0 || cache.memory().tail_bytes == 0);
      mirror.learn(cache, id);  // the tail is near what came in, no longer equal; first tokens are still exact
      if (n > first_tokens) {
        Block keys, values;
        ASSERT_OK(read_rows(cache, id, 0, n - 1, n, keys, values));
        EXPECT_FALSE(keys.exact().numbers == keys_of(1, n - 1, n).bfloat16_rounded().numbers);
      }
      if (n != 0) {
        const Block query = queries_of(1, n - 1, n);
        mirror.check(query, attend_only(cache, 0, id, query), {}, {.position = n - 1, .own_call = false});
      }
      const Snapshot sealed = snapshot(cache, id);
      ASSERT_OK(cache.seal(id));
      EXPECT_TRUE(same_bits(snapshot(cache, id), sealed));
      for (const std::size_t more : {1U, 40U, 3U}) {
        const std::size_t first = mirror.length();
        const Block keys = keys_of(2, first, first + more), values = values_of(2, first, first + more),
                    queries = queries_of(2, first, first + more);
        const Outcome outcome = attend_one(cache, 0, id, keys, values, queries);
        mirror.append(keys, values);
        mirror.learn(cache, id);
        mirror.check(queries, outcome, {}, {.position = first});
      }
    }
}

TEST(KVCache, SealedFewerThanTheFirstTokensStayRaw) {
  CacheConfig config = small_config();
  config.first_tokens = 8;
  Cache cache(config), plain(config);
  const SequenceId id = new_sequence(cache), plain_id = new_sequence(plain);
  ASSERT_OK(feed(cache, id, 1, 0, 5));
  ASSERT_OK(feed(plain, plain_id, 1, 0, 5));
  ASSERT_OK(cache.seal(id));
  EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(plain, plain_id)));
}

TEST(KVCache, TruncateAndForkOfASealedSequence) {
  const CacheConfig config = small_config();
  Cache cache(config);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 45));
  ASSERT_OK(cache.seal(id));
  const Snapshot sealed = snapshot(cache, id);
  SequenceId child;
  ASSERT_OK(cache.fork(id, 45, child));
  EXPECT_TRUE(same_bits(snapshot(cache, child), sealed));
  ASSERT_OK(feed(cache, child, 2, 45, 60));
  ASSERT_OK(cache.truncate(child, 45));
  EXPECT_TRUE(same_bits(snapshot(cache, child), sealed));
  ASSERT_OK(cache.truncate(child, 41));
  Block keys, values;
  ASSERT_OK(read_rows(cache, child, 0, 0, 41, keys, values));
  EXPECT_TRUE(tests::same_bits(keys, sealed.keys.slice(0, 41)));
}

TEST(KVCache, EraseOfWholeEntries) {
  const CacheConfig config = small_config(2);
  Cache cache(config);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed_all(cache, id, 1, 0, 120));
  std::array<Block, 2> keys, values;
  for (std::size_t layer = 0; layer < 2; ++layer)
    ASSERT_OK(read_rows(cache, id, layer, 0, 120, keys[layer], values[layer]));
  const MemoryUse before = cache.memory();
  ASSERT_OK(cache.erase(id, 40, 40));
  EXPECT_EQ(cache.length(id), 120U);
  ASSERT_OK(cache.erase(id, 16, 48));
  EXPECT_EQ(cache.length(id), 88U);
  EXPECT_LT(cache.memory().page_bytes, before.page_bytes);
  EXPECT_STATUS(bad_shape, cache.erase(id, 50, 40));
  EXPECT_STATUS(bad_shape, cache.erase(id, 0, 89));
  for (std::size_t layer = 0; layer < 2; ++layer) {
    Block left_keys, left_values, wanted_keys = keys[layer].slice(0, 16), wanted_values = values[layer].slice(0, 16);
    wanted_keys.append(keys[layer].slice(48, 120));
    wanted_values.append(values[layer].slice(48, 120));
    ASSERT_OK(read_rows(cache, id, layer, 0, 88, left_keys, left_values));
    EXPECT_TRUE(tests::same_bits(left_keys, wanted_keys) && tests::same_bits(left_values, wanted_values));
    // Attention over what is left: raw at the end, codes before, as read.
    const Block query = queries_of(1, 0, 1);
    const Outcome outcome = attend_only(cache, layer, id, query);
    ASSERT_OK(outcome.status);
    const oracle::Tensor truth = oracle::attend(wanted_keys.exact(), wanted_values.exact(), query.exact(), 87, {});
    // Loose: the int8 query's error on 88 keys, 6 sigma of 5 |q| |k| / (127 sqrt(12) 32) per logit.
    for (std::size_t h = 0; h < 4; ++h)
      EXPECT_LE(oracle::distance(outcome.out.exact().row(0, h), truth.row(0, h), 32),
                0.05 * oracle::norm(truth.row(0, h), 32) + 0.01);
  }
  ASSERT_OK(feed_all(cache, id, 2, 88, 130));
  EXPECT_EQ(cache.length(id), 130U);
  Block after_keys, after_values;
  ASSERT_OK(read_rows(cache, id, 0, 0, 16, after_keys, after_values));
  EXPECT_TRUE(tests::same_bits(after_keys, keys[0].slice(0, 16)));
}

// The window has let go of codes whose rows are raw still; then so much is erased that these rows are the newest.
TEST(KVCache, EraseBehindAWindowThatIsShorterThanTheRawTail) {
  CacheConfig config = small_config();
  config.layers[0].window = 9;
  config.page_tokens = 32;
  config.recent_tokens = 40;
  for (const bool sealed : {false, true}) {
    Cache cache(config), fresh(config);
    const SequenceId id = new_sequence(cache), fresh_id = new_sequence(fresh);
    ASSERT_OK(feed(cache, id, 1, 0, 77));
    ASSERT_OK(cache.truncate(id, 70));  // the first page has been let go of, and is not read as codes yet
    ASSERT_OK(cache.erase(id, 12, 59));
    ASSERT_OK(feed(fresh, fresh_id, 1, 0, 12));
    ASSERT_OK(feed(fresh, fresh_id, 1, 59, 70));
    EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(fresh, fresh_id)));
    if (sealed) {
      ASSERT_OK(cache.seal(id));
      ASSERT_OK(fresh.seal(fresh_id));
    } else {
      ASSERT_OK(cache.truncate(id, 15));
      ASSERT_OK(fresh.truncate(fresh_id, 15));
    }
    for (std::size_t n = cache.length(id); n < 200; n += 5) {
      ASSERT_OK(feed(cache, id, 2, n, n + 5));
      ASSERT_OK(feed(fresh, fresh_id, 2, n, n + 5));
      const Block query = queries_of(3, n, n + 1);
      EXPECT_TRUE(same_bits(attend_only(cache, 0, id, query), attend_only(fresh, 0, fresh_id, query))) << n;
      expect_same(cache.memory(), fresh.memory());
    }
  }
}

TEST(KVCache, F01_PermuteTruncateDuplicate) {
  Cache cache(small_config());
  std::array<SequenceId, 4> ids;
  for (std::size_t s = 0; s < 4; ++s) {
    ids[s] = new_sequence(cache);
    ASSERT_OK(feed(cache, ids[s], s, 0, 37));
  }
  ids = {ids[2], ids[0], ids[3], ids[1]};
  const std::array<std::uint64_t, 4> streams{2, 0, 3, 1};
  for (const SequenceId id : ids) ASSERT_OK(cache.truncate(id, 31));
  SequenceId copy;
  ASSERT_OK(cache.fork(ids[1], 31, copy));
  const auto expect_fresh = [&](SequenceId id, std::uint64_t stream) {
    Cache fresh(small_config());
    const SequenceId fresh_id = new_sequence(fresh);
    ASSERT_OK(feed(fresh, fresh_id, stream, 0, 31));
    EXPECT_EQ(cache.length(id), 31U);
    EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(fresh, fresh_id)));
  };
  for (std::size_t s = 0; s < 4; ++s) expect_fresh(ids[s], streams[s]);
  expect_fresh(copy, streams[1]);
}

TEST(KVCache, F02_DraftsAcrossAPageBorder) {
  CacheConfig config = small_config();
  config.recent_tokens = 0;
  Cache cache(config), fresh(config);
  const SequenceId id = new_sequence(cache), fresh_id = new_sequence(fresh);
  ASSERT_OK(feed(cache, id, 1, 0, 30));
  ASSERT_OK(feed(cache, id, 6, 30, 36));
  ASSERT_OK(cache.truncate(id, 31));
  ASSERT_OK(feed(cache, id, 2, 31, 35));
  EXPECT_EQ(cache.length(id), 35U);
  ASSERT_OK(feed(fresh, fresh_id, 1, 0, 30));
  ASSERT_OK(feed(fresh, fresh_id, 6, 30, 31));
  ASSERT_OK(feed(fresh, fresh_id, 2, 31, 35));
  EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(fresh, fresh_id)));
  expect_same(cache.memory(), fresh.memory());
  EXPECT_STATUS(bad_shape, cache.truncate(id, 36));
  ASSERT_OK(cache.truncate(id, 35));
  ASSERT_OK(cache.truncate(id, 0));
  EXPECT_EQ(cache.length(id), 0U);
  ASSERT_OK(feed(cache, id, 3, 0, 5));
  EXPECT_EQ(cache.length(id), 5U);
}

TEST(KVCache, F05_TruncationIntoTheRecentWindow) {
  CacheConfig config = small_config();
  config.recent_tokens = 32;
  config.rollback_tokens = 40;
  Cache cache(config);
  const SequenceId id = new_sequence(cache);
  const auto expect_direct = [&](std::initializer_list<std::pair<std::uint64_t, std::size_t>> pieces) {
    Cache fresh(config);
    const SequenceId fresh_id = new_sequence(fresh);
    std::size_t n = 0;
    for (const auto& [stream, end] : pieces) {
      ASSERT_OK(feed(fresh, fresh_id, stream, n, end));
      n = end;
    }
    EXPECT_EQ(cache.length(id), n);
    EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(fresh, fresh_id)));
    expect_same(cache.memory(), fresh.memory());
  };
  ASSERT_OK(feed(cache, id, 1, 0, 42));
  expect_direct({{1, 42}});
  ASSERT_OK(cache.truncate(id, 16));
  expect_direct({{1, 16}});
  ASSERT_OK(feed(cache, id, 2, 16, 36));
  expect_direct({{1, 16}, {2, 36}});
  ASSERT_OK(cache.truncate(id, 0));
  expect_direct({});
  ASSERT_OK(feed(cache, id, 3, 0, 3));
  expect_direct({{3, 3}});
}

TEST(KVCache, F13_WhatWasCapturedBeforeStays) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 30));
  const std::size_t n = cache.length(id);
  const MemoryUse use = cache.memory();
  const std::size_t bytes = use.page_bytes + use.tail_bytes;
  ASSERT_OK(feed(cache, id, 1, 30, 90));
  EXPECT_EQ(n, 30U);
  EXPECT_EQ(use.page_bytes + use.tail_bytes, bytes);
  EXPECT_EQ(cache.length(id), 90U);
  EXPECT_GT(cache.memory().page_bytes, use.page_bytes);
}

}  // namespace
