// A small cache that threads share, streams of tokens for it, and threads that start together.
#pragma once

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <turboquant/turboquant.hpp>
#include <vector>

#include "cache/block.hpp"

namespace tests {

inline constexpr std::size_t kThreads = 4;

inline turboquant::CacheConfig small_config() {
  turboquant::CacheConfig config;
  config.layers = {turboquant::LayerShape{.kv_heads = 1, .head_dim = 32}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  config.first_tokens = 3;
  return config;
}
inline Block keys_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream, end - begin, 1, 32, 1, begin);
}
inline Block values_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 1000, end - begin, 1, 32, 1, begin);
}

/// Runs body(thread) on threads that start together.
template <class Body>
void run_together(const Body& body, std::size_t count = kThreads) {
  std::barrier start(static_cast<std::ptrdiff_t>(count));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tests
