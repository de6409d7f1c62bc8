// One layer as numbers: what every format is measured against.
#pragma once

#include "layer_set.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace turboquant_eval {

/// Keys and values rounded to bf16, as every cache receives them, and queries; head by head.
struct ExactLayer {
  std::size_t tokens = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  std::size_t heads = 0;       // query heads; 0: no queries
  std::vector<float> keys;     // [kv_heads][tokens][head_dim]
  std::vector<float> values;   // [kv_heads][tokens][value_dim]
  std::vector<float> queries;  // [heads][tokens][head_dim]
  double key_rounding = 0;     // what rounding to bf16 did to the keys: error energy / energy
  double value_rounding = 0;

  std::size_t coordinates() const { return kv_heads * (head_dim + value_dim); }  // per token
  std::size_t kv_head(std::size_t head) const { return head / (heads / kv_heads); }
  const float* key(std::size_t kv_head, std::size_t token) const;
  const float* value(std::size_t kv_head, std::size_t token) const;
  const float* query(std::size_t head, std::size_t token) const;
};

ExactLayer exact_layer(const LayerTensors& tensors);

/// The same layer with a constant added to every number of the keys: `deviations` times the standard deviation of all
/// of them. Exact attention ignores it. Keys become float32; exact_layer() and caches then round them to bf16.
LayerTensors with_offset(const LayerTensors& tensors, double deviations);

/// Gives a layer without queries `heads_per_kv_head` query heads per KV head, drawn from a normal distribution whose
/// deviation is the root mean square of the centred keys. Such queries know nothing of the model: their figures compare
/// formats, but say little about outputs of a real model. `seed` and the layer's shape decide the numbers.
void draw_queries(ExactLayer& layer, std::uint64_t seed, std::size_t heads_per_kv_head = 1);

}  // namespace turboquant_eval
