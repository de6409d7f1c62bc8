// logits: unscaled, unmasked products of queries with every key as the newest position sees it.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <vector>

#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

CacheConfig small_config(std::uint32_t kv_heads, std::uint32_t head_dim) {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = kv_heads, .head_dim = head_dim}};
  config.page_tokens = 32;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}

template <class Cache>
std::vector<float> logits_of(const Cache& cache, SequenceId id, const Block& queries) {
  std::vector<float> out(queries.tokens * queries.heads * cache.length(id), kNaN);
  EXPECT_OK(turboquant::logits(cache, id, 0, queries.rows(), out.data()));
  return out;
}

template <class F>
void check_format(unsigned bits) {
  for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}}) {
    CacheConfig config = small_config(2, 128);
    config.layers[0].center_bits = center_bits;
    config.first_tokens = 3;
    KVCache<F> cache(config);
    const SequenceId id = new_sequence(cache);
    Mirror mirror(config, 0, codes_of(bits));
    for (const std::size_t n : {1U, 30U, 19U, 50U, 1U}) {
      const Block keys = gaussian_block(1, n, 2, 128, 1, mirror.length()),
                  values = gaussian_block(2, n, 2, 128, 1, mirror.length());
      ASSERT_OK(append_only(cache, 0, id, keys, values));
      mirror.append(keys, values);
      mirror.learn(cache, id);
      const Block queries = gaussian_block(3, 3, 6, 128);
      mirror.check_logits(queries, logits_of(cache, id, queries));
    }
  }
}
TEST(Logits, Tq2) { check_format<turboquant::TQ2>(2); }
TEST(Logits, Tq3) { check_format<turboquant::TQ3>(3); }
TEST(Logits, Tq4) { check_format<turboquant::TQ4>(4); }
TEST(Logits, Tq8) { check_format<turboquant::TQ8>(8); }

TEST(Logits, OneFormatOfSeveral) {
  CacheConfig config = small_config(1, 64);
  config.layers.push_back(LayerShape{.kv_heads = 1, .head_dim = 64, .format = 1});
  KVCache<turboquant::TQ2, turboquant::TQ8> cache(config);
  const SequenceId id = new_sequence(cache);
  const Block keys = gaussian_block(1, 80, 1, 64), values = gaussian_block(2, 80, 1, 64),
              query = gaussian_block(3, 1, 1, 64);
  ASSERT_OK(append_only(cache, 0, id, keys, values));
  ASSERT_OK(append_only(cache, 1, id, keys, values));
  std::vector<float> coarse(80), fine(80);
  ASSERT_OK(turboquant::logits(cache, id, 0, query.rows(), coarse.data()));
  ASSERT_OK(turboquant::logits(cache, id, 1, query.rows(), fine.data()));
  double coarse_error = 0, fine_error = 0;
  for (std::size_t j = 0; j < 64; ++j) {
    const double truth = oracle::dot(query.exact().row(0, 0), keys.bfloat16_rounded().row(j, 0), 64);
    coarse_error += std::pow(static_cast<double>(coarse[j]) - truth, 2);
    fine_error += std::pow(static_cast<double>(fine[j]) - truth, 2);
  }
  EXPECT_GT(coarse_error, 100 * fine_error);  // distortions of 0.13 and 0.0001
  EXPECT_GT(fine_error, 0);
}

