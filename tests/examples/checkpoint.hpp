// A random model as a Hugging Face checkpoint folder. Includes no header of the library.
#pragma once

#include <oracle/random.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace checkpoint {

struct Tensor {
  std::vector<std::size_t> shape;
  std::vector<float> numbers;
};

/// Numbers in the order [outputs][inputs], under their Hugging Face names; and config.json.
struct Checkpoint {
  nlohmann::json config;
  std::map<std::string, Tensor> tensors;

  void add(const std::string& name, std::vector<std::size_t> shape, double deviation, double mean = 0) {
    std::size_t count = 1;
    for (const std::size_t extent : shape) count *= extent;
    Tensor tensor{std::move(shape), std::vector<float>(count)};
    for (std::size_t i = 0; i < count; ++i) {
      tensor.numbers[i] = static_cast<float>(mean + deviation * oracle::gaussian(7, tensors.size(), i));
    }
    tensors[name] = std::move(tensor);
  }
};

/// Two layers, four heads of 32 on two KV heads, a vocabulary of 61. `family` is llama, qwen2 or qwen3.
inline Checkpoint random_checkpoint(const std::string& family) {
  constexpr std::size_t kHidden = 48, kHeads = 4, kKvHeads = 2, kDim = 32, kInner = 80, kVocabulary = 61, kLayers = 2;
  Checkpoint result;
  const bool is_tied = family != "llama";
  result.config = {{"model_type", family},
                   {"hidden_act", "silu"},
                   {"vocab_size", kVocabulary},
                   {"hidden_size", kHidden},
                   {"intermediate_size", kInner},
                   {"num_hidden_layers", kLayers},
                   {"num_attention_heads", kHeads},
                   {"num_key_value_heads", kKvHeads},
                   {"head_dim", kDim},
                   {"rms_norm_eps", 1e-5},
                   {"rope_theta", 5000.0},
                   {"max_position_embeddings", 512},
                   {"tie_word_embeddings", is_tied},
                   {"rope_scaling", nullptr}};
  const double deviation = 1 / std::sqrt(static_cast<double>(kHidden));
  result.add("model.embed_tokens.weight", {kVocabulary, kHidden}, 1);
  result.add("model.norm.weight", {kHidden}, 0.2, 1);
  if (!is_tied) result.add("lm_head.weight", {kVocabulary, kHidden}, 2 * deviation);
  for (std::size_t i = 0; i < kLayers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    result.add(layer + "input_layernorm.weight", {kHidden}, 0.2, 1);
    result.add(layer + "post_attention_layernorm.weight", {kHidden}, 0.2, 1);
    result.add(layer + "self_attn.q_proj.weight", {kHeads * kDim, kHidden}, 2 * deviation);
    result.add(layer + "self_attn.k_proj.weight", {kKvHeads * kDim, kHidden}, 2 * deviation);
    result.add(layer + "self_attn.v_proj.weight", {kKvHeads * kDim, kHidden}, deviation);
    result.add(layer + "self_attn.o_proj.weight", {kHidden, kHeads * kDim}, deviation);
    if (family == "qwen2") {
      result.add(layer + "self_attn.q_proj.bias", {kHeads * kDim}, 0.3);
      result.add(layer + "self_attn.k_proj.bias", {kKvHeads * kDim}, 0.3);
      result.add(layer + "self_attn.v_proj.bias", {kKvHeads * kDim}, 0.3);
    }
    if (family == "qwen3") {
      result.add(layer + "self_attn.q_norm.weight", {kDim}, 0.2, 1);
      result.add(layer + "self_attn.k_norm.weight", {kDim}, 0.2, 1);
    }
    result.add(layer + "mlp.gate_proj.weight", {kInner, kHidden}, deviation);
    result.add(layer + "mlp.up_proj.weight", {kInner, kHidden}, deviation);
    result.add(layer + "mlp.down_proj.weight", {kHidden, kInner}, deviation);
  }
  return result;
}

/// Some of a checkpoint's tensors as one F32 safetensors file.
inline void write_tensors(const std::map<std::string, Tensor>& tensors, const std::filesystem::path& file) {
  nlohmann::json header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t begin = data.size(), bytes = tensor.numbers.size() * sizeof(float);
    data.resize(begin + bytes);
    std::memcpy(data.data() + begin, tensor.numbers.data(), bytes);
    header[name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, begin + bytes}}};
  }
  const std::string text = header.dump();
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(std::uint64_t{text.size()} >> (8 * i) & 255);
  std::ofstream(file, std::ios::binary) << length << text << data;
}

inline void write(const Checkpoint& checkpoint, const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << checkpoint.config.dump();
  write_tensors(checkpoint.tensors, folder / "model.safetensors");
}

/// A folder of the running test's own, empty.
inline std::filesystem::path fresh_folder(const std::string& name) {
  const auto folder = std::filesystem::temp_directory_path() / ("turboquant_" + name);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

}  // namespace checkpoint
