// The container: sequences, layers, memory, and what is left after each refusal. Names like F02 are cases of public
// reports.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/block.hpp"
#include "cache/counting_source.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::MemoryUse;
using turboquant::npos;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;

CacheConfig small_config(std::size_t layers = 1) {
  CacheConfig config;
  config.layers.assign(layers, LayerShape{.kv_heads = 2, .head_dim = 32});
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}

Block keys_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream, end - begin, 2, 32, 1, begin);
}
Block values_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 1000, end - begin, 2, 32, 1, begin);
}
Block queries_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 2000, end - begin, 4, 32, 1, begin);
}

Status feed(Cache& cache, SequenceId id, std::uint64_t stream, std::size_t begin, std::size_t end,
            std::size_t layer = 0) {
  return append_only(cache, layer, id, keys_of(stream, begin, end), values_of(stream, begin, end));
}
Status feed_all(Cache& cache, SequenceId id, std::uint64_t stream, std::size_t begin, std::size_t end) {
  for (std::size_t layer = 0; layer < cache.config().layers.size(); ++layer) {
    const Status status = feed(cache, id, stream, begin, end, layer);
    if (!(status == Status::ok)) return status;
  }
  return {};
}
/// The newest position's attention and everything that can be read.
struct Snapshot {
  Outcome outcome;
  Block keys, values;
};
Snapshot snapshot(Cache& cache, SequenceId id, std::size_t layer = 0, std::size_t begin = 0) {
  Snapshot shot;
  const std::size_t length = cache.length(id);
  EXPECT_OK(read_rows(cache, id, layer, begin, length, shot.keys, shot.values));
  if (length != 0) {
    shot.outcome = attend_only(cache, layer, id, queries_of(1, 0, 1));
    EXPECT_OK(shot.outcome.status);
  }
  return shot;
}
bool same_bits(const Snapshot& a, const Snapshot& b) {
  return tests::same_bits(a.outcome, b.outcome) && tests::same_bits(a.keys, b.keys) &&
         tests::same_bits(a.values, b.values);
}
void expect_same(const MemoryUse& a, const MemoryUse& b) {
  EXPECT_EQ(a.page_bytes, b.page_bytes);
  EXPECT_EQ(a.tail_bytes, b.tail_bytes);
}

TEST(KVCache, SequencesComeEmptyAndGoCompletely) {
  Cache cache(small_config());
  const MemoryUse before = cache.memory();
  const SequenceId a = new_sequence(cache), b = new_sequence(cache);
  EXPECT_FALSE(a == b);
  EXPECT_EQ(cache.length(a), 0U);
  ASSERT_OK(feed(cache, a, 1, 0, 100));
  EXPECT_EQ(cache.length(a), 100U);
  EXPECT_EQ(cache.length(b), 0U);
  EXPECT_GT(cache.memory().page_bytes, 0U);
  EXPECT_GT(cache.memory().tail_bytes, 0U);
  cache.release(a);
  cache.release(b);
  expect_same(cache.memory(), before);
  EXPECT_EQ(before.page_bytes, 0U);
  EXPECT_EQ(before.tail_bytes, 0U);
}

TEST(KVCache, StaleIdsAreUnknown) {
  Cache cache(small_config());
  const SequenceId stale = new_sequence(cache);
  ASSERT_OK(feed(cache, stale, 1, 0, 20));
  cache.release(stale);
  const SequenceId reused = new_sequence(cache);
  EXPECT_FALSE(stale == reused);
  ASSERT_OK(feed(cache, reused, 2, 0, 5));
  for (const SequenceId id :
       {stale, SequenceId{}, SequenceId{reused.index + 1000, 0}, SequenceId{reused.index, reused.generation + 1}}) {
    SequenceId child = reused;
    Block keys, values;
    EXPECT_STATUS(unknown_sequence, feed(cache, id, 1, 0, 1));
    EXPECT_STATUS(unknown_sequence, attend_only(cache, 0, id, queries_of(1, 0, 1)).status);
    EXPECT_STATUS(unknown_sequence, cache.fork(id, 0, child));
    EXPECT_STATUS(unknown_sequence, cache.truncate(id, 0));
    EXPECT_STATUS(unknown_sequence, cache.erase(id, 0, 0));
    EXPECT_STATUS(unknown_sequence, cache.reserve(id, 1));
    EXPECT_STATUS(unknown_sequence, cache.seal(id));
    EXPECT_STATUS(unknown_sequence, read_rows(cache, id, 0, 0, 1, keys, values));
    EXPECT_EQ(cache.length(id), 0U);
    EXPECT_TRUE(child == reused);
    cache.release(id);
  }
  EXPECT_EQ(cache.length(reused), 5U);
}

