// Storing, comparing and averaging over layers.
#include "measurement.hpp"

#include "accuracy.hpp"
#include "baselines.hpp"
#include "cached_formats.hpp"

#include <fmt/format.h>

#include <iterator>

namespace turboquant_eval {
namespace {

std::vector<Subject> store_all(const LayerTensors& tensors, const ExactLayer& layer, const CacheSettings& settings,
                               ProgressBar& bar) {
  std::vector<Subject> subjects{subject_f16(layer)};
  for (const CachedFormat& format : cached_formats()) {
    subjects.push_back(store(format, tensors, layer, settings));
    bar.advance();
  }
  for (Subject& subject : baselines(layer, settings.seed)) subjects.push_back(std::move(subject));
  return subjects;
}

// Weighted sums, until finish() divides them.
void add(FormatReport& format, const Subject& subject, const Accuracy& accuracy, const ExactLayer& layer) {
  format.name = subject.format;
  format.bits_per_coordinate += subject.bits_per_coordinate * static_cast<double>(layer.coordinates());
  format.key_bits += subject.key_bits * static_cast<double>(layer.kv_heads * layer.head_dim);
  format.value_bits += subject.value_bits * static_cast<double>(layer.kv_heads * layer.value_dim);
  format.bytes_per_token += subject.bytes_per_token;
  format.layers.push_back(accuracy);
}

void finish(FormatReport& format, double keys, double values) {
  format.accuracy = mean(format.layers);
  format.bits_per_coordinate /= keys + values;
  format.key_bits /= keys;
  format.value_bits /= values;
  format.compression = 16 / format.bits_per_coordinate;
}

}  // namespace

std::vector<ExactLayer> exact_layers(const LayerSet& layers, std::size_t drawn_heads, std::uint64_t seed) {
  std::vector<ExactLayer> result;
  for (const auto& [number, tensors] : layers) {
    ExactLayer& layer = result.emplace_back(exact_layer(tensors));
    if (layer.heads == 0 && drawn_heads > 0) draw_queries(layer, seed + number, drawn_heads);
  }
  return result;
}

Report measure(const LayerSet& layers, const CacheSettings& settings, bool draws_queries, bool shows_progress) {
  Report report;
  report.settings = settings;
  const std::vector<ExactLayer> exact = exact_layers(layers, draws_queries ? 1 : 0, settings.seed);
  std::size_t steps = 0;
  double keys = 0, values = 0;
  auto entry = layers.begin();
  for (const ExactLayer& layer : exact) {
    const auto& [number, tensors] = *entry++;
    report.layers.push_back({number, layer.tokens, layer.kv_heads, layer.heads, layer.head_dim, layer.value_dim,
                             layer.key_rounding, layer.value_rounding});
    report.has_drawn_queries |= !tensors.queries && draws_queries;
    steps += cached_formats().size() + query_blocks(layer);
    keys += static_cast<double>(layer.kv_heads * layer.head_dim);
    values += static_cast<double>(layer.kv_heads * layer.value_dim);
  }
  ProgressBar bar(steps, shows_progress);
  entry = layers.begin();
  for (const ExactLayer& layer : exact) {
    const std::vector<Subject> subjects = store_all((entry++)->second, layer, settings, bar);
    const std::vector<Accuracy> accuracies = compare(layer, subjects, [&] { bar.advance(); });
    report.formats.resize(subjects.size());
    for (std::size_t i = 0; i < subjects.size(); ++i) add(report.formats[i], subjects[i], accuracies[i], layer);
  }
  for (FormatReport& format : report.formats) {
    finish(format, keys, values);
    for (std::size_t i = 0; i < format.layers.size(); ++i) {
      if (format.layers[i].coded_tokens > 0) continue;
      throw MeasurementError(fmt::format("{}: no token of layer {} was coded: all keys and values read back exactly",
                                         format.name, report.layers[i].number));
    }
  }
  return report;
}

}  // namespace turboquant_eval
