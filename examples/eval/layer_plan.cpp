// Plans by rule and from text.
#include "layer_plan.hpp"

#include <turboquant/cache/format.hpp>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <functional>
#include <iterator>
#include <map>
#include <set>

namespace turboquant_eval {
namespace {

using nlohmann::json;

constexpr unsigned kWidths[] = {8, 4, 3, 2};  // of the formats of the cache

std::uint32_t format_of(unsigned bits, std::string_view where) {
  const auto* const found = std::find(std::begin(kWidths), std::end(kWidths), bits);
  if (found == std::end(kWidths)) throw PlanError(fmt::format("{}: expected 8, 4, 3 or 2 bits, found {}", where, bits));
  return static_cast<std::uint32_t>(found - std::begin(kWidths));
}

LayerPlan planned(const ModelShape& model, const std::function<unsigned(std::uint32_t)>& bits) {
  constexpr std::uint32_t kMostLayers = 1U << 20;
  if (model.layers == 0 || model.layers > kMostLayers) {
    throw PlanError(fmt::format("layers of the model: expected 1 to {}, found {}", kMostLayers, model.layers));
  }
  turboquant::CacheConfig config;
  config.layers.clear();
  for (std::uint32_t i = 0; i < model.layers; ++i) {
    turboquant::LayerShape layer;
    layer.kv_heads = model.kv_heads;
    layer.head_dim = model.head_dim;
    layer.value_dim = model.value_dim == 0 ? model.head_dim : model.value_dim;
    layer.center_bits = model.center_bits;
    layer.format = format_of(bits(i), fmt::format("layers.{}", i));
    config.layers.push_back(layer);
  }
  if (const std::string why = turboquant::why_invalid(config, std::size(kWidths)); !why.empty()) throw PlanError(why);
  return std::move(config.layers);
}

// N of "layers.N", one of the model's layers.
std::uint32_t layer_number(const std::string& name, std::uint32_t layers) {
  constexpr std::string_view kPrefix = "layers.";
  const auto refuse = [&](const std::string& expected) {
    throw PlanError(fmt::format("plan: expected {}, found \"{}\"", expected, name));
  };
  if (!name.starts_with(kPrefix)) refuse("\"layers.N\" or \"default\"");
  const std::string_view digits = std::string_view(name).substr(kPrefix.size());
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size() || fmt::to_string(number) != digits) {
    refuse("\"layers.N\" with a number N");
  }
  if (number >= layers) refuse(fmt::format("layers below {}", layers));
  return number;
}

// Refuses names that come twice, of which the JSON library would keep the last.
json parsed(std::string_view text) {
  std::set<std::string> names;
  const auto check = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key && !names.insert(value.get<std::string>()).second) {
      throw PlanError(fmt::format("plan: expected each name once, found {} twice", value.dump()));
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& error) {
    throw PlanError(
        fmt::format("plan: expected a width, \"conservative\", \"aggressive\" or a JSON object, found: {} ({})", text,
                    error.what()));
  }
}

unsigned width_in(const json& value, const std::string& name) {
  if (value.is_number_unsigned() && value.get<std::uint64_t>() <= 8) {
    const auto bits = value.get<unsigned>();
    format_of(bits, name);
    return bits;
  }
  throw PlanError(fmt::format("{}: expected 8, 4, 3 or 2 bits, found {}", name, value.dump()));
}

template <class F>
turboquant::layout::PageShape page_shape_of(const turboquant::LayerShape& layer, std::size_t page_tokens) {
  using Key = typename F::key_codec;
  using Value = typename F::value_codec;
  const std::size_t value_dim = layer.value_dim == 0 ? layer.head_dim : layer.value_dim;
  return {page_tokens,
          layer.kv_heads,
          layer.center_bits,
          {layer.head_dim, Key::bits, false},
          {value_dim, Value::bits, Value::zero_points}};
}

}  // namespace

LayerPlan uniform_plan(const ModelShape& model, unsigned bits) {
  return planned(model, [=](std::uint32_t) { return bits; });
}

LayerPlan conservative_plan(const ModelShape& model) {
  const std::uint32_t tenth = model.layers / 10 + (model.layers % 10 == 0 ? 0 : 1);
  return planned(model, [&](std::uint32_t i) { return i < tenth || model.layers - 1 - i < tenth ? 8U : 4U; });
}

LayerPlan aggressive_plan(const ModelShape& model) { return uniform_plan(model, 3); }

LayerPlan layer_plan(std::string_view text, const ModelShape& model) {
  if (text == "conservative") return conservative_plan(model);
  if (text == "aggressive") return aggressive_plan(model);
  const json root = parsed(text);
  if (!root.is_object()) return uniform_plan(model, width_in(root, "plan"));
  std::map<std::uint32_t, unsigned> widths;
  unsigned rest = 0;
  for (const auto& [name, value] : root.items()) {
    const unsigned bits = width_in(value, name);
    if (name == "default") {
      rest = bits;
    } else {
      widths[layer_number(name, model.layers)] = bits;
    }
  }
  return planned(model, [&](std::uint32_t i) {
    const auto found = widths.find(i);
    if (found != widths.end()) return found->second;
    if (rest == 0) throw PlanError(fmt::format("plan: expected \"layers.{}\" or \"default\", found neither", i));
    return rest;
  });
}

unsigned bits_of(const turboquant::LayerShape& layer) { return kWidths[layer.format]; }

turboquant::layout::PageShape page_shape(const turboquant::LayerShape& layer, std::size_t page_tokens) {
  using namespace turboquant;
  constexpr layout::PageShape (*kShapes[])(const LayerShape&, std::size_t) = {page_shape_of<TQ8>, page_shape_of<TQ4>,
                                                                              page_shape_of<TQ3>, page_shape_of<TQ2>};
  return kShapes[layer.format](layer, page_tokens);
}

double average_bits(std::span<const turboquant::LayerShape> plan, std::size_t page_tokens) {
  using namespace turboquant;
  double bits = 0, coordinates = 0;
  for (const LayerShape& layer : plan) {
    const layout::PageShape shape = page_shape(layer, page_tokens);
    const auto width = static_cast<double>(shape.kv_heads * (shape.key.dim + shape.value.dim));
    bits += layout::bits_per_coordinate(shape) * width;
    coordinates += width;
  }
  return bits / coordinates;
}

std::string describe(const LayerPlan& plan, std::size_t page_tokens) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < plan.size(); begin = end) {
    while (end < plan.size() && plan[end].format == plan[begin].format) ++end;
    const std::string layers =
        end - begin == 1 ? fmt::format("layer {}", begin) : fmt::format("layers {} to {}", begin, end - 1);
    const unsigned bits = bits_of(plan[begin]);
    text += fmt::format("{:<18}{} bits  TQ{}\n", layers, bits, bits);
  }
  const double average = average_bits(plan, page_tokens);
  double bytes = 0;
  for (const auto& layer : plan) {
    bytes += average_bits(std::span(&layer, 1), page_tokens) * layer.kv_heads * (layer.head_dim + layer.value_dim) / 8;
  }
  return text + fmt::format("true average: {:.3f} bits per number, {:.0f} bytes per token, {:.2f}x smaller than f16\n",
                            average, bytes, 16 / average);
}

}  // namespace turboquant_eval
