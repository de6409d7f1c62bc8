// Runs formats over layers with other pages, centres and keys, and lays the figures out.
#include "study.hpp"

#include "accuracy.hpp"
#include "measurement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>

namespace turboquant_eval {
namespace {

constexpr const char* kPageCodecs[] = {"polar4", "trellis4", "polar3", "trellis3", "polar2", "trellis2"};
constexpr std::size_t kPages[] = {32, 64, 128, 256};
constexpr unsigned kCenters[] = {0, 8, 16};

// Keys and values of each name; the values are studied.
constexpr const char* kValuePairs[][2] = {
    {"polar4", "polar4"}, {"polar4/scalar4", "scalar4"}, {"trellis4", "trellis4"},
    {"polar3", "polar3"}, {"polar3/scalar3", "scalar3"}, {"trellis3", "trellis3"},
    {"polar2", "polar2"}, {"polar2/scalar2", "scalar2"}, {"trellis2", "trellis2"}};

constexpr std::string_view kOffsetCodecs[] = {"polar8",   "polar4", "trellis4", "polar3",
                                              "trellis3", "polar2", "trellis2"};
struct OffsetCase {
  unsigned center_bits;
  double deviations;
};
constexpr OffsetCase kOffsetCases[] = {{0, 20}, {8, 20}, {8, 100}, {16, 100}};
constexpr std::size_t kDrawnHeads = 8;  // per KV head; the ratio of two errors needs many queries

struct Measured {
  double key_bits = 0, value_bits = 0;
  Accuracy accuracy;
};

// Each format on all layers.
std::vector<Measured> measure_all(const std::vector<CachedFormat>& formats, const LayerSet& layers,
                                  const std::vector<ExactLayer>& exact, const CacheSettings& settings) {
  std::vector<std::vector<Accuracy>> accuracies(formats.size());
  std::vector<Measured> result(formats.size());
  auto entry = layers.begin();
  for (const ExactLayer& layer : exact) {
    const LayerTensors& tensors = (entry++)->second;
    std::vector<Subject> subjects;
    for (const CachedFormat& format : formats) subjects.push_back(store(format, tensors, layer, settings));
    const std::vector<Accuracy> figures = compare(layer, subjects);
    for (std::size_t i = 0; i < formats.size(); ++i) {
      accuracies[i].push_back(figures[i]);
      result[i].key_bits += subjects[i].key_bits / static_cast<double>(exact.size());
      result[i].value_bits += subjects[i].value_bits / static_cast<double>(exact.size());
    }
  }
  for (std::size_t i = 0; i < formats.size(); ++i) result[i].accuracy = mean(accuracies[i]);
  return result;
}

std::vector<ExactLayer> without_queries(const LayerSet& layers, const CacheSettings& settings) {
  std::vector<ExactLayer> exact = exact_layers(layers, 0, settings.seed);
  for (ExactLayer& layer : exact) layer.heads = 0;
  return exact;
}

std::string page_tables(const std::vector<PageStudy>& figures) {
  std::string text = "Pages and centres: true bits and errors of keys and of values\n";
  for (std::size_t i = 0; i < figures.size(); ++i) {
    const PageStudy& row = figures[i];
    if (i % (std::size(kPages) * std::size(kCenters)) == 0) {
      text += fmt::format("\n{:<10}", row.codecs);
      for (const unsigned bits : kCenters) {
        text += fmt::format("   {:<32}", bits == 0 ? "not centred" : fmt::format("{}-bit centres", bits));
      }
      text += "\n page      ";
      for (std::size_t c = 0; c < std::size(kCenters); ++c) {
        text += fmt::format("{:>8}{:>9}{:>9}{:>9}", "keys", "error", "values", "error");
      }
      text += '\n';
    }
    if (i % std::size(kCenters) == 0) text += fmt::format("{:>5}      ", row.page_tokens);
    text +=
        fmt::format("{:>8.3f}{:>9.3g}{:>9.3f}{:>9.3g}", row.key_bits, row.key_error, row.value_bits, row.value_error);
    if (i % std::size(kCenters) == std::size(kCenters) - 1) text += '\n';
  }
  return text;
}

std::string value_table(const std::vector<ValueStudy>& figures) {
  std::string text = fmt::format("\nValue codecs, 8-bit centres\n\n{:<10}{:>8}{:>10}{:>18}\n", "codec", "bits", "error",
                                 "error * 4^bits");
  for (const ValueStudy& row : figures) {
    text += fmt::format("{:<10}{:>8.3f}{:>10.3g}{:>18.3f}\n", row.codec, row.bits, row.error,
                        row.error * std::pow(4, row.bits));
  }
  return text;
}

std::string offset_table(const std::vector<OffsetStudy>& figures) {
  std::string text = fmt::format(
      "\nA constant added to all keys, in standard deviations of them: errors, and how many times those without it\n\n"
      "{:<10}{:>10}{:>8}{:>12}{:>8}{:>12}{:>8}{:>12}{:>8}\n",
      "codecs", "centres", "offset", "output", "times", "key", "times", "KL", "times");
  for (const OffsetStudy& row : figures) {
    text += fmt::format("{:<10}{:>10}{:>8}{:>12.3g}{:>8.2f}{:>12.3g}{:>8.2f}{:>12.3g}{:>8.2f}\n", row.codecs,
                        row.center_bits == 0 ? "none" : fmt::format("{} bits", row.center_bits), row.deviations,
                        row.output_error, row.output_error / row.plain_output_error, row.key_error,
                        row.key_error / row.plain_key_error, row.kl, row.kl / row.plain_kl);
  }
  return text;
}

// The layers with a constant added to the keys, and their numbers with the queries of `plain`.
std::pair<LayerSet, std::vector<ExactLayer>> shifted(const LayerSet& layers, const std::vector<ExactLayer>& plain,
                                                     double deviations) {
  std::pair<LayerSet, std::vector<ExactLayer>> result;
  auto& [set, exact] = result;
  for (const auto& [number, tensors] : layers) {
    const LayerTensors& moved = set.emplace(number, with_offset(tensors, deviations)).first->second;
    const ExactLayer& before = plain[exact.size()];
    ExactLayer& layer = exact.emplace_back(exact_layer(moved));
    layer.heads = before.heads;
    layer.queries = before.queries;
  }
  return result;
}

}  // namespace

std::vector<PageStudy> study_pages(const LayerSet& layers, const CacheSettings& settings, const Advance& advance) {
  const std::vector<ExactLayer> exact = without_queries(layers, settings);
  std::vector<PageStudy> result;
  for (const char* codecs : kPageCodecs) {
    for (const std::size_t page : kPages) {
      std::vector<CachedFormat> formats;
      for (const unsigned bits : kCenters) formats.push_back(cached_format(codecs, bits));
      const std::vector<Measured> figures = measure_all(formats, layers, exact, {page, settings.seed});
      for (std::size_t i = 0; i < formats.size(); ++i) {
        const Measured& at = figures[i];
        result.push_back(
            {codecs, page, kCenters[i], at.key_bits, at.value_bits, at.accuracy.key_error, at.accuracy.value_error});
      }
      if (advance) advance();
    }
  }
  return result;
}

std::vector<ValueStudy> study_values(const LayerSet& layers, const CacheSettings& settings, const Advance& advance) {
  const std::vector<ExactLayer> exact = without_queries(layers, settings);
  std::vector<ValueStudy> result;
  for (const auto& [pair, codec] : kValuePairs) {
    const Measured at = measure_all({cached_format(pair, 8)}, layers, exact, settings).front();
    result.push_back({codec, at.value_bits, at.accuracy.value_error});
    if (advance) advance();
  }
  return result;
}

std::vector<OffsetStudy> study_offsets(const LayerSet& layers, const CacheSettings& settings,
                                       std::span<const std::string_view> codecs, const Advance& advance) {
  const std::vector<ExactLayer> plain = exact_layers(layers, kDrawnHeads, settings.seed);
  std::vector<OffsetStudy> result(codecs.size() * std::size(kOffsetCases));
  std::map<unsigned, std::vector<Measured>> before;  // by bits of centres
  for (std::size_t c = 0; c < std::size(kOffsetCases); ++c) {
    const auto [center_bits, deviations] = kOffsetCases[c];
    std::vector<CachedFormat> formats;
    for (const std::string_view name : codecs) formats.push_back(cached_format(name, center_bits));
    if (!before.contains(center_bits)) before[center_bits] = measure_all(formats, layers, plain, settings);
    const auto [set, exact] = shifted(layers, plain, deviations);
    const std::vector<Measured> after = measure_all(formats, set, exact, settings);
    for (std::size_t i = 0; i < codecs.size(); ++i) {
      const Accuracy &with = after[i].accuracy, &without = before[center_bits][i].accuracy;
      result[i * std::size(kOffsetCases) + c] = {std::string(codecs[i]), center_bits,       deviations,
                                                 with.output_error,      with.key_error,    with.kl,
                                                 without.output_error,   without.key_error, without.kl};
    }
    if (advance) advance();
  }
  return result;
}

std::string study(const LayerSet& layers, const CacheSettings& settings, bool shows_progress) {
  ProgressBar bar(std::size(kPageCodecs) * std::size(kPages) + std::size(kValuePairs) + std::size(kOffsetCases),
                  shows_progress);
  const Advance advance = [&] { bar.advance(); };
  std::string text = page_tables(study_pages(layers, settings, advance));
  std::size_t tokens = 0;
  for (const auto& [number, tensors] : layers) tokens = (std::max)(tokens, tensors.keys.shape[1]);
  text += fmt::format(
      "\nBits of full pages. The longest layer here has {} tokens: larger pages are sealed with those in them, their\n"
      "bits are what longer inputs would pay.\n",
      tokens);
  text += value_table(study_values(layers, settings, advance));
  text += offset_table(study_offsets(layers, settings, kOffsetCodecs, advance));
  text += "Layers without queries get drawn ones.\n";
  return text;
}

}  // namespace turboquant_eval