TEST(KVCache, LengthIsTheMinimumOverLayers) {
  Cache cache(small_config(3));
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 30, 0));
  EXPECT_EQ(cache.length(id), 0U);
  ASSERT_OK(feed(cache, id, 1, 0, 30, 1));
  ASSERT_OK(feed(cache, id, 1, 0, 20, 2));
  EXPECT_EQ(cache.length(id), 20U);
}

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

TEST(KVCache, ReserveMakesAppendsSafe) {
  CountingSource memory;
  CacheConfig config = small_config(3);
  config.first_tokens = 4;
  config.memory = memory.source();
  {
    Cache cache(config);
    const SequenceId id = new_sequence(cache);
    ASSERT_OK(feed_all(cache, id, 1, 0, 37));
    ASSERT_OK(cache.reserve(id, 200));
    EXPECT_EQ(cache.length(id), 37U);
    memory.allow(0);
    const SequenceId other = new_sequence(cache);  // takes what is left of the pool, not what is reserved
    std::size_t grabbed = 0;
    while (grabbed < 100000 && feed_all(cache, other, 2, grabbed, grabbed + 16) == Status::ok) grabbed += 16;
    EXPECT_LT(grabbed, 100000U) << "the pool never ended";
    for (std::size_t n = 37; n < 237; n += 25)
      for (std::size_t layer = 0; layer < 3; ++layer)
        ASSERT_OK(attend_one(cache, layer, id, keys_of(1, n, n + 25), values_of(1, n, n + 25), queries_of(1, n, n + 25))
                      .status);
    EXPECT_EQ(cache.length(id), 237U);
    // A child may be refused, but then it changes nothing.
    cache.release(other);
    memory.allow(npos);
  }
}

TEST(KVCache, MaxBytesRefusesAndChangesNothing) {
  CacheConfig config = small_config(2);
  config.max_bytes = 200000;
  config.rollback_tokens = 24;  // the step that fails between layers is taken back exactly
  Cache cache(config);
  const SequenceId first = new_sequence(cache), second = new_sequence(cache);
  ASSERT_OK(feed_all(cache, first, 1, 0, 100));
  std::size_t length = 0;
  Status status;
  while (length < 100000) {
    const MemoryUse before = cache.memory();
    const Snapshot shot = length != 0 ? snapshot(cache, second) : Snapshot{};
    std::array<BatchItem, 2> items;
    const Block keys = keys_of(2, length, length + 24), values = values_of(2, length, length + 24),
                other_keys = keys_of(1, 100, 101), other_values = values_of(1, 100, 101);
    status = append_only(cache, 0, second, keys, values);
    if (status == Status::ok) status = append_only(cache, 1, second, keys, values);
    const MemoryUse after = cache.memory();
    EXPECT_LE(after.page_bytes + after.tail_bytes, config.max_bytes);
    if (!(status == Status::ok)) {
      EXPECT_TRUE(status == Status::out_of_memory);
      ASSERT_OK(cache.truncate(second, cache.length(second)));
      EXPECT_EQ(cache.length(second), length);
      const MemoryUse again = cache.memory();
      EXPECT_EQ(again.page_bytes, before.page_bytes);
      EXPECT_LE(again.tail_bytes, before.tail_bytes);  // raw rows for a rollback from the greater length are gone
      EXPECT_TRUE(length == 0 || same_bits(snapshot(cache, second), shot));
      // The whole batch is refused with the one item that has no room.
      const Block many_keys = keys_of(2, length, length + 4000), many_values = values_of(2, length, length + 4000);
      items[0].sequence = first;
      items[0].keys = other_keys.rows();
      items[0].values = other_values.rows();
      items[1].sequence = second;
      items[1].keys = many_keys.rows();
      items[1].values = many_values.rows();
      EXPECT_STATUS(out_of_memory, turboquant::attend(cache, 0, items));
      EXPECT_STATUS(out_of_memory, cache.reserve(second, 4000));
      expect_same(cache.memory(), again);
      EXPECT_EQ(cache.length(first), 100U);
      break;
    }
    length += 24;
  }
  ASSERT_TRUE(status == Status::out_of_memory) << "the limit was never reached";
  EXPECT_GT(length, 100U);
  // A normal event: the engine releases a sequence and goes on, with the results of a cache that never met the limit.
  cache.release(first);
  ASSERT_OK(feed_all(cache, second, 2, length, length + 24));
  CacheConfig free_config = config;
  free_config.max_bytes = 0;
  Cache free_cache(free_config);
  const SequenceId id = new_sequence(free_cache);
  ASSERT_OK(feed_all(free_cache, id, 2, 0, length + 24));
  for (std::size_t layer = 0; layer < 2; ++layer)
    EXPECT_TRUE(same_bits(snapshot(cache, second, layer), snapshot(free_cache, id, layer)));
}

