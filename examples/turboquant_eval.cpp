// Measures what each format does to real keys, values and queries: size, errors, attention.
#include "eval/layer_plan.hpp"
#include "eval/layer_set.hpp"
#include "eval/measurement.hpp"
#include "eval/plot.hpp"
#include "eval/report.hpp"
#include "eval/study.hpp"
#include "eval/suggestion.hpp"

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
  std::filesystem::path json, plot;
  CacheSettings settings;
  std::vector<unsigned> layers;
  bool is_quiet = false, shows_layers = false, draws_queries = false, studies = false, suggests = false;
  double error_limit = kErrorLimit;
  std::string plan;
  ModelShape model{32, 8, 128, 128, 8};
};

void declare(CLI::App& app, Arguments& arguments) {
  app.add_option("inputs", arguments.inputs,
                 "safetensors files, .npy files named <prefix>layers.N.k.npy (.v, .q), or directories of those; "
                 "keys and values [kv_heads, tokens, head_dim], queries [heads, tokens, head_dim]. "
                 "Without any: the sample in the repository");
  app.add_option("--json", arguments.json, "write the same numbers to this file");
  app.add_option("--plot", arguments.plot, "draw errors against true bits into this SVG file");
  app.add_option("--page-tokens", arguments.settings.page_tokens, "tokens per page")->capture_default_str();
  app.add_option("--seed", arguments.settings.seed, "of the rotation")->capture_default_str();
  app.add_option("--layers", arguments.layers, "only these layers, such as 0,3")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_flag("--per-layer", arguments.shows_layers, "print the errors of each layer too");
  app.add_flag("--synthetic-queries", arguments.draws_queries, "draw queries for layers that have none");
  app.add_flag("--quiet", arguments.is_quiet, "print nothing but errors");

  app.add_flag("--study", arguments.studies,
               "instead of the table: page sizes and bits of centres, value codecs, and keys with an offset");
  app.add_flag("--suggest", arguments.suggests,
               "instead of the table: bits of centres and a format for each layer, by a rule printed with them");
  app.add_option("--error-limit", arguments.error_limit, "of --suggest: the largest error of keys and of values")
      ->capture_default_str();

  auto* plan = app.add_option("--plan", arguments.plan,
                              "instead of the table: the bits of each layer of a model and their true average. "
                              "8, 4, 3 or 2; conservative (first and last tenth of the layers at 8 bits, the rest "
                              "at 4); aggressive (3 bits); or such as {\"layers.0\": 8, \"default\": 4}");
  app.add_option("--layers-count", arguments.model.layers, "of --plan: layers of the model")
      ->capture_default_str()
      ->needs(plan);
  app.add_option("--kv-heads", arguments.model.kv_heads, "of --plan")->capture_default_str()->needs(plan);
  app.add_option("--head-dim", arguments.model.head_dim, "of --plan")->capture_default_str()->needs(plan);
  app.footer(
      "Errors are energies relative to that of the exact keys (less their mean over tokens, which softmax ignores),\n"
      "values and outputs: sums over the coded tokens and all heads of a layer, then the mean over layers. KL and\n"
      "top-1 are means over queries, then over layers.");
}

int print_plan(const Arguments& arguments) {
  ModelShape model = arguments.model;
  model.value_dim = model.head_dim;
  const LayerPlan plan = layer_plan(arguments.plan, model);
  fmt::print("{}", describe(plan, arguments.settings.page_tokens));
  return 0;
}

int print_table(const Arguments& arguments, const LayerSet& layers) {
  Report report = measure(layers, arguments.settings, arguments.draws_queries, !arguments.is_quiet);
  report.inputs = arguments.inputs;
  if (!arguments.is_quiet) {
    fmt::print("{}", table(report));
    if (arguments.shows_layers) fmt::print("{}", layer_table(report));
  }
  if (!arguments.json.empty()) write_json(report, arguments.json);
  if (!arguments.plot.empty()) write_plot(report, arguments.plot);
  return 0;
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
  if (!arguments.plan.empty()) return print_plan(arguments);
  const bool is_sample = arguments.inputs.empty();
  if (is_sample) {
    arguments.inputs.emplace_back(TURBOQUANT_SOURCE_DIR "/examples/data/qkv-sample.safetensors");
  }
  const LayerSet layers =
      read_layers(arguments.inputs, std::set<unsigned>(arguments.layers.begin(), arguments.layers.end()));
  if (arguments.studies) {
    fmt::print("{}", study(layers, arguments.settings, !arguments.is_quiet));
  } else if (arguments.suggests) {
    fmt::print("{}", describe(suggest(layers, arguments.settings, arguments.error_limit), arguments.error_limit));
  } else {
    print_table(arguments, layers);
  }
  if (is_sample && !arguments.is_quiet) {
    fmt::print(
        "The sample is of a small model with tame keys (10-20 % of their energy is common to all tokens, no\n"
        "outlier channels): it flatters every format. Measure your own model's.\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const turboquant_eval::FileError& error) {
    fmt::print(stderr, "turboquant_eval: {}\n", error.what());
    return kBadInput;
  } catch (const turboquant_eval::PlanError& error) {
    fmt::print(stderr, "turboquant_eval: {}\n", error.what());
    return kBadInput;
  } catch (const std::exception& error) {
    fmt::print(stderr, "turboquant_eval: {}\n", error.what());
    return kMeasurementFailed;
  }
}
