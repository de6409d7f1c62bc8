// Parsing config.json: what is not understood is refused, never ignored.
#include "config.hpp"

#include <eval/tensor.hpp>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <string>
#include <string_view>

namespace engine {
namespace {

using nlohmann::json;
using turboquant_eval::FileError;

class ConfigReader {
 public:
  explicit ConfigReader(const std::filesystem::path& file) : file_(file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) refuse("file", "a readable file", "none");
    try {
      root_ = json::parse(stream);
    } catch (const json::exception& error) {
      refuse("file", "JSON", error.what());
    }
    if (!root_.is_object()) refuse("file", "a JSON object", root_.type_name());
  }

  [[noreturn]] void refuse(std::string_view field, std::string_view expected, std::string_view found) const {
    throw FileError(file_, field, expected, found);
  }
  [[noreturn]] void refuse(const char* field, std::string_view expected) const {
    constexpr std::size_t kLongest = 80;
    std::string found = root_.contains(field) ? root_[field].dump(-1, ' ', true, json::error_handler_t::replace)
                                              : std::string("no such field");
    refuse(std::string_view(field), expected, found.size() > kLongest ? found.substr(0, kLongest) : found);
  }

  // Is the field there, and not null?
  bool has(const char* field) const { return root_.contains(field) && !root_[field].is_null(); }

  std::size_t count(const char* field) const {
    constexpr std::uint64_t kMost = 1U << 24;
    if (!has(field) || !root_[field].is_number_unsigned() || root_[field].get<std::uint64_t>() == 0 ||
        root_[field].get<std::uint64_t>() > kMost) {
      refuse(field, "a whole number from 1 to 2^24");
    }
    return root_[field].get<std::size_t>();
  }
  std::size_t count(const char* field, std::size_t otherwise) const { return has(field) ? count(field) : otherwise; }

  double positive(const char* field, double otherwise) const {
    if (!has(field)) return otherwise;
    if (!root_[field].is_number() || !(root_[field].get<double>() > 0) || !std::isfinite(root_[field].get<double>())) {
      refuse(field, "a positive number");
    }
    return root_[field].get<double>();
  }

  bool flag(const char* field, bool otherwise) const {
    if (!has(field)) return otherwise;
    if (!root_[field].is_boolean()) refuse(field, "true or false");
    return root_[field].get<bool>();
  }

  std::string text(const char* field) const {
    if (!has(field) || !root_[field].is_string()) refuse(field, "a string");
    return root_[field].get<std::string>();
  }

  // Of version 5 of transformers: rotary settings in an object.
  double rope_theta() const {
    if (!has("rope_parameters")) return positive("rope_theta", 10000);
    const json& rope = root_["rope_parameters"];
    if (!rope.is_object() || rope.value("rope_type", json("default")) != "default" || !rope.contains("rope_theta") ||
        !rope["rope_theta"].is_number() || !(rope["rope_theta"].get<double>() > 0)) {
      refuse("rope_parameters", "rope_type \"default\" and a positive rope_theta");
    }
    return rope["rope_theta"].get<double>();
  }

 private:
  std::filesystem::path file_;
  json root_;
};

}  // namespace

ModelConfig read_config(const std::filesystem::path& file) {
  const ConfigReader reader(file);
  const std::string family = reader.text("model_type");
  const bool is_llama = family == "llama", is_qwen2 = family == "qwen2", is_qwen3 = family == "qwen3";
  if (!is_llama && !is_qwen2 && !is_qwen3) reader.refuse("model_type", "\"llama\", \"qwen2\" or \"qwen3\"");
  if (reader.has("hidden_act") && reader.text("hidden_act") != "silu") reader.refuse("hidden_act", "\"silu\"");
  if (reader.has("rope_scaling")) reader.refuse("rope_scaling", "null: scaled positions are not supported");
  if (reader.has("quantization_config")) reader.refuse("quantization_config", "no quantized weights");
  // Qwen configurations name a window that is off.
  if (reader.flag("use_sliding_window", is_llama && reader.has("sliding_window"))) {
    reader.refuse(reader.has("use_sliding_window") ? "use_sliding_window" : "sliding_window", "no sliding window");
  }
  if (reader.flag("mlp_bias", false)) reader.refuse("mlp_bias", "false");

  ModelConfig config;
  config.vocabulary = reader.count("vocab_size");
  config.hidden = reader.count("hidden_size");
  config.intermediate = reader.count("intermediate_size");
  config.layers = reader.count("num_hidden_layers");
  config.heads = reader.count("num_attention_heads");
  config.kv_heads = reader.count("num_key_value_heads", config.heads);
  if (config.heads % config.kv_heads != 0) {
    reader.refuse("num_key_value_heads", fmt::format("a divisor of num_attention_heads, {}", config.heads));
  }
  config.head_dim = reader.count("head_dim", config.hidden / config.heads);
  if (config.head_dim % 2 != 0 || config.head_dim == 0) reader.refuse("head_dim", "an even number");
  config.context = reader.count("max_position_embeddings", 2048);
  config.norm_epsilon = static_cast<float>(reader.positive("rms_norm_eps", 1e-6));
  config.rope_theta = reader.rope_theta();
  config.has_tied_head = reader.flag("tie_word_embeddings", false);
  const bool has_bias = reader.flag("attention_bias", false);
  config.has_qkv_bias = is_qwen2 || has_bias;
  config.has_output_bias = !is_qwen2 && has_bias;
  config.has_query_key_norm = is_qwen3;
  return config;
}

}  // namespace engine
