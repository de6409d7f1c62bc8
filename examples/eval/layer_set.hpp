// The layers to measure: keys, values and queries of one or several files, checked against each other.
#pragma once

#include "tensor.hpp"

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>

namespace turboquant_eval {

struct LayerTensors {
  Tensor keys;                    // [kv_heads, tokens, head_dim]
  Tensor values;                  // [kv_heads, tokens, value_dim]
  std::optional<Tensor> queries;  // [heads, tokens, head_dim], heads a multiple of kv_heads
};

using LayerSet = std::map<unsigned, LayerTensors>;  // by layer number

/// Reads safetensors files, .npy files, and directories of .npy files named as npy.hpp says (other files in a
/// directory are ignored). Only the layers in `wanted` are kept; an empty set keeps all.
/// On return every layer is usable: shapes agree, head sizes are supported, all numbers are finite, and those of
/// keys and values are at most 2^96. Throws FileError otherwise, also when no layer is left.
LayerSet read_layers(std::span<const std::filesystem::path> inputs, const std::set<unsigned>& wanted = {});

}  // namespace turboquant_eval
