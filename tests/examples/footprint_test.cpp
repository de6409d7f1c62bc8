// Planned bytes against memory() of real caches, token by token.
#include <plan/footprint.hpp>

#include <eval/formats.hpp>
#include <turboquant/turboquant.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "cache/block.hpp"

namespace {

using namespace turboquant;
using turboquant_plan::Footprint;
using turboquant_plan::footprint;
using turboquant_plan::Load;
using Cache = KVCache<TQ8, TQ4, TQ3, TQ2>;

Status append(Cache& cache, SequenceId id, std::size_t tokens) {
  for (std::size_t l = 0; l < cache.config().layers.size(); ++l) {
    const LayerShape& shape = cache.config().layers[l];
    const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
    const Status status = tests::append_only(cache, l, id, tests::Block(tokens, shape.kv_heads, shape.head_dim, 1),
                                             tests::Block(tokens, shape.kv_heads, value_dim, 1));
    if (status != Status::ok) return status;
  }
  return {};
}

std::string text_of(const CacheConfig& config) {
  std::string text = fmt::format("page {}, recent {}, first {}, rollback {}, windows", config.page_tokens,
                                 config.recent_tokens, config.first_tokens, config.rollback_tokens);
  for (const LayerShape& layer : config.layers) text += fmt::format(" {}", layer.window);
  return text;
}

::testing::AssertionResult agrees(const Cache& cache, const Load& load) {
  const Footprint planned = footprint(cache.config(), load);
  const MemoryUse use = cache.memory();
  if (planned.page_bytes == use.page_bytes && planned.tail_bytes == use.tail_bytes) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << text_of(cache.config()) << "; " << load.tokens << " tokens: pages "
                                       << planned.page_bytes << " planned, " << use.page_bytes << " held; tails "
                                       << planned.tail_bytes << " planned, " << use.tail_bytes << " held";
}

// One layer each, so that nothing cancels.
std::vector<CacheConfig> configurations() {
  std::vector<CacheConfig> all;
  for (const std::size_t page : {16U, 64U}) {
    for (const std::size_t recent : {0U, 16U, 64U, 100U}) {
      for (const std::size_t first : {0U, 5U, 48U}) {
        for (const std::size_t rollback : {0U, 32U, 50U}) {
          for (const std::uint32_t window : {0U, 1U, 40U, 150U}) {
            CacheConfig config;
            config.page_tokens = page;
            config.recent_tokens = recent;
            config.first_tokens = first;
            config.rollback_tokens = rollback;
            config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32, .window = window}};
            all.push_back(config);
          }
        }
      }
    }
  }
  return all;
}

// Shapes whose blocks are rounded up, and one of each format.
CacheConfig mixed() {
  CacheConfig config;
  config.first_tokens = 4;
  config.layers = {LayerShape{.kv_heads = 3, .head_dim = 48, .value_dim = 32, .format = 0, .center_bits = 16},
                   LayerShape{.kv_heads = 1, .head_dim = 80, .window = 70, .format = 1},
                   LayerShape{.kv_heads = 2, .head_dim = 32, .value_dim = 64, .format = 2, .center_bits = 0},
                   LayerShape{.kv_heads = 17, .head_dim = 32, .window = 1, .format = 3}};
  return config;
}

TEST(Footprint, IsThatOfACacheAtEveryLength) {
  for (const CacheConfig& config : configurations()) {
    Cache cache(config);
    const SequenceId id = tests::new_sequence(cache);
    ASSERT_TRUE(agrees(cache, {}));
    for (std::size_t tokens = 1; tokens <= 420; ++tokens) {
      ASSERT_EQ(append(cache, id, 1), Status::ok);
      ASSERT_TRUE(agrees(cache, {tokens}));
    }
  }
}

TEST(Footprint, DoesNotDependOnHowTokensCame) {
  for (const CacheConfig& config : configurations()) {
    Cache cache(config);
    const SequenceId id = tests::new_sequence(cache);
    std::size_t tokens = 0;
    for (const std::size_t chunk : {1U, 15U, 33U, 64U, 200U, 7U, 129U, 1U, 1U}) {
      ASSERT_EQ(append(cache, id, chunk), Status::ok);
      tokens += chunk;
      ASSERT_TRUE(agrees(cache, {tokens}));
    }
    const std::size_t back = (std::min)(config.rollback_tokens, std::size_t{20});
    ASSERT_EQ(cache.truncate(id, tokens - back), Status::ok);
    ASSERT_EQ(append(cache, id, back + 1), Status::ok);
    ASSERT_TRUE(agrees(cache, {tokens + 1})) << "after a rollback";
  }
}

