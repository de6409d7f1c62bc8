// turboquant_plan: presets, what fits against real caches, and the program itself.
#include <plan/candidate.hpp>
#include <plan/model.hpp>

#include <eval/more_formats.hpp>
#include <turboquant/turboquant.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "cache/block.hpp"
#include "cache/sanitized.hpp"

namespace {

using nlohmann::json;
using turboquant::CacheConfig;
using turboquant::LayerShape;
using turboquant::Status;
using turboquant_plan::Candidate;
using turboquant_plan::Load;
using Path = std::filesystem::path;

TEST(Model, PresetsAreOfSupportedShapes) {
  for (const turboquant_plan::Model& model : turboquant_plan::presets()) {
    EXPECT_EQ(turboquant_plan::layers_of(model, "4", 8).size(), model.layers) << model.name;
    EXPECT_EQ(turboquant_plan::preset(model.name).kv_heads, model.kv_heads);
  }
  EXPECT_THROW(turboquant_plan::preset("llama"), turboquant_plan::PlanError);
}

TEST(Model, EverySixthLayerOfGemmaIsGlobal) {
  const auto layers = turboquant_plan::layers_of(turboquant_plan::preset("gemma-3-12b"), "conservative", 8);
  ASSERT_EQ(layers.size(), 48U);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(layers[i].window, i % 6 == 5 ? 0U : 1024U) << i;
    EXPECT_EQ(layers[i].format, i < 5 || i >= 43 ? 0U : 1U) << i;
  }
}

// A source that gives so many bytes and no more.
struct LimitedSource {
  std::size_t left;

  turboquant::MemorySource source() {
    return {this,
            [](void* context, std::size_t bytes, std::size_t alignment) -> void* {
              auto& self = *static_cast<LimitedSource*>(context);
              if (bytes > self.left) return nullptr;
              self.left -= bytes;
              return ::operator new(bytes, std::align_val_t(alignment));
            },
            [](void* context, void* memory, std::size_t bytes) {
              static_cast<LimitedSource*>(context)->left += bytes;
              // The alignment is that of the request, which the library documents as a cache line.
              ::operator delete(memory, std::align_val_t(64));
            }};
  }
};

// Tokens that come singly until memory ends, the same number for all sequences.
std::size_t tokens_until_full(CacheConfig config, std::size_t budget, std::size_t sequences, std::size_t most) {
  LimitedSource source{budget};
  config.memory = source.source();
  turboquant::KVCache<turboquant::TQ8, turboquant::TQ4, turboquant::TQ3, turboquant::TQ2> cache(config);
  std::vector<turboquant::BatchItem> step(sequences);
  const LayerShape& shape = config.layers[0];
  const tests::Block row(1, shape.kv_heads, shape.head_dim, 1);
  for (turboquant::BatchItem& item : step) {
    EXPECT_EQ(cache.create_sequence(item.sequence), Status::ok);
    item.keys = item.values = row.rows();
  }
  for (std::size_t tokens = 0; tokens < most; ++tokens) {
    if (turboquant::attend(cache, 0, step) != Status::ok) return tokens;
  }
  return most;
}

TEST(Fit, IsWhereARealCacheRunsOutOfMemory) {
  Candidate row{"", {}, false};
  row.config.layers = {LayerShape{.kv_heads = 16, .head_dim = 512}};
  struct Case {
    std::uint32_t window;
    std::size_t recent, rollback;
  };
  // In the second to last a step takes a page before it frees one, in the last a tile.
  int exact = 0;
  for (const Case& c : {Case{0, 0, 32}, {0, 64, 32}, {100, 64, 32}, {96, 0, 32}, {96, 0, 33}}) {
    row.config.layers[0].window = c.window;
    row.config.recent_tokens = c.recent;
    row.config.rollback_tokens = c.rollback;
    // Blocks are large beside a slab, so that slabs are few and steps are coarse.
    for (const std::size_t megabytes : {1U, 3U, 5U, 8U, 11U, 12U, 14U, 17U}) {
      for (const std::size_t sequences : {1U, 2U}) {
        const std::size_t budget = megabytes << 20;
        constexpr std::size_t kMost = tests::kSanitized ? 120 : 450;
        const std::size_t planned = turboquant_plan::longest_context(row, {0, sequences, 0}, budget);
        const std::size_t reached = tokens_until_full(row.config, budget, sequences, kMost);
        const auto where = fmt::format("window {}, recent {}, rollback {}, {} MiB, {} sequences", c.window, c.recent,
                                       c.rollback, megabytes, sequences);
        // A cache in need gives back slabs of tiles that happen to be empty; the plan does not count on that.
        EXPECT_GE(reached, (std::min)(planned, kMost)) << where;
        EXPECT_TRUE(c.window != 0 || reached <= planned + row.config.page_tokens) << where << ": " << reached;
        exact += reached == (std::min)(planned, kMost) ? 1 : 0;
      }
    }
  }
  EXPECT_GE(exact, 50) << "of 80";
}

