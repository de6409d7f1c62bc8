// Finding every tensor of a model under its Hugging Face name.
#include "weights.hpp"

#include <eval/safetensors.hpp>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace engine {
namespace {

using turboquant_eval::FileError;
using turboquant_eval::Tensor;
using Path = std::filesystem::path;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

std::set<Path> files_of(const Path& folder) {
  const Path index = folder / kIndexFile;
  if (!std::filesystem::exists(index)) return {folder / kSingleFile};
  using nlohmann::json;
  std::set<Path> files;
  try {
    std::ifstream stream(index, std::ios::binary);
    const json root = json::parse(stream);
    for (const auto& [tensor, file] : root.at("weight_map").items()) {
      const Path name = file.get<std::string>();
      // A file name from a stranger must not lead out of the folder.
      if (name.has_parent_path() || name.empty()) throw FileError(index, tensor, "a file name", name.string());
      files.insert(folder / name);
    }
  } catch (const json::exception& error) {
    throw FileError(index, "weight_map", "an object from tensors to files", error.what());
  }
  if (files.empty()) throw FileError(index, "weight_map", "files", "none");
  return files;
}

// Older checkpoints store the rotary frequencies, which follow from the configuration.
bool is_derived(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

class WeightReader {
 public:
  WeightReader(const Path& folder, const ModelConfig& config) : folder_(folder), config_(config) {
    for (const Path& file : files_of(folder)) {
      for (Tensor& tensor : turboquant_eval::read_safetensors(file, [](std::string_view) { return true; })) {
        const std::string name = tensor.name;
        if (const auto at = tensors_.find(name); at != tensors_.end()) {
          tensor.refuse("one tensor of this name", "another in " + at->second.file.filename().string());
        }
        tensors_.emplace(name, std::move(tensor));
      }
    }
  }

  Weights read() {
    Weights weights;
    weights.embedding = take("model.embed_tokens.weight", {config_.vocabulary, config_.hidden});
    if (config_.has_tied_head) {
      tensors_.erase("lm_head.weight");  // some checkpoints repeat the embedding under this name
      weights.head = linear(weights.embedding, config_.vocabulary, config_.hidden);
    } else {
      weights.head = linear("lm_head", config_.vocabulary, config_.hidden, false);
    }
    weights.final_norm = take("model.norm.weight", {config_.hidden});
    for (std::size_t i = 0; i < config_.layers; ++i) {
      weights.layers.push_back(layer(fmt::format("model.layers.{}.", i)));
    }
    for (const auto& [name, tensor] : tensors_) {
      if (!is_derived(name)) tensor.refuse("a tensor of such a model", "one that the configuration has no place for");
    }
    return weights;
  }

 private:
  LayerWeights layer(const std::string& prefix) {
    const std::size_t hidden = config_.hidden, queries = config_.heads * config_.head_dim;
    const std::size_t keys = config_.kv_heads * config_.head_dim, inner = config_.intermediate;
    LayerWeights result;
    result.attention_norm = take(prefix + "input_layernorm.weight", {hidden});
    result.mlp_norm = take(prefix + "post_attention_layernorm.weight", {hidden});
    if (config_.has_query_key_norm) {
      result.query_norm = take(prefix + "self_attn.q_norm.weight", {config_.head_dim});
      result.key_norm = take(prefix + "self_attn.k_norm.weight", {config_.head_dim});
    }
    result.query = linear(prefix + "self_attn.q_proj", queries, hidden, config_.has_qkv_bias);
    result.key = linear(prefix + "self_attn.k_proj", keys, hidden, config_.has_qkv_bias);
    result.value = linear(prefix + "self_attn.v_proj", keys, hidden, config_.has_qkv_bias);
    result.output = linear(prefix + "self_attn.o_proj", hidden, queries, config_.has_output_bias);
    result.gate = linear(prefix + "mlp.gate_proj", inner, hidden, false);
    result.up = linear(prefix + "mlp.up_proj", inner, hidden, false);
    result.down = linear(prefix + "mlp.down_proj", hidden, inner, false);
    return result;
  }

  Linear linear(const std::string& name, std::size_t outputs, std::size_t inputs, bool has_bias) {
    Linear result = linear(take(name + ".weight", {outputs, inputs}), outputs, inputs);
    if (has_bias) result.bias = take(name + ".bias", {outputs});
    return result;
  }

  static Linear linear(const std::vector<float>& rows, std::size_t outputs, std::size_t inputs) {
    Linear result{inputs, outputs, std::vector<float>(rows.size()), {}};
    for (std::size_t o = 0; o < outputs; ++o) {
      for (std::size_t i = 0; i < inputs; ++i) result.transposed[i * outputs + o] = rows[o * inputs + i];
    }
    return result;
  }

  // The numbers of a tensor, which is then gone.
  std::vector<float> take(const std::string& name, std::initializer_list<std::size_t> shape) {
    const auto at = tensors_.find(name);
    const std::string expected = turboquant_eval::to_string(std::span(shape.begin(), shape.size()));
    if (at == tensors_.end()) throw FileError(folder_, "tensor " + name, "shape " + expected, "no such tensor");
    const Tensor& tensor = at->second;
    if (!std::equal(tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end())) {
      tensor.refuse("shape " + expected, turboquant_eval::to_string(tensor.shape));
    }
    const std::size_t count = tensor.bytes.size() / turboquant::size_of(tensor.type);
    std::vector<float> numbers(count);
    turboquant::load_row(turboquant::ConstRows(tensor.bytes.data(), tensor.type, 1, 1, count), 0, 0, numbers.data());
    tensors_.erase(at);
    return numbers;
  }

  Path folder_;
  const ModelConfig& config_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace

Weights read_weights(const std::filesystem::path& folder, const ModelConfig& config) {
  return WeightReader(folder, config).read();
}

}  // namespace engine
