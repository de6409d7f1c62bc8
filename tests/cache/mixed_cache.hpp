// A cache whose layers differ in format, shape, window and centring, and random lives of its sequences.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <turboquant/turboquant.hpp>
#include <vector>

#include "cache/block.hpp"

namespace tests {

using ScalarFormat = turboquant::Format<turboquant::PolarQuant<3>, turboquant::ScalarQuant<4>>;
using MixedCache =
    turboquant::KVCache<turboquant::TQ2, turboquant::TQ3, turboquant::TQ4, turboquant::TQ8, ScalarFormat>;

inline turboquant::CacheConfig mixed_config() {
  turboquant::CacheConfig config;
  config.layers = {
      {.kv_heads = 2, .head_dim = 32, .format = 2},
      {.kv_heads = 1, .head_dim = 64, .value_dim = 32, .window = 24, .format = 1, .center_bits = 16},
      {.kv_heads = 1, .head_dim = 32, .format = 0, .center_bits = 0},
      {.kv_heads = 1, .head_dim = 48, .window = 40, .format = 3},
      {.kv_heads = 1, .head_dim = 32, .value_dim = 64, .format = 4},
  };
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  config.first_tokens = 3;
  return config;
}

/// A source of decisions, a function of its seed.
class Decisions {
 public:
  explicit Decisions(std::uint64_t seed) : seed_(seed) {}
  /// 0 <= result < sides.
  std::size_t roll(std::size_t sides) { return static_cast<std::size_t>(oracle::hash(seed_, 815, ++count_) % sides); }
  std::uint64_t stream() { return (seed_ << 32) + ++count_; }

 private:
  std::uint64_t seed_, count_ = 0;
};

/// Appends `count` tokens to every layer; what the queries of the last few see.
template <class Cache>
std::vector<Outcome> append_all(Cache& cache, turboquant::SequenceId id, std::uint64_t stream, std::size_t count) {
  std::vector<Outcome> outcomes;
  for (std::size_t l = 0; l < cache.config().layers.size(); ++l) {
    const turboquant::LayerShape& shape = cache.config().layers[l];
    const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
    outcomes.push_back(attend_one(
        cache, l, id, gaussian_block(stream + l, count, shape.kv_heads, shape.head_dim),
        gaussian_block(stream + 100 + l, count, shape.kv_heads, value_dim),
        gaussian_block(stream + 200 + l, std::min<std::size_t>(count, 3), 2 * shape.kv_heads, shape.head_dim)));
    EXPECT_OK(outcomes.back().status);
  }
  return outcomes;
}

/// One random call or two, the same for equal decisions; what queries saw.
template <class Cache>
std::vector<Outcome> live_on(Cache& cache, turboquant::SequenceId id, Decisions& dice) {
  const std::size_t length = cache.length(id);
  switch (dice.roll(8)) {
    case 0:    // rejected drafts
    case 1: {  // or anywhere, if the windows allow it
      const std::size_t drop = dice.roll(2) == 0 ? dice.roll(9) : dice.roll(length + 1);
      const turboquant::Status status = cache.truncate(id, length - std::min(length, drop));
      EXPECT_TRUE(status == turboquant::Status::ok || status == turboquant::Status::behind_window);
      break;
    }
    case 2:
      if (dice.roll(3) == 0) EXPECT_OK(cache.seal(id));
      break;
    case 3: {  // first tokens, codes, raw rows
      if (length == 0) break;
      const std::size_t begin = dice.roll(dice.roll(3) == 0 ? std::min<std::size_t>(length, 4) : length);
      const turboquant::Status status =
          cache.erase(id, begin, begin + 1 + dice.roll(std::min<std::size_t>(length - begin, 12)));
      EXPECT_TRUE(status == turboquant::Status::ok || status == turboquant::Status::behind_window);
      break;
    }
    case 4:
      return append_all(cache, id, dice.stream(), 1 + dice.roll(60));
    default:
      return append_all(cache, id, dice.stream(), 1 + dice.roll(12));
  }
  return {};
}

inline bool same_bits(const std::vector<Outcome>& a, const std::vector<Outcome>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same_bits(a[i], b[i])) return false;
  return true;
}

}  // namespace tests
