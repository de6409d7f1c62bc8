// Table and JSON.
#include "report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>

namespace turboquant_eval {
namespace {

using nlohmann::ordered_json;

std::string number(double value, const char* format) {
  return std::isnan(value) ? "-" : fmt::format(fmt::runtime(format), value);
}

std::string describe(const LayerReport& layer, std::size_t page_tokens) {
  const std::size_t full = layer.tokens / page_tokens, rest = layer.tokens % page_tokens;
  std::string pages = full > 0 ? fmt::format("{} full page{}", full, full == 1 ? "" : "s") : "";
  if (rest > 0) pages += fmt::format("{}a sealed page of {}", full > 0 ? " and " : "", rest);
  const std::string dims = layer.head_dim == layer.value_dim
                               ? fmt::to_string(layer.head_dim)
                               : fmt::format("{} (keys) and {} (values)", layer.head_dim, layer.value_dim);
  return fmt::format("{} KV head{} of {}, {}, {} tokens in {}", layer.kv_heads, layer.kv_heads == 1 ? "" : "s", dims,
                     layer.heads > 0 ? fmt::format("{} query heads", layer.heads) : "no queries", layer.tokens, pages);
}

// Layers of the same shape share a line.
std::string describe_layers(const Report& report) {
  std::vector<std::pair<std::string, std::vector<unsigned>>> lines;
  for (const LayerReport& layer : report.layers) {
    const std::string line = describe(layer, report.settings.page_tokens);
    const auto same = std::find_if(lines.begin(), lines.end(), [&](const auto& entry) { return entry.first == line; });
    if (same == lines.end()) {
      lines.push_back({line, {layer.number}});
    } else {
      same->second.push_back(layer.number);
    }
  }
  std::string text;
  for (const auto& [line, numbers] : lines) {
    text += fmt::format("layer{} {}: {}\n", numbers.size() == 1 ? "" : "s", fmt::join(numbers, ", "), line);
  }
  return text;
}

// The fewest tokens that any cached format coded, and how many there were; both over all layers.
std::string describe_coded(const Report& report) {
  std::size_t tokens = 0, coded = 0;
  for (const LayerReport& layer : report.layers) tokens += layer.tokens;
  coded = tokens;
  for (const FormatReport& format : report.formats) coded = (std::min)(coded, format.accuracy.coded_tokens);
  return fmt::format("coded: {} of {} tokens (all layers together); figures are over coded tokens only\n", coded,
                     tokens);
}

ordered_json as_json(const Accuracy& accuracy) {
  return {{"coded_tokens", accuracy.coded_tokens},
          {"key_error", accuracy.key_error},
          {"value_error", accuracy.value_error},
          {"output_error", accuracy.output_error},
          {"kl", accuracy.kl},
          {"top1", accuracy.top1}};
}

std::string error_columns(const Report& report, const char* title, double Accuracy::*error) {
  std::string text = fmt::format("\n{:<20}", title);
  for (const LayerReport& layer : report.layers) text += fmt::format("  layer {:>3}", layer.number);
  text += '\n';
  for (const FormatReport& format : report.formats) {
    text += fmt::format("{:<20}", format.name);
    for (const Accuracy& layer : format.layers) text += fmt::format("  {:>9}", number(layer.*error, "{:.3g}"));
    text += '\n';
  }
  return text;
}

}  // namespace

std::string table(const Report& report) {
  std::vector<std::string> names;
  for (const auto& input : report.inputs) names.push_back(input.filename().string());
  std::string text = fmt::format("{}\n", fmt::join(names, ", "));
  text += describe_layers(report) + describe_coded(report);
  if (report.has_drawn_queries) text += "queries: drawn at random, not a model's\n";
  text += fmt::format("\n{:<20}{:>8}{:>10}{:>9}{:>11}{:>11}{:>11}{:>11}{:>9}\n", "format", "bits", "bytes per",
                      "smaller", "key", "value", "output", "KL of", "top-1");
  text += fmt::format("{:<20}{:>8}{:>10}{:>9}{:>11}{:>11}{:>11}{:>11}{:>9}\n", "", "per num", "token", "than f16",
                      "error", "error", "error", "weights", "same");
  for (const FormatReport& format : report.formats) {
    const Accuracy& accuracy = format.accuracy;
    text += fmt::format("{:<20}{:>8.3f}{:>10.0f}{:>8.2f}x{:>11}{:>11}{:>11}{:>11}{:>9}\n", format.name,
                        format.bits_per_coordinate, format.bytes_per_token, format.compression,
                        number(accuracy.key_error, "{:.3g}"), number(accuracy.value_error, "{:.3g}"),
                        number(accuracy.output_error, "{:.3g}"), number(accuracy.kl, "{:.3g}"),
                        number(100 * accuracy.top1, "{:.1f} %"));
  }
  double keys = 0, values = 0;
  for (const LayerReport& layer : report.layers) {
    keys += layer.key_rounding / static_cast<double>(report.layers.size());
    values += layer.value_rounding / static_cast<double>(report.layers.size());
  }
  text += fmt::format(
      "\nBits and bytes are those of full pages with everything in them, of KIVI those of this many tokens, of\n"
      "TurboProd those of keys alone; bytes are for all layers of the input together. Errors are energies relative to\n"
      "that of the exact keys (centred), values and outputs, pooled over the heads of a layer, then averaged over\n"
      "layers. Exact is what is left after rounding to bf16, which costs {:.2g} (keys) and {:.2g} (values).\n",
      keys, values);
  return text;
}

std::string layer_table(const Report& report) {
  return error_columns(report, "key error", &Accuracy::key_error) +
         error_columns(report, "value error", &Accuracy::value_error);
}

void write_json(const Report& report, const std::filesystem::path& file) {
  ordered_json root;
  for (const auto& input : report.inputs) root["inputs"].push_back(input.filename().string());
  root["page_tokens"] = report.settings.page_tokens;
  root["seed"] = report.settings.seed;
  root["drawn_queries"] = report.has_drawn_queries;
  for (const LayerReport& layer : report.layers) {
    root["layers"].push_back({{"layer", layer.number},
                              {"tokens", layer.tokens},
                              {"kv_heads", layer.kv_heads},
                              {"heads", layer.heads},
                              {"head_dim", layer.head_dim},
                              {"value_dim", layer.value_dim},
                              {"sealed_page_tokens", layer.tokens % report.settings.page_tokens},
                              {"key_rounding", layer.key_rounding},
                              {"value_rounding", layer.value_rounding}});
  }
  for (const FormatReport& format : report.formats) {
    ordered_json entry = {{"format", format.name},
                          {"bits_per_coordinate", format.bits_per_coordinate},
                          {"key_bits", format.key_bits},
                          {"value_bits", format.value_bits},
                          {"bytes_per_token", format.bytes_per_token},
                          {"compression", format.compression}};
    entry.update(as_json(format.accuracy));
    for (std::size_t i = 0; i < format.layers.size(); ++i) {
      ordered_json layer = {{"layer", report.layers[i].number}};
      layer.update(as_json(format.layers[i]));
      entry["layers"].push_back(layer);
    }
    root["formats"].push_back(entry);
  }
  std::ofstream stream(file);
  stream << root.dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
  stream.flush();
  if (!stream) throw MeasurementError(fmt::format("{}: cannot be written", file.string()));
}

}  // namespace turboquant_eval
