// Serves many requests behind one shared prompt from compressed caches and from an f16 cache: memory, speed, and the
// same tokens however the work is cut.
#include "demo/text.hpp"
#include "engine/cache_decorator.hpp"
#include "engine/caches.hpp"
#include "engine/serving.hpp"
#include "eval/progress_bar.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using engine::ServingOptions;
using engine::ServingReport;

struct Arguments {
  std::filesystem::path model = TURBOQUANT_SOURCE_DIR "/examples/data/byte-llama";
  std::size_t shared_tokens = 1920, prompt_tokens = 24, new_tokens = 96, requests = 24, drafts = 4;
  ServingOptions options;
  bool prints_text = false;
};

void declare(CLI::App& app, Arguments& arguments) {
  app.add_option("model", arguments.model, "folder of a model with a vocabulary of bytes, and its heldout.txt");
  app.add_option("--shared", arguments.shared_tokens, "tokens of the prompt that all share")->capture_default_str();
  app.add_option("--prompt", arguments.prompt_tokens, "tokens of each request's own prompt")->capture_default_str();
  app.add_option("--new", arguments.new_tokens, "tokens to generate for each")->capture_default_str();
  app.add_option("--requests", arguments.requests, "how many")->capture_default_str();
  app.add_option("--batch", arguments.options.batch, "sequences at a time")->capture_default_str();
  app.add_option("--chunk", arguments.options.chunk_tokens, "prompt tokens per step")->capture_default_str();
  app.add_option("--drafts", arguments.drafts, "tokens proposed per step, with speculation")->capture_default_str();
  app.add_option("--temperature", arguments.options.sampling.temperature, "0: the most likely token");
  app.add_option("--seed", arguments.options.sampling.seed, "of the sampler")->capture_default_str();
  app.add_flag("--text", arguments.prints_text, "print what the first request was answered");
}

struct Run {
  ServingReport report;
  double attention_seconds = 0;
};

class Comparison {
 public:
  Comparison(const Arguments& arguments, const engine::Model& model)
      : arguments_(arguments), model_(model), text_(demo::read_text(arguments.model / "heldout.txt")) {
    const std::size_t needed = arguments.shared_tokens + arguments.requests * arguments.prompt_tokens;
    if (needed > text_.size() || model.config().vocabulary != 256) {
      throw std::invalid_argument("the model has no vocabulary of bytes, or its text is too short");
    }
    shared_ = demo::bytes_as_tokens(std::string_view(text_).substr(0, arguments.shared_tokens));
    const std::size_t stride =
        (text_.size() - arguments.shared_tokens) / (std::max)(arguments.requests, std::size_t{1});
    for (std::size_t i = 0; i < arguments.requests; ++i) {
      const auto prompt = std::string_view(text_).substr(arguments.shared_tokens + i * stride, arguments.prompt_tokens);
      requests_.push_back({demo::bytes_as_tokens(prompt), arguments.new_tokens});
    }
  }

  // Returns the exit status: 0 if all runs over one format gave the same tokens.
  int run() {
    fmt::print("{} requests of {} + {} tokens behind a shared prompt of {}, {} at a time\n\n", arguments_.requests,
               arguments_.prompt_tokens, arguments_.new_tokens, arguments_.shared_tokens, arguments_.options.batch);
    fmt::print("{:<28}{:>12}{:>12}{:>14}{:>14}{:>10}\n", "cache", "largest", "tokens/s", "attention", "prompt",
               "accepted");
    fmt::print("{:<28}{:>12}{:>12}{:>14}{:>14}{:>10}\n", "", "MB", "decoding", "us/token", "tokens/s", "drafts");
    ServingOptions plain = arguments_.options, speculative = plain, whole = plain;
    plain.draft_tokens = whole.draft_tokens = 0;
    speculative.draft_tokens = arguments_.drafts;
    whole.chunk_tokens = arguments_.shared_tokens + arguments_.requests * arguments_.prompt_tokens;
    print("f16", serve("f16", plain));
    fmt::print("{:<28}{:>12.2f}\n", "f16, if prompts were shared", shared_f16_bytes() / 1e6);
    const Run tq3 = serve("TQ3", plain), tq4 = serve("TQ4", plain);
    print("TQ3", tq3);
    print("TQ4", tq4);
    const Run drafted = serve("TQ4", speculative), unchunked = serve("TQ4", whole);
    print("TQ4, speculation", drafted);
    print("TQ4, prompts in one step", unchunked);
    const bool is_same = drafted.report.texts == tq4.report.texts && unchunked.report.texts == tq4.report.texts;
    fmt::print("\nThe tokens with and without speculation, in chunks and in one step, are {}.\n",
               is_same ? "identical" : "NOT identical");
    if (arguments_.prints_text && !requests_.empty()) print_text(tq4.report.texts.front());
    return is_same ? 0 : 1;
  }

 private:
  Run serve(const std::string& format, const ServingOptions& options) const {
    engine::CacheChoice choice;
    choice.format = format;
    engine::TimedCache cache(engine::make_cache(choice, model_.attention_shape()), options.draft_tokens + 1);
    turboquant_eval::ProgressBar bar(requests_.size(), true);
    Run run;
    run.report = engine::serve(model_, cache, shared_, requests_, options, [&] { bar.advance(); });
    run.attention_seconds = std::reduce(cache.seconds().begin(), cache.seconds().end());
    return run;
  }

  // What the f16 cache would take at its largest, with one copy of the shared prompt.
  double shared_f16_bytes() const {
    const engine::AttentionShape shape = model_.attention_shape();
    const std::size_t sequences = (std::min)(arguments_.options.batch, arguments_.requests);
    const std::size_t tokens =
        arguments_.shared_tokens + sequences * (arguments_.prompt_tokens + arguments_.new_tokens);
    return static_cast<double>(tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * 2);
  }

  void print(const std::string& name, const Run& run) const {
    const ServingReport& report = run.report;
    const std::size_t prompt_tokens = arguments_.shared_tokens + arguments_.requests * arguments_.prompt_tokens;
    fmt::print("{:<28}{:>12.2f}{:>12.0f}{:>14.0f}{:>14.0f}{:>10}\n", name,
               static_cast<double>(report.largest_bytes) / 1e6,
               static_cast<double>(report.decode_tokens) / report.decode_seconds,
               1e6 * run.attention_seconds / static_cast<double>(report.decode_tokens),
               static_cast<double>(prompt_tokens) / report.prompt_seconds,
               report.drafted == 0 ? "-"
                                   : fmt::format("{:.0f} %", 100.0 * static_cast<double>(report.accepted) /
                                                                 static_cast<double>(report.drafted)));
  }

  void print_text(const std::vector<engine::Token>& tokens) const {
    std::string answer;
    for (const engine::Token token : tokens) answer += static_cast<char>(token);
    fmt::print("\n...{}|{}\n", std::string_view(text_).substr(arguments_.shared_tokens, arguments_.prompt_tokens),
               answer);
  }

  const Arguments& arguments_;
  const engine::Model& model_;
  std::string text_;
  std::vector<engine::Token> shared_;
  std::vector<engine::Request> requests_;
};

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Serving from compressed caches", "turboquant_serve");
  declare(app, arguments);
  try {
    app.parse(argc, argv);
    const engine::Model model(arguments.model);
    return Comparison(arguments, model).run();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "turboquant_serve: {}\n", error.what());
    return 1;
  }
}
