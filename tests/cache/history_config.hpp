// Configurations of random histories: layers of different formats, shapes and windows, and caches that run full.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <turboquant/turboquant.hpp>

#include "cache/mirror.hpp"
#include "oracle/random.hpp"

namespace tests {

using HistoryCache = turboquant::KVCache<turboquant::TQ4, turboquant::TQ8, turboquant::TQ3>;

/// What the tests assume of the format of a layer.
inline Codes history_codes(const turboquant::LayerShape& shape) {
  constexpr std::array<unsigned, 3> kBits{4, 8, 3};
  return codes_of(kBits[shape.format]);
}

/// One to three layers. Windows are none, shorter than any raw tail, as long as one, and longer. A third of the caches
/// has room for some hundred tokens only.
inline turboquant::CacheConfig history_config(std::uint64_t seed) {
  std::uint64_t count = 0;
  const auto one_of = [&](const auto& values) {
    return values[static_cast<std::size_t>(oracle::hash(seed, 1789, ++count) % values.size())];
  };
  turboquant::CacheConfig config;
  config.layers.resize(1 + seed % 3);
  for (turboquant::LayerShape& layer : config.layers) {
    layer.kv_heads = one_of(std::array{1U, 1U, 2U});
    layer.head_dim = one_of(std::array{32U, 32U, 48U, 64U});
    layer.value_dim = one_of(std::array{0U, 0U, 32U, 64U});
    layer.window = one_of(std::array{0U, 0U, 1U, 9U, 20U, 45U, 90U});
    layer.format = one_of(std::array{0U, 0U, 1U, 2U});
    layer.center_bits = one_of(std::array<std::uint8_t, 4>{8, 8, 0, 16});
  }
  config.page_tokens = one_of(std::array<std::size_t, 4>{16, 16, 32, 48});
  config.recent_tokens = one_of(std::array<std::size_t, 5>{0, 7, 11, 22, 40});
  config.rollback_tokens = one_of(std::array<std::size_t, 5>{0, 7, 8, 14, 21});
  config.first_tokens = one_of(std::array<std::size_t, 6>{0, 0, 3, 6, 12, 20});
  const std::size_t room = one_of(std::array<std::size_t, 6>{0, 0, 0, 0, 40, 100});
  config.max_bytes = room * 1024 * config.layers.size();
  return config;
}

}  // namespace tests
