// One sequence of a cache of small pages beside its mirror: every step is checked against the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <turboquant/turboquant.hpp>

#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace tests {

inline turboquant::CacheConfig small_config(std::uint32_t kv_heads = 2, std::uint32_t head_dim = 64) {
  turboquant::CacheConfig config;
  config.layers = {turboquant::LayerShape{.kv_heads = kv_heads, .head_dim = head_dim}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}

inline std::size_t value_dim_of(const turboquant::LayerShape& shape) {
  return shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
}

/// One sequence of one cache with its mirror; tokens and queries come from fixed Gaussian streams.
template <class Cache>
class Scenario {
 public:
  Scenario(const turboquant::CacheConfig& config, Codes codes, std::size_t query_heads = 4, std::uint64_t seed = 1,
           double key_offset = 0)
      : cache(config),
        id(new_sequence(cache)),
        mirror(config, 0, codes),
        query_heads_(query_heads),
        seed_(seed),
        key_offset_(key_offset) {}

  Block keys(std::size_t count) const {
    Block block = gaussian_block(seed_, count, shape().kv_heads, shape().head_dim, 1, mirror.length());
    for (std::size_t t = 0; t < count; ++t)
      for (std::size_t h = 0; h < block.heads; ++h)
        for (std::size_t i = 0; i < block.dim; ++i)
          block.row(t, h)[i] += static_cast<float>(key_offset_ * oracle::gaussian(seed_ + 77, h, i));
    return block;
  }
  Block values(std::size_t count) const {
    return gaussian_block(seed_ + 100, count, shape().kv_heads, value_dim_of(shape()), 1, mirror.length());
  }
  Block queries(std::size_t count, std::size_t first) const {
    return gaussian_block(seed_ + 200, count, query_heads_, shape().head_dim, 1, first);
  }

  /// Appends `count` tokens with the queries of the last `asking` of them and checks the outputs.
  void step(std::size_t count, std::size_t asking, const turboquant::AttentionParams& params = {},
            bool with_lse = true) {
    const Block new_keys = keys(count), new_values = values(count);
    const std::size_t first = mirror.length() + count - asking;
    const Block asked = queries(asking, first);
    CallOptions options;
    options.params = params;
    options.with_lse = with_lse;
    const Outcome outcome = attend_one(cache, 0, id, new_keys, new_values, asked, options);
    mirror.append(new_keys, new_values);
    mirror.learn(cache, id);
    mirror.check(asked, outcome, params, {.position = first}, with_lse);
  }

  const turboquant::LayerShape& shape() const { return cache.config().layers[0]; }

  Cache cache;
  turboquant::SequenceId id;
  Mirror mirror;

 private:
  std::size_t query_heads_;
  std::uint64_t seed_;
  double key_offset_;
};

}  // namespace tests
