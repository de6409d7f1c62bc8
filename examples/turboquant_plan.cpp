// Says how much memory the cache of a model takes in each format, and what fits into a machine.
#include "plan/report.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace {

using namespace turboquant_plan;

constexpr int kNotWritten = 1, kBadInput = 2;

struct Arguments {
  std::string model, plan;
  std::optional<std::uint32_t> layers, kv_heads, head_dim, value_dim, window, global_every;
  std::vector<std::uint64_t> contexts{1024, 8192, 32768, 131072};
  std::uint64_t batch = 1, shared_prefix = 0;
  std::optional<double> memory, weights;
  turboquant::CacheConfig settings;
  unsigned center_bits = 8;
  std::filesystem::path json;
};

void declare(CLI::App& app, Arguments& arguments) {
  std::string names;
  for (const Model& model : presets()) names += fmt::format("{}{}", names.empty() ? "" : ", ", model.name);
  app.add_option("model", arguments.model, names + "; or none, with the options of the next group")->type_name("NAME");
  const char* shape = "Shape of the model";
  app.add_option("--layers", arguments.layers, "these options override the named model's")->group(shape);
  app.add_option("--kv-heads", arguments.kv_heads)->group(shape);
  app.add_option("--head-dim", arguments.head_dim, "coordinates of a key")->group(shape);
  app.add_option("--value-dim", arguments.value_dim, "of a value; otherwise as of a key")->group(shape);
  app.add_option("--window", arguments.window, "tokens that a layer sees; 0: all")->group(shape);
  app.add_option("--global-every", arguments.global_every, "the last of every so many layers sees all tokens; 0: none")
      ->group(shape);

  app.add_option("--context", arguments.contexts, "tokens per sequence, such as 8192,128000")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  app.add_option("--batch", arguments.batch, "sequences")->capture_default_str();
  app.add_option("--shared-prefix", arguments.shared_prefix, "tokens that all sequences share by fork")
      ->capture_default_str();
  app.add_option("--memory", arguments.memory, "GB (10^9 bytes) of the machine: say what fits beside the weights");
  app.add_option("--weights", arguments.weights, "GB of weights; otherwise those of the named model in 16 bits");
  app.add_option(
      "--plan", arguments.plan,
      "one more row: bits per layer, as in turboquant_eval --plan, such as {\"layers.0\": 8, \"default\": 3}");
  app.add_option("--json", arguments.json, "write the same numbers to this file");

  const char* cache = "Settings of the cache";
  app.add_option("--page-tokens", arguments.settings.page_tokens)->group(cache)->capture_default_str();
  app.add_option("--recent-tokens", arguments.settings.recent_tokens)->group(cache)->capture_default_str();
  app.add_option("--first-tokens", arguments.settings.first_tokens)->group(cache)->capture_default_str();
  app.add_option("--rollback-tokens", arguments.settings.rollback_tokens)->group(cache)->capture_default_str();
  app.add_option("--center-bits", arguments.center_bits, "0, 8 or 16")->group(cache)->capture_default_str();
}

Model model_of(const Arguments& arguments) {
  const bool has_shape = arguments.layers && arguments.kv_heads && arguments.head_dim;
  Model model = arguments.model.empty() && has_shape ? Model{} : preset(arguments.model);
  model.layers = arguments.layers.value_or(model.layers);
  model.kv_heads = arguments.kv_heads.value_or(model.kv_heads);
  model.head_dim = arguments.head_dim.value_or(model.head_dim);
  model.value_dim = arguments.value_dim.value_or(model.value_dim);
  model.window = arguments.window.value_or(model.window);
  model.global_every = arguments.global_every.value_or(arguments.window == 0U ? 0 : model.global_every);
  if (arguments.layers || arguments.kv_heads || arguments.head_dim || arguments.value_dim) {
    model.parameters = 0;  // another model
    model.name = "";
  }
  return model;
}

std::uint64_t bytes_of(double gigabytes, const char* field) {
  if (!(gigabytes >= 0 && gigabytes <= 1e9)) {
    throw PlanError(fmt::format("{} is {}; supported are 0 to 1000000000 GB", field, gigabytes));
  }
  return static_cast<std::uint64_t>(std::llround(gigabytes * 1e9));
}

std::optional<Room> room_of(const Arguments& arguments, const Model& model) {
  if (!arguments.memory) {
    if (arguments.weights) throw PlanError("weights is given without memory, which says what they are to fit into");
    return std::nullopt;
  }
  if (!arguments.weights && model.parameters == 0) {
    throw PlanError("weights is not known for this model; give its GB, or 0 if memory holds the cache alone");
  }
  Room room{bytes_of(*arguments.memory, "memory"), 2 * model.parameters};
  if (arguments.weights) room.weights = bytes_of(*arguments.weights, "weights");
  if (room.weights > room.memory) {
    throw PlanError(fmt::format("memory is {} GB; the weights alone take {} GB", static_cast<double>(room.memory) / 1e9,
                                static_cast<double>(room.weights) / 1e9));
  }
  return room;
}

Report report_of(const Arguments& arguments) {
  const auto check = [](const char* field, std::uint64_t value, std::uint64_t least, std::uint64_t most) {
    if (value >= least && value <= most) return;
    throw PlanError(fmt::format("{} is {}; supported are {} to {}", field, value, least, most));
  };
  check("batch", arguments.batch, 1, kMostSequences);
  for (const std::uint64_t tokens : arguments.contexts) {
    check("context", tokens, 1, kMostTokens);
    check("shared-prefix", arguments.shared_prefix, 0, tokens);
  }
  if (arguments.center_bits > 16) throw PlanError("center_bits: supported are 0, 8 and 16");
  Report report;
  report.model = model_of(arguments);
  report.contexts = arguments.contexts;
  report.sequences = arguments.batch;
  report.shared_tokens = arguments.shared_prefix;
  report.room = room_of(arguments, report.model);
  report.rows =
      candidates(report.model, arguments.settings, static_cast<std::uint8_t>(arguments.center_bits), arguments.plan);
  return report;
}

int run(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Memory of a model's key-value cache in turboquant's formats", "turboquant_plan");
  declare(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kBadInput;
  }
  const Report report = report_of(arguments);
  fmt::print("{}", table(report));
  if (!arguments.json.empty()) write(as_json(report), arguments.json);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const PlanError& error) {
    fmt::print(stderr, "turboquant_plan: {}\n", error.what());
    return kBadInput;
  } catch (const std::exception& error) {
    fmt::print(stderr, "turboquant_plan: {}\n", error.what());
    return kNotWritten;
  }
}
