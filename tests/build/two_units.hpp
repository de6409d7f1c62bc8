// What both units of one program instantiate: a cache that is written and read once.
#pragma once

#include <turboquant/turboquant.hpp>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

int use_everything_in_second_unit();

/// Appends 80 tokens to a cache of two formats and attends with the last one. Returns the bits of the first output, or
/// -1 if the library refused.
inline int use_everything() {
  constexpr std::size_t tokens = 80, dim = 64;
  turboquant::CacheConfig config;
  config.recent_tokens = 0;
  config.layers.assign(2, turboquant::LayerShape{});
  config.layers[0].head_dim = config.layers[1].head_dim = dim;
  config.layers[1].format = 1;
  turboquant::KVCache<turboquant::TQ4, turboquant::TQ3> cache(config);
  turboquant::SequenceId id;
  if (cache.create_sequence(id) != turboquant::Status::ok) {
    return -1;
  }
  std::vector<float> rows(tokens * dim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<float>((i * 37) % 23) - 11.0f;
  }
  std::array<float, dim> out{};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    turboquant::BatchItem item;
    item.sequence = id;
    item.keys = item.values = turboquant::ConstRows(rows.data(), tokens, 1, dim);
    item.queries = turboquant::ConstRows(rows.data(), 1, 1, dim);
    item.out = turboquant::Rows(out.data(), 1, 1, dim);
    if (turboquant::attend(cache, layer, std::span<const turboquant::BatchItem>(&item, 1)) != turboquant::Status::ok) {
      return -1;
    }
  }
  return static_cast<int>(out[0] * 1024.0f);
}
