// Offsets of rotated keys, and the narrowest format within a limit.
#include "suggestion.hpp"

#include "accuracy.hpp"

#include <turboquant/kernels/portable.hpp>
#include <turboquant/transform/rotation.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace turboquant_eval {
namespace {

// Largest |mean of a page| coordinate over the spread, of one head.
double offset_of(const ExactLayer& layer, std::size_t head, const CacheSettings& settings) {
  const std::size_t dim = layer.head_dim, order = turboquant::base_order(dim);
  const turboquant::Rotation rotation(settings.seed, dim);
  const turboquant::kernels::RotationView view{dim, rotation.signs(), turboquant::base_matrix(order), order};
  double largest = 0, energy = 0;
  std::vector<float> center(dim);
  for (std::size_t first = 0; first < layer.tokens; first += settings.page_tokens) {
    const std::size_t count = (std::min)(settings.page_tokens, layer.tokens - first);
    for (std::size_t i = 0; i < dim; ++i) {
      double sum = 0, squares = 0;
      for (std::size_t t = 0; t < count; ++t) sum += static_cast<double>(layer.key(head, first + t)[i]);
      const double mean = sum / static_cast<double>(count);
      for (std::size_t t = 0; t < count; ++t) {
        const double rest = static_cast<double>(layer.key(head, first + t)[i]) - mean;
        squares += rest * rest;
      }
      center[i] = static_cast<float>(mean);
      energy += squares;
    }
    turboquant::kernels::Portable::rotate(view, center.data(), center.data());
    for (const float x : center) largest = (std::max)(largest, std::abs(static_cast<double>(x)));
  }
  const double spread = std::sqrt(energy / static_cast<double>(layer.tokens * dim));
  return spread > 0 ? largest / spread : 0;
}

LayerSuggestion suggest_layer(const LayerTensors& tensors, const CacheSettings& settings, double error_limit) {
  const ExactLayer layer = exact_layer(tensors);
  LayerSuggestion result;
  for (std::size_t head = 0; head < layer.kv_heads; ++head) {
    result.offset = (std::max)(result.offset, offset_of(layer, head, settings));
  }
  result.rounding = result.offset * result.offset / (127.0 * 127.0 * 12);
  result.center_bits = result.rounding > kRoundingLimit ? 16 : 8;
  ExactLayer rows = layer;  // without queries: errors of rows are asked for
  rows.heads = 0;
  for (const unsigned bits : {2U, 3U, 4U, 8U}) {
    result.bits = bits;
    const Subject subject =
        store(cached_format(fmt::format("TQ{}", bits), result.center_bits), tensors, layer, settings);
    const Accuracy accuracy = compare(rows, std::span(&subject, 1)).front();
    const bool is_exact = accuracy.coded_tokens == 0;  // such as zeros
    result.key_error = is_exact ? 0 : accuracy.key_error;
    result.value_error = is_exact ? 0 : accuracy.value_error;
    result.true_bits = subject.bits_per_coordinate;
    result.is_within_limit = result.key_error <= error_limit && result.value_error <= error_limit;
    if (result.is_within_limit) break;
  }
  return result;
}

}  // namespace

std::vector<LayerSuggestion> suggest(const LayerSet& layers, const CacheSettings& settings, double error_limit) {
  std::vector<LayerSuggestion> result;
  for (const auto& [number, tensors] : layers) {
    result.push_back(suggest_layer(tensors, settings, error_limit));
    result.back().layer = number;
  }
  return result;
}

std::string describe(const std::vector<LayerSuggestion>& layers, double error_limit) {
  std::string text = fmt::format("{:>5}{:>10}{:>12}{:>9}{:>8}{:>8}{:>11}{:>13}\n", "layer", "offset", "int8 adds",
                                 "centre", "format", "bits", "key error", "value error");
  std::map<unsigned, std::size_t> widths;
  for (const LayerSuggestion& layer : layers) {
    text += fmt::format("{:>5}{:>10.1f}{:>10.2g} %{:>9}{:>8}{:>8.3f}{:>11.3g}{:>13.3g}{}\n", layer.layer, layer.offset,
                        100 * layer.rounding, fmt::format("{} bits", layer.center_bits),
                        fmt::format("TQ{}", layer.bits), layer.true_bits, layer.key_error, layer.value_error,
                        layer.is_within_limit ? "" : "  above the limit even so");
    ++widths[layer.bits];
  }
  const auto most =
      std::max_element(widths.begin(), widths.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string plan;
  for (const LayerSuggestion& layer : layers) {
    if (layer.bits != most->first) plan += fmt::format("\"layers.{}\": {}, ", layer.layer, layer.bits);
  }
  text += fmt::format("plan: {{{}\"default\": {}}}\n", plan, most->first);
  text += fmt::format(
      "\noffset: the largest coordinate of a page's mean key, rotated, in units of the spread around the mean. "
      "Rounding\n"
      "the mean to int8 adds up to (offset / 127)^2 / 12 to the energy that is left to code; where that is more than\n"
      "{:.2g} %, centres get 16 bits, else 8, the default. The format is the narrowest whose errors of keys and of\n"
      "values, measured with these centres, are at most {:.3g}; the default is TQ4.\n",
      100 * kRoundingLimit, error_limit);
  return text;
}

}  // namespace turboquant_eval
