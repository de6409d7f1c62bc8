// Rows put through the codes of one format: what comes back, and the logits of queries with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace tests {

/// A configuration of one layer in which every token is read as codes once the sequence is sealed.
inline turboquant::CacheConfig coded_config(std::size_t kv_heads, std::size_t head_dim, std::size_t value_dim = 0,
                                            std::uint8_t center_bits = 8, std::size_t page_tokens = 16) {
  turboquant::CacheConfig config;
  config.layers = {turboquant::LayerShape{.kv_heads = static_cast<std::uint32_t>(kv_heads),
                                          .head_dim = static_cast<std::uint32_t>(head_dim),
                                          .value_dim = static_cast<std::uint32_t>(value_dim),
                                          .center_bits = center_bits}};
  config.page_tokens = page_tokens;
  config.recent_tokens = config.rollback_tokens = 0;
  return config;
}

/// One sealed sequence of a cache of its own.
template <class F>
class CodedRows {
 public:
  CodedRows(const turboquant::CacheConfig& config, const Block& keys, const Block& values)
      : cache(config), id(new_sequence(cache)) {
    EXPECT_OK(append_only(cache, 0, id, keys, values));
    EXPECT_OK(cache.seal(id));
    EXPECT_OK(read_rows(cache, id, 0, 0, keys.tokens, decoded_keys, decoded_values));
  }

  std::vector<float> logits(const Block& queries) const {
    std::vector<float> out(queries.tokens * queries.heads * cache.length(id), kNaN);
    EXPECT_OK(turboquant::logits(cache, id, 0, queries.rows(), out.data()));
    return out;
  }
  Outcome attend(const Block& queries, float scale = 0) {
    CallOptions options;
    options.params.scale = scale;
    options.params.causal = false;
    options.position = 0;
    Outcome outcome = attend_only(cache, 0, id, queries, options);
    EXPECT_OK(outcome.status);
    return outcome;
  }

  turboquant::KVCache<F> cache;
  turboquant::SequenceId id;
  Block decoded_keys, decoded_values;
};

inline double norm_of(const float* row, std::size_t dim) {
  double sum = 0;
  for (std::size_t i = 0; i < dim; ++i) sum += static_cast<double>(row[i]) * static_cast<double>(row[i]);
  return std::sqrt(sum);
}
inline double product_of(const float* a, const float* b, std::size_t dim) {
  double sum = 0;
  for (std::size_t i = 0; i < dim; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}
inline double distance_of(const float* a, const float* b, std::size_t dim) {
  double sum = 0;
  for (std::size_t i = 0; i < dim; ++i)
    sum += (static_cast<double>(a[i]) - static_cast<double>(b[i])) *
           (static_cast<double>(a[i]) - static_cast<double>(b[i]));
  return std::sqrt(sum);
}
/// Every row equal to the first `row` of `dim` floats.
inline Block repeated(const std::vector<float>& row, std::size_t tokens, std::size_t heads = 1) {
  Block block(tokens, heads, row.size());
  for (std::size_t r = 0; r < tokens * heads; ++r)
    std::copy(row.begin(), row.end(), block.numbers.begin() + static_cast<std::ptrdiff_t>(r * row.size()));
  return block;
}

/// 4-bit keys beside values with zero points.
using TQ4Scalar = turboquant::Format<turboquant::PolarQuant<4>, turboquant::ScalarQuant<4>>;

/// Inner product with a random direction: six of sigma = sqrt(D / d), D with the unbiased scale D / (1 - D).
inline double six_sigma(unsigned bits, std::size_t dim) {
  return 6 * std::sqrt(distortion_bound(bits) / static_cast<double>(dim));
}

/// Calls body(std::type_identity<F>, bits) for formats of every kind.
template <class Body>
void for_each_format(const Body& body) {
  body(std::type_identity<turboquant::TQ2>{}, 2U);
  body(std::type_identity<turboquant::TQ3>{}, 3U);
  body(std::type_identity<turboquant::TQ4>{}, 4U);
  body(std::type_identity<turboquant::TQ8>{}, 8U);
  body(std::type_identity<TQ4Scalar>{}, 4U);
}

}  // namespace tests
