// Measures what each format does to real keys, values and queries: size, errors, attention.
#include "eval/accuracy.hpp"
#include "eval/baselines.hpp"
#include "eval/cached_formats.hpp"
#include "eval/layer_set.hpp"
#include "eval/progress_bar.hpp"
#include "eval/report.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace {

using namespace turboquant_eval;

constexpr int kMeasurementFailed = 1, kBadInput = 2;

struct Arguments {
  std::vector<std::filesystem::path> inputs;
  std::filesystem::path json;
  CacheSettings settings;
  std::vector<unsigned> layers;
  bool is_quiet = false, shows_layers = false, draws_queries = false;
};

void declare(CLI::App& app, Arguments& arguments) {
  app.add_option("inputs", arguments.inputs,
                 "safetensors files, .npy files named <prefix>layers.N.k.npy (.v, .q), or directories of those; "
                 "keys and values [kv_heads, tokens, head_dim], queries [heads, tokens, head_dim]. "
                 "Without any: the sample in the repository");
  app.add_option("--json", arguments.json, "write the same numbers to this file");
  app.add_option("--page-tokens", arguments.settings.page_tokens, "tokens per page")->capture_default_str();
  app.add_option("--seed", arguments.settings.seed, "of the rotation")->capture_default_str();
  app.add_option("--layers", arguments.layers, "only these layers, such as 0,3")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_flag("--per-layer", arguments.shows_layers, "print the errors of each layer too");
  app.add_flag("--synthetic-queries", arguments.draws_queries, "draw queries for layers that have none");
  app.add_flag("--quiet", arguments.is_quiet, "print nothing but errors");
}

std::vector<Subject> store_all(const LayerTensors& tensors, const ExactLayer& layer, const CacheSettings& settings,
                               ProgressBar& bar) {
  std::vector<Subject> subjects{subject_f16(layer)};
  for (const CachedFormat& format : cached_formats()) {
    subjects.push_back(format.store(tensors, layer, settings));
    bar.advance();
  }
  subjects.push_back(subject_q8_0(layer));
  subjects.push_back(subject_q4_0(layer));
  return subjects;
}

// Means over layers, once the last layer is in.
void finish(FormatReport& format, double f16_bytes, double coordinates) {
  format.accuracy = mean(format.layers);
  format.compression = f16_bytes / format.bytes_per_token;
  format.bits_per_coordinate /= coordinates;
}

Report measure(const Arguments& arguments, const LayerSet& layers) {
  Report report{arguments.inputs, arguments.settings, false, {}, {}};
  std::vector<ExactLayer> exact;
  std::size_t steps = 0;
  for (const auto& [number, tensors] : layers) {
    ExactLayer& layer = exact.emplace_back(exact_layer(tensors));
    if (layer.heads == 0 && arguments.draws_queries) {
      draw_queries(layer, arguments.settings.seed + number);
      report.has_drawn_queries = true;
    }
    report.layers.push_back({number, layer.tokens, layer.kv_heads, layer.heads, layer.head_dim, layer.value_dim,
                             layer.key_rounding, layer.value_rounding});
    steps += cached_formats().size() + query_blocks(layer);
  }
  ProgressBar bar(steps, !arguments.is_quiet);
  double coordinates = 0;
  auto tensors = layers.begin();
  for (const ExactLayer& layer : exact) {
    const std::vector<Subject> subjects = store_all((tensors++)->second, layer, arguments.settings, bar);
    const std::vector<Accuracy> accuracies = compare(layer, subjects, [&] { bar.advance(); });
    report.formats.resize(subjects.size());
    coordinates += static_cast<double>(layer.coordinates());
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      FormatReport& format = report.formats[i];
      format.name = subjects[i].format;
      format.bits_per_coordinate += subjects[i].bits_per_coordinate * static_cast<double>(layer.coordinates());
      format.bytes_per_token += subjects[i].bytes_per_token;
      format.layers.push_back(accuracies[i]);
    }
  }
  for (FormatReport& format : report.formats) {
    finish(format, 2 * coordinates, coordinates);
    for (std::size_t i = 0; i < format.layers.size(); ++i) {
      if (format.layers[i].coded_tokens > 0) continue;
      throw MeasurementError(fmt::format("{}: no token of layer {} was coded: all keys and values read back exactly",
                                         format.name, report.layers[i].number));
    }
  }
  return report;
}

int run(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Errors and sizes of turboquant's formats on real keys and values", "turboquant_eval");
  declare(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kBadInput;
  }
  if (const std::string why = why_invalid(arguments.settings); !why.empty()) {
    fmt::print(stderr, "turboquant_eval: {}\n", why);
    return kBadInput;
  }
  const bool is_sample = arguments.inputs.empty();
  if (is_sample) {
    arguments.inputs.emplace_back(TURBOQUANT_SOURCE_DIR "/examples/data/qkv-sample.safetensors");
  }
  const LayerSet layers =
      read_layers(arguments.inputs, std::set<unsigned>(arguments.layers.begin(), arguments.layers.end()));
  const Report report = measure(arguments, layers);
  if (!arguments.is_quiet) {
    fmt::print("{}", table(report));
    if (is_sample) {
      fmt::print(
          "The sample is of a small model with tame keys (10-20 % of their energy is common to all tokens, no\n"
          "outlier channels): it flatters every format. Measure your own model's.\n");
    }
    if (arguments.shows_layers) fmt::print("{}", layer_table(report));
  }
  if (!arguments.json.empty()) write_json(report, arguments.json);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const turboquant_eval::FileError& error) {
    fmt::print(stderr, "turboquant_eval: {}\n", error.what());
    return kBadInput;
  } catch (const std::exception& error) {
    fmt::print(stderr, "turboquant_eval: {}\n", error.what());
    return kMeasurementFailed;
  }
}
