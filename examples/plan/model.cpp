// The table of presets, and layers from a model.
#include "model.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace turboquant_plan {
namespace {

// Shapes are num_hidden_layers, num_key_value_heads, head_dim (or hidden_size / num_attention_heads), sliding_window
// and sliding_window_pattern of the model's config.json on Hugging Face; parameters are those that the same file
// implies, embeddings and, for gemma-3-12b, the image encoder included. The last row is a published example, not a
// model.
constexpr Model kPresets[] = {
    // name, layers, KV heads, head_dim, value_dim, window, global_every, parameters
    {"llama-3.1-8b", 32, 8, 128, 0, 0, 0, 8'030'261'248},
    {"llama-3.1-70b", 80, 8, 128, 0, 0, 0, 70'553'706'496},
    {"qwen2.5-7b", 28, 4, 128, 0, 0, 0, 7'615'616'512},
    {"qwen3-8b", 36, 8, 128, 0, 0, 0, 8'190'735'360},
    {"gemma-3-12b", 48, 8, 256, 0, 1024, 6, 12'187'325'040},
    {"mistral-7b-v0.1", 32, 8, 128, 0, 4096, 0, 7'241'732'096},
    {"window-8x2560", 8, 20, 128, 0, 4096, 0, 0},
};

}  // namespace

std::span<const Model> presets() { return kPresets; }

Model preset(std::string_view name) {
  std::string names;
  for (const Model& model : kPresets) {
    if (model.name == name) return model;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", model.name);
  }
  throw PlanError(fmt::format("model is {}; supported are {}, and any other by --layers, --kv-heads and --head-dim",
                              name.empty() ? "not given" : fmt::format("\"{}\"", name), names));
}

LayerPlan layers_of(const Model& model, std::string_view plan, std::uint8_t center_bits) {
  if (model.global_every != 0 && model.window == 0) {
    throw PlanError(fmt::format("global_every is {}; supported with a window only", model.global_every));
  }
  LayerPlan layers =
      turboquant_eval::layer_plan(plan, {model.layers, model.kv_heads, model.head_dim, model.value_dim, center_bits});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool is_global = model.global_every != 0 && (i + 1) % model.global_every == 0;
    layers[i].window = is_global ? 0 : model.window;
  }
  return layers;
}

std::string describe(const Model& model) {
  std::string text = fmt::format("{} layer{} of {} KV head{} of {}", model.layers, model.layers == 1 ? "" : "s",
                                 model.kv_heads, model.kv_heads == 1 ? "" : "s", model.head_dim);
  if (model.value_dim != 0 && model.value_dim != model.head_dim) text += fmt::format(" (values {})", model.value_dim);
  if (model.window != 0) text += fmt::format(", window {}", model.window);
  if (model.global_every != 0) text += fmt::format(" but in one layer of {}", model.global_every);
  return text;
}

}  // namespace turboquant_plan
