// Models whose cache is planned: well-known ones by name, others by their numbers.
#pragma once

#include <eval/layer_plan.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace turboquant_plan {

using turboquant_eval::LayerPlan;
using turboquant_eval::PlanError;

struct Model {
  std::string_view name;
  std::uint32_t layers = 0, kv_heads = 0, head_dim = 0;
  std::uint32_t value_dim = 0;     // 0: head_dim
  std::uint32_t window = 0;        // tokens that a layer sees; 0: all
  std::uint32_t global_every = 0;  // the last of every so many layers has no window; 0: all have it
  std::uint64_t parameters = 0;    // 0: unknown
};

std::span<const Model> presets();

/// Throws PlanError, with all the names, for any other.
Model preset(std::string_view name);

/// The layers in the plan's formats with the model's windows. `plan` as in turboquant_eval::layer_plan. Throws
/// PlanError for a model that no cache can hold.
LayerPlan layers_of(const Model& model, std::string_view plan, std::uint8_t center_bits);

/// Such as "8 layers of 20 KV heads of 128, window 4096".
std::string describe(const Model& model);

}  // namespace turboquant_plan