TEST(Footprint, AddsUpLayersOfAllFormats) {
  Cache cache(mixed());
  const SequenceId id = tests::new_sequence(cache);
  for (std::size_t tokens = 1; tokens <= 300; ++tokens) {
    ASSERT_EQ(append(cache, id, 1), Status::ok);
    ASSERT_TRUE(agrees(cache, {tokens}));
  }
}

TEST(Footprint, CountsSharedTokensOnce) {
  for (const CacheConfig& config : configurations()) {
    for (const std::size_t shared : {0U, 3U, 5U, 30U, 160U, 201U}) {
      Cache cache(config);
      std::vector<SequenceId> ids{tests::new_sequence(cache)};
      ASSERT_EQ(append(cache, ids[0], shared), Status::ok);
      while (ids.size() < 3) ASSERT_EQ(cache.fork(ids[0], shared, ids.emplace_back()), Status::ok);
      ASSERT_TRUE(agrees(cache, {shared, 3, shared}));
      std::size_t tokens = shared;
      for (const std::size_t chunk : {1U, 14U, 30U, 100U, 64U}) {
        for (const SequenceId id : ids) ASSERT_EQ(append(cache, id, chunk), Status::ok);
        tokens += chunk;
        ASSERT_TRUE(agrees(cache, {tokens, 3, shared})) << shared << " shared";
      }
    }
  }
}

TEST(Footprint, OfF16IsTwoBytesPerVisibleCoordinate) {
  const std::vector<LayerShape> llama(80, LayerShape{.kv_heads = 8, .head_dim = 128});
  EXPECT_EQ(turboquant_plan::f16_bytes(llama, {128'000}), 41'943'040'000U);
  EXPECT_EQ(turboquant_plan::f16_bytes(llama, {128'000, 3, 28'000}), 41'943'040'000U / 128 * (28 + 300));
  const std::vector<LayerShape> windowed(8, LayerShape{.kv_heads = 20, .head_dim = 128, .window = 4096});
  EXPECT_EQ(turboquant_plan::f16_bytes(windowed, {4096}), 335'544'320U);
  EXPECT_EQ(turboquant_plan::f16_bytes(windowed, {128'000}), 335'544'320U);
  EXPECT_EQ(turboquant_plan::f16_bytes(windowed, {1024}), 335'544'320U / 4);
}

TEST(Footprint, IsExactBeyondTwoToThe33CoordinatesOfALayer) {
  CacheConfig config;
  config.recent_tokens = config.rollback_tokens = 0;
  config.layers = {LayerShape{.kv_heads = 8, .head_dim = 128, .format = 1}};
  // Centre, scales and codes of 64 tokens, keys and values; and the scales of the centres.
  constexpr std::uint64_t kPage = 8 * 2 * (128 + 2 * 64 + 64 * 128 / 2) + 64, kTile = 16 * 8 * 2 * 128 * 2;
  Cache cache(config);
  const SequenceId id = tests::new_sequence(cache);
  ASSERT_EQ(append(cache, id, 64 + 5), Status::ok);
  ASSERT_EQ(cache.memory().page_bytes, kPage);
  ASSERT_EQ(cache.memory().tail_bytes, kTile);
  for (const unsigned shift : {22U, 23U, 40U}) {  // 2^33, 2^34 and 2^51 coordinates
    const std::uint64_t tokens = (std::uint64_t{1} << shift) + 5;
    const Footprint one = footprint(config, {tokens}), three = footprint(config, {tokens, 3});
    EXPECT_EQ(one.page_bytes, (tokens - 5) / 64 * kPage);
    EXPECT_EQ(one.tail_bytes, kTile);
    EXPECT_EQ(three.page_bytes, 3 * one.page_bytes);
    EXPECT_EQ(turboquant_plan::f16_bytes(config.layers, {tokens}), tokens * 8 * 2 * 128 * 2);
    EXPECT_GE(turboquant_plan::slab_bytes(config, {tokens}), one.bytes());
    EXPECT_LE(turboquant_plan::slab_bytes(config, {tokens}), one.bytes() + one.bytes() / 30 + (std::uint64_t{2} << 21));
  }
}

TEST(Footprint, StaysAtTheLargestNumber) {
  CacheConfig config;
  config.layers.assign(1000, LayerShape{.kv_heads = 65536, .head_dim = 1024});
  const Load load{std::uint64_t{1} << 30, std::uint64_t{1} << 20};
  EXPECT_EQ(footprint(config, load).bytes(), turboquant_plan::kTooMany);
  EXPECT_EQ(turboquant_plan::f16_bytes(config.layers, load), turboquant_plan::kTooMany);
  EXPECT_EQ(turboquant_plan::slab_bytes(config, load), turboquant_plan::kTooMany);
}

}  // namespace