TEST(KVCache, AFailingMemorySourceLeavesEverythingAsItWas) {
  const Block keys = gaussian_block(1, 128, 8, 128), values = gaussian_block(2, 128, 8, 128);
  for (std::size_t allowed = 0; allowed < 6; ++allowed) {
    CountingSource memory;
    CacheConfig config = small_config(2);
    config.page_tokens = 256;
    config.layers.assign(2, LayerShape{.kv_heads = 8, .head_dim = 128});  // slabs end soon
    config.memory = memory.source();
    config.rollback_tokens = 128;
    {
      Cache cache(config);
      const SequenceId id = new_sequence(cache);
      memory.allow(allowed);
      std::size_t length = 0;
      Status status;
      while (length < 8000) {
        const MemoryUse before = cache.memory();
        status = append_only(cache, 0, id, keys, values);
        if (!(status == Status::ok)) {
          expect_same(cache.memory(), before);
          break;
        }
        ASSERT_OK(cache.truncate(id, cache.length(id)));
        ASSERT_OK(append_only(cache, 0, id, keys, values));
        status = append_only(cache, 1, id, keys, values);
        if (!(status == Status::ok)) break;
        length += 128;
      }
      EXPECT_TRUE(status == Status::out_of_memory) << allowed;
      EXPECT_EQ(cache.length(id), length);
      EXPECT_GT(memory.refusals(), 0U);
      ASSERT_OK(cache.truncate(id, length));
      memory.allow(npos);
      ASSERT_OK(append_only(cache, 0, id, keys, values));
      ASSERT_OK(append_only(cache, 1, id, keys, values));
      EXPECT_EQ(cache.length(id), length + 128);
    }
    EXPECT_EQ(memory.bytes(), 0U);
  }
}

TEST(KVCache, MemoryUseIsWhatWasAllocated) {
  CountingSource memory;
  CacheConfig config = small_config(2);
  config.memory = memory.source();
  {
    Cache cache(config);
    const SequenceId id = new_sequence(cache);
    for (std::size_t n = 0; n < 400; n += 40) {
      ASSERT_OK(feed_all(cache, id, 1, n, n + 40));
      const MemoryUse use = cache.memory();
      EXPECT_LE(use.page_bytes + use.tail_bytes, memory.bytes());
      // The promise of section 8: never more raw than first + recent + page + rollback tokens, in tiles of 16.
      const std::size_t row = 2 * 2 * 32 * 2 * 2;
      EXPECT_LE(use.tail_bytes, row * (16 + 16 + 8 + 2 * 16));
    }
    EXPECT_GT(memory.blocks(), 0U);
  }
  EXPECT_EQ(memory.bytes(), 0U);
}

