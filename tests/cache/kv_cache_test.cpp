// The container: sequences, layers, memory, and what is left after each refusal. Names like F04 are cases of public
// reports.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "cache/counting_source.hpp"
#include "cache/mirror.hpp"
#include "cache/small_cache.hpp"

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

}  // namespace