TEST(Logits, EvictedPositionsAreMinusInfinity) {
  CacheConfig config = small_config(1, 64);
  config.page_tokens = 16;
  config.layers[0].window = 40;
  KVCache<turboquant::TQ4> cache(config);
  const SequenceId id = new_sequence(cache);
  CacheConfig twin_config = config;
  twin_config.layers[0].window = 0;
  KVCache<turboquant::TQ4> twin(twin_config);
  const SequenceId twin_id = new_sequence(twin);
  const Block keys = gaussian_block(1, 200, 1, 64), values = gaussian_block(2, 200, 1, 64),
              queries = gaussian_block(3, 2, 2, 64);
  ASSERT_OK(append_only(cache, 0, id, keys, values));
  ASSERT_OK(append_only(twin, 0, twin_id, keys, values));
  const std::vector<float> found = logits_of(cache, id, queries), whole = logits_of(twin, twin_id, queries);
  for (std::size_t row = 0; row < 4; ++row) {
    // Freed at the latest: what a sequence shortened by the rollback no longer sees, to a page.
    for (std::size_t j = 0; j < 200 - 8 - 40 - 16; ++j)
      ASSERT_EQ(found[row * 200 + j], -std::numeric_limits<float>::infinity()) << j;
    for (std::size_t j = 160; j < 200; ++j) ASSERT_EQ(found[row * 200 + j], whole[row * 200 + j]) << j;
  }
}

TEST(Logits, ManyQueriesEqualOneAtATime) {
  const CacheConfig config = small_config(2, 96);
  KVCache<turboquant::TQ3> cache(config);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 150, 2, 96), gaussian_block(2, 150, 2, 96)));
  const Block queries = gaussian_block(3, 9, 10, 96);
  const std::vector<float> together = logits_of(cache, id, queries);
  for (std::size_t t = 0; t < 9; ++t) {
    const std::vector<float> alone = logits_of(cache, id, queries.slice(t, t + 1));
    EXPECT_TRUE(same_bits(alone, std::vector<float>(together.begin() + static_cast<std::ptrdiff_t>(t * 1500),
                                                    together.begin() + static_cast<std::ptrdiff_t>((t + 1) * 1500))));
  }
}

TEST(Logits, AnExecutorRunsEveryTaskAndChangesNothing) {
  const CacheConfig config = small_config(2, 64);
  KVCache<turboquant::TQ4> cache(config);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 300, 2, 64), gaussian_block(2, 300, 2, 64)));
  const Block queries = gaussian_block(3, 2, 4, 64);
  const std::vector<float> serial = logits_of(cache, id, queries);
  std::vector<float> backwards(serial.size(), kNaN);
  ASSERT_OK(turboquant::logits(cache, id, 0, queries.rows(), backwards.data(), [](std::size_t tasks, auto&& body) {
    while (tasks-- > 0) body(tasks);
  }));
  EXPECT_TRUE(same_bits(serial, backwards));
}

TEST(Logits, Refusals) {
  const CacheConfig config = small_config(2, 64);
  KVCache<turboquant::TQ4> cache(config);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 20, 2, 64), gaussian_block(2, 20, 2, 64)));
  Block queries = gaussian_block(3, 2, 4, 64);
  std::vector<float> out(2 * 4 * 20, 7.0F);
  EXPECT_STATUS(unknown_sequence, turboquant::logits(cache, SequenceId{}, 0, queries.rows(), out.data()));
  EXPECT_STATUS(bad_layer, turboquant::logits(cache, id, 1, queries.rows(), out.data()));
  EXPECT_STATUS(bad_shape, turboquant::logits(cache, id, 0, gaussian_block(3, 2, 3, 64).rows(), out.data()));
  EXPECT_STATUS(bad_shape, turboquant::logits(cache, id, 0, gaussian_block(3, 2, 4, 32).rows(), out.data()));
  queries.row(1, 3)[5] = kNaN;
  EXPECT_STATUS(non_finite_input, turboquant::logits(cache, id, 0, queries.rows(), out.data()));
  for (const float x : out) EXPECT_EQ(x, 7.0F);
}

TEST(Logits, NothingToDo) {
  KVCache<turboquant::TQ4> cache(small_config(2, 64));
  const SequenceId id = new_sequence(cache);
  float canary = 7;
  EXPECT_OK(turboquant::logits(cache, id, 0, gaussian_block(3, 2, 4, 64).rows(), &canary));
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 20, 2, 64), gaussian_block(2, 20, 2, 64)));
  EXPECT_OK(turboquant::logits(cache, id, 0, turboquant::ConstRows(), &canary));
  EXPECT_EQ(canary, 7.0F);
}

}  // namespace
