// Different sequences from different threads, sharing pages and the pool; one sequence read by many. C01, C03, F08.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <thread>
#include <vector>

#include "cache/block.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;
constexpr std::size_t kThreads = 4;

CacheConfig small_config() {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  config.first_tokens = 3;
  return config;
}
Block keys_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream, end - begin, 1, 32, 1, begin);
}
Block values_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 1000, end - begin, 1, 32, 1, begin);
}

/// Runs body(thread) on kThreads threads that start together.
template <class Body>
void run_together(const Body& body) {
  std::barrier start(static_cast<std::ptrdiff_t>(kThreads));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  for (std::thread& thread : threads) thread.join();
}

/// A life with a forked prefix: drafts, rollback, a child, its release; the outputs on the way.
std::vector<Outcome> live(Cache& cache, SequenceId id, std::uint64_t stream, std::size_t prefix) {
  std::vector<Outcome> outcomes;
  std::size_t n = prefix;
  for (int round = 0; round < 12; ++round) {
    outcomes.push_back(attend_one(cache, 0, id, keys_of(stream, n, n + 5), values_of(stream, n, n + 5),
                                  keys_of(stream + 7, n, n + 5)));
    n += 5;
    if (round % 3 == 1) {
      (void)append_only(cache, 0, id, keys_of(stream + 50, n, n + 6), values_of(stream + 50, n, n + 6));
      (void)cache.truncate(id, n);
    }
    if (round % 4 == 2) {
      SequenceId child;
      if (cache.fork(id, n, child) == Status::ok) {
        outcomes.push_back(attend_one(cache, 0, child, keys_of(stream + 90, n, n + 20),
                                      values_of(stream + 90, n, n + 20), keys_of(stream + 91, 0, 1)));
        cache.release(child);
      }
    }
  }
  return outcomes;
}

TEST(Concurrency, SequencesThatShareAPrefixLiveTheirOwnLives) {
  const std::size_t prefix = 75;
  std::array<std::vector<Outcome>, kThreads> alone, together;
  for (const bool concurrent : {false, true}) {
    Cache cache(small_config());
    const SequenceId base = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, base, keys_of(1, 0, prefix), values_of(1, 0, prefix)));
    std::array<SequenceId, kThreads> ids;
    for (SequenceId& id : ids) ASSERT_OK(cache.fork(base, prefix, id));
    cache.release(base);
    const auto body = [&](std::size_t i) {
      (concurrent ? together : alone)[i] = live(cache, ids[i], 100 * (i + 1), prefix);
      cache.release(ids[i]);
    };
    if (concurrent) {
      run_together(body);
    } else {
      for (std::size_t i = 0; i < kThreads; ++i) body(i);
    }
    EXPECT_EQ(cache.memory().page_bytes, 0U);
    EXPECT_EQ(cache.memory().tail_bytes, 0U);
  }
  for (std::size_t i = 0; i < kThreads; ++i) {
    ASSERT_EQ(alone[i].size(), together[i].size());
    for (std::size_t k = 0; k < alone[i].size(); ++k) {
      ASSERT_OK(alone[i][k].status);
      ASSERT_OK(together[i][k].status);
      EXPECT_TRUE(same_bits(alone[i][k], together[i][k])) << i << ' ' << k;
    }
  }
}

TEST(Concurrency, ManyReadersOfOneSequenceBesideAWriterOfItsFork) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, keys_of(1, 0, 100), values_of(1, 0, 100)));
  SequenceId fork;
  ASSERT_OK(cache.fork(id, 100, fork));
  const Block query = keys_of(9, 0, 2);
  const Outcome wanted = attend_only(cache, 0, id, query);
  Block wanted_keys, wanted_values;
  ASSERT_OK(read_rows(cache, id, 0, 0, 100, wanted_keys, wanted_values));
  std::atomic<std::size_t> wrong{0};
  run_together([&](std::size_t thread) {
    for (std::size_t round = 0; round < 40; ++round) {
      if (thread == 0) {
        const std::size_t n = 100 + 3 * round;
        if (!(append_only(cache, 0, fork, keys_of(2, n, n + 3), values_of(2, n, n + 3)) == Status::ok)) ++wrong;
        continue;
      }
      if (!same_bits(attend_only(cache, 0, id, query), wanted)) ++wrong;
      std::vector<float> logits(200);
      if (!(turboquant::logits(cache, id, 0, query.rows(), logits.data()) == Status::ok)) ++wrong;
      Block keys, values;
      if (!(read_rows(cache, id, 0, 0, 100, keys, values) == Status::ok) || !same_bits(keys, wanted_keys)) ++wrong;
      if (cache.length(id) != 100 || cache.memory().page_bytes == 0) ++wrong;
    }
  });
  EXPECT_EQ(wrong.load(), 0U);
  EXPECT_EQ(cache.length(fork), 220U);
}

TEST(Concurrency, SequencesComeAndGo) {
  Cache cache(small_config());
  const Block keys = keys_of(1, 0, 40), values = values_of(1, 0, 40), query = keys_of(2, 0, 1);
  const SequenceId reference = new_sequence(cache);
  const Outcome wanted = attend_one(cache, 0, reference, keys, values, query);
  std::atomic<std::size_t> wrong{0};
  run_together([&](std::size_t) {
    for (int round = 0; round < 100; ++round) {
      SequenceId id;
      if (!(cache.create_sequence(id) == Status::ok)) ++wrong;
      if (!same_bits(attend_one(cache, 0, id, keys, values, query), wanted)) ++wrong;
      cache.release(id);
      if (cache.length(id) != 0) ++wrong;
    }
  });
  EXPECT_EQ(wrong.load(), 0U);
  cache.release(reference);
  EXPECT_EQ(cache.memory().page_bytes + cache.memory().tail_bytes, 0U);
}

}  // namespace