TEST(KVCache, TrueBitsPerCoordinate) {
  // B + 16/128 for scales + 8/64 for centres, twice (keys and values), and the page header.
  const auto bits = [](auto cache_tag, std::uint8_t center_bits) {
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 8, .head_dim = 128, .center_bits = center_bits}};
    config.recent_tokens = config.rollback_tokens = 0;
    typename decltype(cache_tag)::type cache(config);
    const SequenceId id = new_sequence(cache);
    EXPECT_OK(append_only(cache, 0, id, gaussian_block(1, 128, 8, 128), gaussian_block(2, 128, 8, 128)));
    const MemoryUse use = cache.memory();
    EXPECT_EQ(use.tail_bytes, 0U);
    EXPECT_NEAR(use.bits_per_coordinate, static_cast<double>(use.page_bytes) * 8 / (2 * 8 * 128 * 128), 1e-9);
    return use.bits_per_coordinate;
  };
  const double four = bits(std::type_identity<KVCache<turboquant::TQ4>>{}, 8),
               three = bits(std::type_identity<KVCache<turboquant::TQ3>>{}, 8);
  EXPECT_GE(four, 4.25);
  EXPECT_LE(four, 4.32);
  EXPECT_GE(three, 3.25);
  EXPECT_LE(three, 3.32);
  const double no_center = bits(std::type_identity<KVCache<turboquant::TQ4>>{}, 0),
               wide_center = bits(std::type_identity<KVCache<turboquant::TQ4>>{}, 16);
  EXPECT_GE(no_center, 4.125);
  EXPECT_LE(no_center, 4.19);
  EXPECT_NEAR(wide_center - four, 0.125, 1e-9);
}

TEST(KVCache, F15_AWindowedLayerLetsGo) {
  CountingSource memory;
  CacheConfig config = small_config();
  config.layers[0].window = 128;
  config.memory = memory.source();
  CacheConfig twin_config = small_config();
  {
    Cache cache(config), twin(twin_config);
    const SequenceId id = new_sequence(cache), twin_id = new_sequence(twin);
    Mirror mirror(config, 0, codes_of(4)), twin_mirror(twin_config, 0, codes_of(4));
    std::size_t most = 0;
    for (std::size_t n = 0; n < 1000; ++n) {
      const Block keys = keys_of(1, n, n + 1), values = values_of(1, n, n + 1), query = queries_of(1, n, n + 1);
      const Outcome outcome = attend_one(cache, 0, id, keys, values, query);
      ASSERT_OK(feed(twin, twin_id, 1, n, n + 1));
      mirror.append(keys, values);
      twin_mirror.append(keys, values);
      const bool look = n == 127 || n == 128 || n == 129 || n == 255 || n == 256 || n == 257 || n == 999;
      if (look) {
        twin_mirror.learn(twin, twin_id);
        mirror.learn_from(twin_mirror);
        mirror.check(query, outcome, {}, {.position = n});
      }
      if (n == 500) most = cache.memory().page_bytes + cache.memory().tail_bytes;
      ASSERT_TRUE(n <= 500 || cache.memory().page_bytes + cache.memory().tail_bytes <= most + most / 8) << n;
    }
    EXPECT_EQ(cache.length(id), 1000U);
    EXPECT_LT(4 * most, twin.memory().page_bytes + twin.memory().tail_bytes);

    // Exact within the rollback, refused where the window has let go.
    const Outcome before = attend_only(cache, 0, id, queries_of(1, 999, 1000));
    const MemoryUse use = cache.memory();
    SequenceId child;
    EXPECT_STATUS(behind_window, cache.truncate(id, 600));
    EXPECT_STATUS(behind_window, cache.fork(id, 600, child));
    EXPECT_TRUE(child == SequenceId{});
    Block keys, values;
    EXPECT_STATUS(behind_window, read_rows(cache, id, 0, 500, 501, keys, values));
    EXPECT_EQ(cache.length(id), 1000U);
    expect_same(cache.memory(), use);
    EXPECT_TRUE(same_bits(before, attend_only(cache, 0, id, queries_of(1, 999, 1000))));
    ASSERT_OK(cache.truncate(id, 992));
    ASSERT_OK(twin.truncate(twin_id, 992));
    Block twin_keys, twin_values;
    ASSERT_OK(read_rows(cache, id, 0, 992 - 128, 992, keys, values));
    ASSERT_OK(read_rows(twin, twin_id, 0, 992 - 128, 992, twin_keys, twin_values));
    EXPECT_TRUE(tests::same_bits(keys, twin_keys) && tests::same_bits(values, twin_values));
    ASSERT_OK(cache.truncate(id, 0));  // nothing freed is needed for that
    EXPECT_EQ(cache.length(id), 0U);
  }
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

TEST(KVCache, ReadRefusesWhatItCannotGive) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 50));
  Block keys(10, 2, 32, 7.0F), values(10, 2, 32, 7.0F), narrow(10, 2, 16, 7.0F), fewer(9, 2, 32, 7.0F),
      heads(10, 1, 32, 7.0F);
  EXPECT_OK(cache.read(id, 0, 40, keys.rows(), values.rows()));
  keys = values = Block(10, 2, 32, 7.0F);
  EXPECT_STATUS(bad_layer, cache.read(id, 1, 0, keys.rows(), values.rows()));
  EXPECT_STATUS(bad_shape, cache.read(id, 0, 41, keys.rows(), values.rows()));
  EXPECT_STATUS(bad_shape, cache.read(id, 0, npos, keys.rows(), values.rows()));
  EXPECT_STATUS(bad_shape, cache.read(id, 0, 0, narrow.rows(), values.rows()));
  EXPECT_STATUS(bad_shape, cache.read(id, 0, 0, keys.rows(), heads.rows()));
  EXPECT_STATUS(bad_shape, cache.read(id, 0, 0, keys.rows(), fewer.rows()));
  for (const float x : keys.numbers) EXPECT_EQ(x, 7.0F);
  EXPECT_OK(cache.read(id, 0, 0, keys.rows(), turboquant::Rows()));  // keys alone, values alone
  EXPECT_OK(cache.read(id, 0, 0, turboquant::Rows(), values.rows()));
  for (const float x : keys.numbers) EXPECT_NE(x, 7.0F);
  for (const float x : values.numbers) EXPECT_NE(x, 7.0F);
}

