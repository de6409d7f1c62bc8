// What a model is, from the config.json of a Hugging Face checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace engine {

/// Sizes and switches of a Llama, Qwen2 or Qwen3 model.
struct ModelConfig {
  std::size_t vocabulary = 0, hidden = 0, intermediate = 0, layers = 0;
  std::size_t heads = 0, kv_heads = 0, head_dim = 0;
  std::size_t context = 0;  // tokens it was trained for
  float norm_epsilon = 1e-6F;
  double rope_theta = 10000;
  bool has_tied_head = false;       // logits by the embedding
  bool has_qkv_bias = false;        // Qwen2
  bool has_output_bias = false;     // of the attention's output projection
  bool has_query_key_norm = false;  // Qwen3
};

/// Throws turboquant_eval::FileError that names the field if it is missing, of the wrong kind or not supported: other
/// families, other activations, scaled rotary positions, sliding windows, quantized weights.
ModelConfig read_config(const std::filesystem::path& file);

}  // namespace engine
