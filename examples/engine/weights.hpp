// A model's numbers, from the safetensors files of a Hugging Face checkpoint.
#pragma once

#include "config.hpp"

#include <filesystem>
#include <vector>

namespace engine {

/// y = W x + bias. `transposed`: [inputs][outputs], so that a product walks along the outputs; bias may be empty.
struct Linear {
  std::size_t inputs = 0, outputs = 0;
  std::vector<float> transposed, bias;
};

struct LayerWeights {
  std::vector<float> attention_norm, mlp_norm;  // [hidden]
  std::vector<float> query_norm, key_norm;      // [head_dim], or empty
  Linear query, key, value, output, gate, up, down;
};

struct Weights {
  std::vector<float> embedding;  // [vocabulary][hidden]
  std::vector<float> final_norm;
  Linear head;
  std::vector<LayerWeights> layers;
};

/// Reads model.safetensors, or the files that model.safetensors.index.json lists; F32, F16 and BF16. Throws
/// turboquant_eval::FileError that names the tensor if one is missing, of another shape, given twice, or not part of
/// such a model.
Weights read_weights(const std::filesystem::path& folder, const ModelConfig& config);

}  // namespace engine
