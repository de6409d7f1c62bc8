// A language model on compressed caches: what each costs in bits, in bytes, in predictions and in recall.
#include "demo/report.hpp"
#include "demo/study.hpp"
#include "demo/text.hpp"
#include "eval/progress_bar.hpp"
#include "eval/tensor.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

namespace {

constexpr int kMeasurementFailed = 1, kBadInput = 2;
constexpr std::size_t kByteVocabulary = 256;

struct Arguments {
  std::filesystem::path model, text, tokens, json, plot;
  demo::Extent extent;
  std::vector<std::string> formats;
  std::size_t recent_tokens = 0, first_tokens = 0;
  bool ablates = false, is_thorough = false, is_quiet = false;
};

void declare(CLI::App& app, Arguments& arguments) {
  app.add_option(
      "model", arguments.model,
      "folder of a Hugging Face checkpoint of the Llama, Qwen2 or Qwen3 family. Without: the byte-level model "
      "in the repository");
  app.add_option("--text", arguments.text,
                 "held-out text, for a vocabulary of bytes. Default: heldout.txt of the model");
  app.add_option("--tokens", arguments.tokens, "held-out text as token ids, for any other vocabulary");
  app.add_option("--format", arguments.formats, "only these rows, beside f32")->delimiter(';')->allow_extra_args(false);
  app.add_option("--recent", arguments.recent_tokens, "with --format: so many of the newest tokens stay raw");
  app.add_option("--first", arguments.first_tokens, "with --format: so many of the first tokens stay raw");
  app.add_option("--window-tokens", arguments.extent.window_tokens, "tokens of a window")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--windows", arguments.extent.windows, "windows from the start of the text")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--stress-windows", arguments.extent.stress_windows,
                 "windows with keys of other kinds, at most as many")
      ->capture_default_str();
  app.add_option("--passages", arguments.extent.passages, "texts with pass keys, of each length")
      ->capture_default_str();
  app.add_option("--context", arguments.extent.timed_context, "tokens at which attention is timed; 0: not at all")
      ->capture_default_str();
  app.add_flag("--thorough", arguments.is_thorough, "more of everything: 16 windows, 322 pass keys. Takes a while");
  app.add_flag("--ablate", arguments.ablates, "instead: keys alone and values alone, the other side in 8 bits");
  app.add_option("--json", arguments.json, "write the same numbers to this file");
  app.add_option("--svg", arguments.plot, "draw divergence against true bits into this file");
  app.add_flag("--quiet", arguments.is_quiet, "print nothing but errors");
  app.footer(
      "Every token is coded, a query's own included, except in rows with +recent (the newest 64 to 127 tokens\n"
      "are raw, the library's default) and +first (the first 16 too). KL is the mean divergence of the next\n"
      "token's distribution from that with an f32 cache, in nats. Three columns say how many times it is that\n"
      "for models with other keys but the same exact attention: 20 deviations added to all keys; four channels of\n"
      "every head 16 times as large; a token in front with a key 20 times as long. Attention is one decode step,\n"
      "on one core.");
}

std::vector<demo::Row> chosen_rows(const Arguments& arguments) {
  if (arguments.ablates) return demo::ablation_rows();
  std::vector<demo::Row> rows = demo::standard_rows();
  if (arguments.formats.empty()) return rows;
  rows.resize(1);
  for (const std::string& format : arguments.formats) {
    demo::Row row;
    row.name = format;
    row.choice = {format, arguments.recent_tokens, arguments.first_tokens, arguments.recent_tokens == 0};
    rows.push_back(row);
  }
  return rows;
}

int run(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("A language model on compressed caches", "turboquant_demo");
  declare(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kBadInput;
  }
  const bool is_sample = arguments.model.empty();
  if (is_sample) arguments.model = TURBOQUANT_SOURCE_DIR "/examples/data/byte-llama";
  if (arguments.is_thorough) {
    arguments.extent.windows = arguments.extent.stress_windows = 16;
    arguments.extent.passages = 23;
  }
  const engine::Model model(arguments.model);
  std::string text;
  std::vector<engine::Token> tokens;
  if (!arguments.tokens.empty()) {
    tokens = demo::read_token_ids(arguments.tokens, model.config().vocabulary);
  } else if (model.config().vocabulary == kByteVocabulary) {
    text = demo::read_text(arguments.text.empty() ? arguments.model / "heldout.txt" : arguments.text);
    tokens = demo::bytes_as_tokens(text);
    arguments.extent.passage_lengths = {256, 512, 1024};
    if (arguments.is_thorough) arguments.extent.passage_lengths.push_back(2048);
  } else {
    fmt::print(stderr, "turboquant_demo: --tokens: the model's vocabulary has {} tokens, not the 256 bytes\n",
               model.config().vocabulary);
    return kBadInput;
  }
  demo::Extent& extent = arguments.extent;
  extent.stress_windows = (std::min)(extent.stress_windows, extent.windows);
  extent.timed_context = (std::min)(extent.timed_context, model.config().context);

  std::vector<demo::Row> rows = chosen_rows(arguments);
  {
    turboquant_eval::ProgressBar bar(demo::study_steps(extent, rows.size()), !arguments.is_quiet);
    demo::measure(model, tokens, text, extent, rows, [&] { bar.advance(); });
  }
  if (!arguments.is_quiet) {
    fmt::print("{} layers of {} KV heads of {}; {} window{} of {} tokens, attention at {}\n\n{}", model.config().layers,
               model.config().kv_heads, model.config().head_dim, extent.windows, extent.windows == 1 ? "" : "s",
               extent.window_tokens, extent.timed_context, demo::table(extent, rows));
    if (is_sample) {
      fmt::print(
          "The model is small and its keys are tame (10-20 % of their energy is common to all tokens, no outlier\n"
          "channels): it flatters every format. The stress columns show what other keys do.\n");
    }
  }
  if (!arguments.json.empty()) demo::write_json(extent, rows, arguments.json);
  if (!arguments.plot.empty()) demo::write_plot(rows, arguments.plot);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const turboquant_eval::FileError& error) {
    fmt::print(stderr, "turboquant_demo: {}\n", error.what());
    return kBadInput;
  } catch (const std::invalid_argument& error) {
    fmt::print(stderr, "turboquant_demo: {}\n", error.what());
    return kBadInput;
  } catch (const std::exception& error) {
    fmt::print(stderr, "turboquant_demo: {}\n", error.what());
    return kMeasurementFailed;
  }
}