TEST(KVCache, LayersDifferInShapeWindowAndFormat) {
  CacheConfig config = small_config(0);
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 64, .value_dim = 96, .format = 1},
                   LayerShape{.kv_heads = 4, .head_dim = 32, .window = 40, .format = 0, .center_bits = 0},
                   LayerShape{.kv_heads = 2, .head_dim = 80, .format = 2, .center_bits = 16}};
  const std::array<unsigned, 3> bits{4, 8, 2};  // of the layers' formats
  KVCache<turboquant::TQ8, turboquant::TQ4, turboquant::TQ2> cache(config);
  const SequenceId id = new_sequence(cache);
  std::vector<Mirror> mirrors;
  for (std::size_t layer = 0; layer < 3; ++layer) mirrors.emplace_back(config, layer, codes_of(bits[layer]));
  for (const std::size_t n : {20U, 10U, 1U, 1U, 16U, 30U}) {
    for (std::size_t layer = 0; layer < 3; ++layer) {
      const LayerShape& shape = config.layers[layer];
      const std::size_t first = mirrors[layer].length();
      const Block keys = gaussian_block(layer, n, shape.kv_heads, shape.head_dim, 1, first),
                  values = gaussian_block(10 + layer, n, shape.kv_heads,
                                          shape.value_dim != 0 ? shape.value_dim : shape.head_dim, 1, first),
                  queries = gaussian_block(20 + layer, n, 4, shape.head_dim, 1, first);
      const Outcome outcome = attend_one(cache, layer, id, keys, values, queries);
      mirrors[layer].append(keys, values);
      mirrors[layer].learn(cache, id);
      mirrors[layer].check(queries, outcome, {}, {.position = first});
    }
    EXPECT_EQ(cache.length(id), mirrors[0].length());
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

TEST(KVCache, F04_OneTokenAtATimeIsCompressedLikeAPrompt) {
  CacheConfig config = small_config();
  config.recent_tokens = 0;
  config.rollback_tokens = 0;
  std::vector<Snapshot> shots;
  std::vector<MemoryUse> uses;
  const std::vector<std::vector<std::size_t>> splits{{40}, std::vector<std::size_t>(40, 1), {7, 33}, {16, 16, 8}};
  for (const auto& split : splits) {
    Cache cache(config);
    const SequenceId id = new_sequence(cache);
    std::size_t n = 0;
    for (const std::size_t count : split) {
      ASSERT_OK(feed(cache, id, 1, n, n + count));
      n += count;
    }
    shots.push_back(snapshot(cache, id));
    uses.push_back(cache.memory());
    EXPECT_TRUE(same_bits(shots.front(), shots.back()));
    expect_same(uses.front(), uses.back());
  }
  EXPECT_FALSE(shots[0].keys.slice(0, 32).exact().numbers == keys_of(1, 0, 32).bfloat16_rounded().numbers)
      << "nothing was compressed";
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

TEST(KVCache, F16_SequencesOfABatchKeepToThemselves) {
  // Another sequence 1e4 times as large in the same call, and outliers at different positions, with first tokens kept.
  CacheConfig config = small_config();
  config.first_tokens = 4;
  config.recent_tokens = 0;
  Block keys = keys_of(1, 0, 60), values = values_of(1, 0, 60), other_keys = keys, other_values = values;
  for (float& x : other_keys.numbers) x *= 1e4F;
  for (float& x : other_values.numbers) x *= 1e4F;
  for (std::size_t i = 0; i < 32; ++i) {
    keys.row(0)[i] *= 50;
    other_keys.row(7)[i] *= 50;
  }
  Cache alone(config), together(config);
  const SequenceId id = new_sequence(alone), x = new_sequence(together), y = new_sequence(together);
  ASSERT_OK(append_only(alone, 0, id, keys, values));
  std::array<BatchItem, 2> items;
  items[0].sequence = y;
  items[0].keys = other_keys.rows();
  items[0].values = other_values.rows();
  items[1].sequence = x;
  items[1].keys = keys.rows();
  items[1].values = values.rows();
  ASSERT_OK(turboquant::attend(together, 0, items));
  EXPECT_TRUE(same_bits(snapshot(alone, id), snapshot(together, x)));
  // Each keeps its own first tokens, exactly.
  Block first_keys, first_values;
  ASSERT_OK(read_rows(together, y, 0, 0, 4, first_keys, first_values));
  EXPECT_EQ(first_keys.exact().numbers, other_keys.slice(0, 4).bfloat16_rounded().numbers);
  ASSERT_OK(read_rows(together, x, 0, 0, 4, first_keys, first_values));
  EXPECT_EQ(first_keys.exact().numbers, keys.slice(0, 4).bfloat16_rounded().numbers);
}

TEST(KVCache, A03_NothingIsANumberOfTokens) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 20));
  EXPECT_OK(append_only(cache, 0, id, Block(), Block()));
  const Block no_keys(0, 2, 32);
  BatchItem item;
  item.sequence = id;
  item.keys = item.values = turboquant::ConstRows(no_keys.numbers.data(), 0, 2, 32);
  item.queries = turboquant::ConstRows(no_keys.numbers.data(), 0, 4, 32);
  EXPECT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
  EXPECT_OK(attend_only(cache, 0, id, Block()).status);
  EXPECT_OK(cache.read(id, 0, 20, turboquant::Rows(), turboquant::Rows()));
  EXPECT_OK(cache.reserve(id, 0));
  EXPECT_EQ(cache.length(id), 20U);
}

