// A cache of small pages and short raw tails, streams of tokens for it, and everything of a sequence that can be seen.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <turboquant/turboquant.hpp>

#include "cache/block.hpp"

namespace tests {

/// Layers of two heads of 32 coordinates; pages of 16 tokens, the 16 newest raw.
inline turboquant::CacheConfig small_config(std::size_t layers = 1) {
  turboquant::CacheConfig config;
  config.layers.assign(layers, turboquant::LayerShape{.kv_heads = 2, .head_dim = 32});
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}

/// The tokens [begin, end) of a stream.
/// @{
inline Block keys_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream, end - begin, 2, 32, 1, begin);
}
inline Block values_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 1000, end - begin, 2, 32, 1, begin);
}
inline Block queries_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 2000, end - begin, 4, 32, 1, begin);
}
/// @}

/// Appends them to one layer.
template <class Cache>
turboquant::Status feed(Cache& cache, turboquant::SequenceId id, std::uint64_t stream, std::size_t begin,
                        std::size_t end, std::size_t layer = 0) {
  return append_only(cache, layer, id, keys_of(stream, begin, end), values_of(stream, begin, end));
}
/// Appends them to every layer, up to the first that refuses.
template <class Cache>
turboquant::Status feed_all(Cache& cache, turboquant::SequenceId id, std::uint64_t stream, std::size_t begin,
                            std::size_t end) {
  for (std::size_t layer = 0; layer < cache.config().layers.size(); ++layer) {
    const turboquant::Status status = feed(cache, id, stream, begin, end, layer);
    if (!(status == turboquant::Status::ok)) return status;
  }
  return {};
}

/// The newest position's attention and everything that can be read.
struct Snapshot {
  Outcome outcome;
  Block keys, values;
};
template <class Cache>
Snapshot snapshot(Cache& cache, turboquant::SequenceId id, std::size_t layer = 0, std::size_t begin = 0) {
  Snapshot shot;
  const std::size_t length = cache.length(id);
  EXPECT_OK(read_rows(cache, id, layer, begin, length, shot.keys, shot.values));
  if (length != 0) {
    const turboquant::LayerShape& shape = cache.config().layers[layer];
    shot.outcome = attend_only(cache, layer, id, gaussian_block(2001, 1, 2 * shape.kv_heads, shape.head_dim));
    EXPECT_OK(shot.outcome.status);
  }
  return shot;
}
inline bool same_bits(const Snapshot& a, const Snapshot& b) {
  return same_bits(a.outcome, b.outcome) && same_bits(a.keys, b.keys) && same_bits(a.values, b.values);
}

inline void expect_same(const turboquant::MemoryUse& a, const turboquant::MemoryUse& b) {
  EXPECT_EQ(a.page_bytes, b.page_bytes);
  EXPECT_EQ(a.tail_bytes, b.tail_bytes);
}

}  // namespace tests