TEST(Fit, NothingBelowTheLongestNeedsMore) {
  Candidate row{"", {}, false};
  row.config.layers = {LayerShape{.kv_heads = 8, .head_dim = 256, .window = 90},
                       LayerShape{.kv_heads = 8, .head_dim = 256, .format = 1}};
  for (const std::uint64_t shared : {0U, 77U}) {
    std::uint64_t last = 0;
    for (std::uint64_t tokens = (std::max)(shared, std::uint64_t{1}); tokens < 2000; ++tokens) {
      const std::uint64_t needed = row.needed({tokens, 3, shared});
      EXPECT_GE(needed, last) << tokens;
      EXPECT_GE(needed, row.bytes({tokens, 3, shared})) << tokens;
      last = needed;
    }
    const std::uint64_t longest = turboquant_plan::longest_context(row, {0, 3, shared}, last / 2);
    ASSERT_GT(longest, shared);
    EXPECT_LE(row.needed({longest, 3, shared}), last / 2);
    EXPECT_GT(row.needed({longest + 1, 3, shared}), last / 2);
    const std::uint64_t most = turboquant_plan::most_sequences(row, {500, 0, shared}, 1'000'000'000);
    EXPECT_LE(row.needed({500, most, shared}), 1'000'000'000U);
    EXPECT_GT(row.needed({500, most + 1, shared}), 1'000'000'000U);
  }
  EXPECT_EQ(turboquant_plan::longest_context(row, {0, 1, 0}, 0), 0U);
  EXPECT_EQ(turboquant_plan::most_sequences(row, {1, 0, 0}, 0), 0U);
  row.config.layers.pop_back();
  EXPECT_EQ(turboquant_plan::longest_context(row, {0, 1, 0}, 1U << 30), turboquant_plan::kMostTokens);
}

#ifdef TURBOQUANT_PLAN_PROGRAM

class PlanProgram : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = Path(testing::TempDir()) / (std::string("turboquant_plan_") + test->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static std::string text_of(const Path& file) {
    std::ifstream stream(file);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  // Runs the program; returns its exit code and keeps what it printed, errors included.
  int run(const std::string& arguments) {
    const Path printed = folder_ / "printed.txt";
    const std::string command = "\"" TURBOQUANT_PLAN_PROGRAM "\" " + arguments + " > \"" + printed.string() + "\" 2>&1";
    const int status = std::system(command.c_str());
    printed_ = text_of(printed);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  json run_json(const std::string& arguments) {
    const Path file = folder_ / "plan.json";
    std::filesystem::remove(file);
    EXPECT_EQ(run(arguments + " --json \"" + file.string() + "\""), 0) << printed_;
    return json::parse(text_of(file), nullptr, false);
  }

  Path folder_;
  std::string printed_;
};

TEST_F(PlanProgram, PrintsWhatReadmeShows) {
  const std::string readme = text_of(TURBOQUANT_SOURCE_DIR "/README.md");
  const std::string program = "turboquant_plan ";
  const std::size_t begin = readme.find("```text\n$ build/test/examples/" + program);
  ASSERT_NE(begin, std::string::npos);
  const std::size_t arguments = readme.find(program, begin) + program.size(), output = readme.find('\n', arguments) + 1;
  ASSERT_EQ(run(readme.substr(arguments, output - 1 - arguments)), 0) << printed_;
  const std::string shown = readme.substr(output, readme.find("```", output) - output);
  EXPECT_TRUE(printed_.starts_with(shown)) << "README.md shows\n" << shown << "the program prints\n" << printed_;
  EXPECT_NE(shown.find("conservative"), std::string::npos);
}

TEST_F(PlanProgram, JsonHoldsTheSameSizes) {
  const json plan = run_json("window-8x2560 --context 4096,128000 --batch 3 --memory 16 --weights 6.5 --plan 3");
  ASSERT_TRUE(plan.is_object());
  EXPECT_EQ(plan.at("weights"), 6'500'000'000U);
  std::vector<std::string> names;
  for (const json& row : plan.at("formats")) {
    names.push_back(row.at("format").get<std::string>());
    ASSERT_EQ(row.at("contexts").size(), 2U);
    for (const json& at : row.at("contexts")) {
      const double bytes = at.at("bytes").get<double>();
      EXPECT_NEAR(at.at("compression").get<double>(), 3 * 335'544'320 / bytes, 1e-9);
      EXPECT_NEAR(at.at("bits_per_coordinate").get<double>(), bytes * 16 / (3 * 335'544'320.0), 1e-9);
      // Slabs leave up to a tenth unused.
      EXPECT_GT(at.at("most_sequences").get<double>() * bytes / 3, 8.5e9) << names.back();
      EXPECT_LE(at.at("most_sequences").get<double>() * bytes / 3, 9.5e9) << names.back();
    }
    EXPECT_EQ(row.at("longest_context"), turboquant_plan::kMostTokens);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"f16", "TQ8", "TQ4", "TQ3", "TQ2", "conservative", "plan"}));
  EXPECT_EQ(plan.at("formats")[6].at("contexts"), plan.at("formats")[3].at("contexts"));
  EXPECT_NE(printed_.find("16.00 GB less 6.500 GB of weights leave 9.500 GB"), std::string::npos) << printed_;
  EXPECT_NE(printed_.find("no limit"), std::string::npos);
}

TEST_F(PlanProgram, FreeParametersOverrideAPreset) {
  const json plan = run_json(
      "gemma-3-12b --layers 4 --kv-heads 3 --head-dim 96 --value-dim 64 --window 128 --global-every 2 --context 1000 "
      "--page-tokens 32 --recent-tokens 16 --first-tokens 4 --rollback-tokens 0 --center-bits 16");
  ASSERT_TRUE(plan.is_object());
  EXPECT_EQ(plan.at("formats")[0].at("contexts")[0].at("bytes"), 2 * 3 * 160 * (2 * 128 + 2 * 1000));
  CacheConfig config;
  config.page_tokens = 32;
  config.recent_tokens = 16;
  config.first_tokens = 4;
  config.rollback_tokens = 0;
  for (const std::uint32_t window : {128U, 0U, 128U, 0U}) {
    config.layers.push_back({.kv_heads = 3, .head_dim = 96, .value_dim = 64, .window = window, .center_bits = 16});
  }
  config.layers.erase(config.layers.begin());
  const json& tq8 = plan.at("formats")[1].at("contexts")[0];
  EXPECT_EQ(tq8.at("page_bytes"), turboquant_plan::footprint(config, {1000}).page_bytes);
  EXPECT_EQ(tq8.at("tail_bytes"), turboquant_plan::footprint(config, {1000}).tail_bytes);
}

TEST_F(PlanProgram, ErrorsNameTheFieldAndWhatIsSupported) {
  const std::vector<std::vector<std::string>> cases{
      {"", "model is not given", "llama-3.1-70b"},
      {"llama-9", "model is \"llama-9\"", "--kv-heads"},
      {"--layers 3 --kv-heads 2 --head-dim 100", "head_dim", "96 and 112"},
      {"--layers 0 --kv-heads 2 --head-dim 64", "layers of the model", "expected 1"},
      {"qwen3-8b --kv-heads 0", "kv_heads is 0", "1 to 65536"},
      {"qwen3-8b --page-tokens 17", "page_tokens is 17", "multiples of 16"},
      {"qwen3-8b --center-bits 9", "center_bits is 9", "0, 8 and 16"},
      {"qwen3-8b --center-bits 264", "center_bits", "0, 8 and 16"},
      {"qwen3-8b --context 0", "context is 0", "1 to 1073741824"},
      {"qwen3-8b --batch 0", "batch is 0", "1 to 1048576"},
      {"qwen3-8b --context 5 --shared-prefix 6", "shared-prefix is 6", "0 to 5"},
      {"qwen3-8b --global-every 3", "global_every is 3", "with a window only"},
      {"qwen3-8b --memory 10", "memory is 10 GB", "16.38"},
      {"qwen3-8b --memory -1", "memory is -1", "0 to 1000000000 GB"},
      {"qwen3-8b --weights 5", "weights", "memory"},
      {"qwen3-8b --layers 9 --memory 10", "weights is not known", "GB"},
      {"qwen3-8b --plan 5", "plan", "expected 8, 4, 3 or 2 bits"},
      {"--layers 1024 --kv-heads 65536 --head-dim 1024 --batch 1048576", "context is 1024", "2^64"},
      {"qwen3-8b --context many", "--context", "many"},
      {"qwen3-8b --unknown", "--unknown", ""}};
  for (const auto& c : cases) {
    EXPECT_EQ(run(c[0]), 2) << c[0] << ": " << printed_;
    EXPECT_NE(printed_.find(c[1]), std::string::npos) << c[0] << ": " << printed_;
    EXPECT_NE(printed_.find(c[2]), std::string::npos) << c[0] << ": " << printed_;
  }
  EXPECT_EQ(run("qwen3-8b --json /nowhere/plan.json"), 1);
  EXPECT_NE(printed_.find("/nowhere/plan.json: cannot be written"), std::string::npos) << printed_;
}

#endif

}  // namespace