TEST(KVCache, A04_CompressionBeginsExactlyAtTheBorder) {
  CacheConfig config = small_config();
  config.recent_tokens = 48;  // with a page of 16: the 64th token codes the first page
  for (const std::size_t n : {63U, 64U, 65U})
    for (const bool streamed : {false, true}) {
      Cache cache(config);
      const SequenceId id = new_sequence(cache), other = new_sequence(cache);
      for (std::size_t begin = 0; begin < n; begin += streamed ? 1 : n) {
        const std::size_t end = streamed ? begin + 1 : n;
        const Block keys = keys_of(1, begin, end), values = values_of(1, begin, end);
        std::array<BatchItem, 2> items;
        items[0].sequence = id;
        items[1].sequence = other;
        for (BatchItem& item : items) {
          item.keys = keys.rows();
          item.values = values.rows();
        }
        ASSERT_OK(turboquant::attend(cache, 0, items));
      }
      for (const SequenceId sequence : {id, other}) {
        Block keys, values;
        ASSERT_OK(read_rows(cache, sequence, 0, 0, n, keys, values));
        const std::vector<double> raw = keys_of(1, 0, n).bfloat16_rounded().numbers, found = keys.exact().numbers;
        const std::size_t coded = n >= 64 ? 16 : 0;
        for (std::size_t t = 0; t < n; ++t) {
          bool equal = true;
          for (std::size_t i = 0; i < 64; ++i) equal = equal && raw[t * 64 + i] == found[t * 64 + i];
          EXPECT_EQ(equal, t >= coded) << t << " of " << n;
        }
      }
    }
}

/// The words of a refusal, and that the constructor uses the same.
std::string refusal(const CacheConfig& config) {
  const std::string words = turboquant::why_invalid(config, 1);
  if (words.empty()) return words;
  try {
    const Cache cache(config);
    ADD_FAILURE() << "constructed although: " << words;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
  return words;
}
testing::AssertionResult says(const std::string& words, std::initializer_list<const char*> wanted) {
  for (const char* word : wanted)
    if (words.find(word) == std::string::npos)
      return testing::AssertionFailure() << '"' << words << "\" does not say " << word;
  return testing::AssertionSuccess();
}

TEST(KVCache, InvalidConfigurationsAreRefusedInWords) {
  const CacheConfig good = small_config();
  EXPECT_EQ(turboquant::why_invalid(good, 1), "");
  EXPECT_EQ(turboquant::why_invalid(CacheConfig{}, 1), "");
  CacheConfig config = good;
  config.layers.clear();
  EXPECT_TRUE(says(refusal(config), {"layer"}));
  for (const auto& [dim, nearest] : {std::pair<std::uint32_t, const char*>{40, "32"},
                                     {72, "64"},
                                     {100, "96"},
                                     {104, "96"},
                                     {136, "128"},
                                     {16, "32"},
                                     {0, "32"},
                                     {1040, "1024"},
                                     {(1U << 30) + 1, "1024"}}) {
    config = good;
    config.layers[0].head_dim = dim;
    EXPECT_TRUE(says(refusal(config), {"head_dim", std::to_string(dim).c_str(), nearest}));
    if (dim == 0) continue;  // as a value_dim: the same as head_dim
    config = good;
    config.layers[0].value_dim = dim;
    EXPECT_TRUE(says(refusal(config), {"value_dim", std::to_string(dim).c_str(), nearest}));
  }
  config = good;
  config.layers[0].kv_heads = 0;
  EXPECT_TRUE(says(refusal(config), {"kv_heads"}));
  config = good;
  config.layers[0].format = 1;
  EXPECT_TRUE(says(refusal(config), {"format", "1"}));
  EXPECT_EQ(turboquant::why_invalid(config, 2), "");
  for (const int bits : {1, 7, 9, 15, 32, 255}) {
    config = good;
    config.layers[0].center_bits = static_cast<std::uint8_t>(bits);
    EXPECT_TRUE(says(refusal(config), {"center_bits", std::to_string(bits).c_str()}));
  }
  for (const std::size_t page : {std::size_t{0}, std::size_t{8}, std::size_t{20}, std::size_t{272}, npos}) {
    config = good;
    config.page_tokens = page;
    EXPECT_TRUE(says(refusal(config), {"page_tokens", "16", "256"}));
  }
  for (const std::size_t page : {16U, 48U, 64U, 256U}) {
    config = good;
    config.page_tokens = page;
    EXPECT_EQ(turboquant::why_invalid(config, 1), "");
  }
  // The second layer is named.
  config = small_config(2);
  config.layers[1].head_dim = 72;
  EXPECT_TRUE(says(refusal(config), {"1", "head_dim", "72"}));
  // Half a memory source is none.
  CountingSource memory;
  config = good;
  config.memory = memory.source();
  config.memory.release = nullptr;
  EXPECT_TRUE(says(refusal(config), {"memory"}));
  config.memory = memory.source();
  config.memory.allocate = nullptr;
  EXPECT_TRUE(says(refusal(config), {"memory"}));
  for (auto member : {&CacheConfig::recent_tokens, &CacheConfig::first_tokens, &CacheConfig::rollback_tokens}) {
    config = good;
    config.*member = npos;  // sums of these must not wrap
    if (turboquant::why_invalid(config, 1).empty()) {
      Cache cache(config);
      const SequenceId id = new_sequence(cache);
      ASSERT_OK(feed(cache, id, 1, 0, 40));
      Block keys, values;
      ASSERT_OK(read_rows(cache, id, 0, 0, 40, keys, values));
      EXPECT_EQ(keys.exact().numbers == keys_of(1, 0, 40).bfloat16_rounded().numbers,
                member != &CacheConfig::rollback_tokens);
    }
  }
}

TEST(KVCache, TellsItsConfiguration) {
  const CacheConfig config = small_config(3);
  const Cache cache(config);
  EXPECT_EQ(cache.config().layers.size(), 3U);
  EXPECT_EQ(cache.config().page_tokens, 16U);
  EXPECT_EQ(cache.config().layers[2].head_dim, 32U);
}

}  // namespace
