// turboquant_eval: its baselines and metrics by hand, and the program itself on real keys and values.
#include <eval/accuracy.hpp>
#include <eval/baselines.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

using nlohmann::json;
using turboquant_eval::Accuracy;
using turboquant_eval::compare;
using turboquant_eval::ExactLayer;
using turboquant_eval::Subject;
using Path = std::filesystem::path;

TEST(Baselines, Q8FollowsItsDefinition) {
  std::vector<float> block(32, 0.0F);
  block[0] = -127;
  block[1] = 1.4F;
  block[2] = -2.5F;  // halves go away from zero
  turboquant_eval::round_q8_0(block);
  EXPECT_EQ(block[0], -127);
  EXPECT_EQ(block[1], 1);
  EXPECT_EQ(block[2], -3);
  EXPECT_EQ(block[3], 0);
}

TEST(Baselines, Q4FollowsItsDefinition) {
  std::vector<float> block(32, 0.0F);
  block[0] = -8;  // d = 1
  block[1] = 8;   // limited to 7
  block[2] = 2.4F;
  block[3] = 2.6F;
  std::vector<float> mirrored = block;
  for (float& x : mirrored) x = -x;  // d = -1
  turboquant_eval::round_q4_0(block);
  EXPECT_EQ(block[0], -8);
  EXPECT_EQ(block[1], 7);
  EXPECT_EQ(block[2], 2);
  EXPECT_EQ(block[3], 3);
  turboquant_eval::round_q4_0(mirrored);
  EXPECT_EQ(mirrored[0], 8);
  EXPECT_EQ(mirrored[1], -7);
}

TEST(Baselines, ScalesAreHalves) {
  std::vector<float> block(32, 0.1F);
  turboquant_eval::round_q8_0(block);
  EXPECT_EQ(block[0], 127 * turboquant::to_float(turboquant::to_half(0.1F / 127)));
  std::vector<float> zeros(32, 0.0F);
  turboquant_eval::round_q8_0(zeros);
  turboquant_eval::round_q4_0(zeros);
  EXPECT_EQ(zeros, std::vector<float>(32, 0.0F));
}

ExactLayer wave_layer() {
  ExactLayer layer;
  layer.tokens = 40;
  layer.kv_heads = 2;
  layer.heads = 4;
  layer.head_dim = 32;
  layer.value_dim = 48;
  const auto fill = [](std::vector<float>& numbers, std::size_t count, double pace) {
    for (std::size_t i = 0; i < count; ++i)
      numbers.push_back(static_cast<float>(std::sin(pace * double(i * i % 9973))));
  };
  fill(layer.keys, 2 * 40 * 32, 0.7);
  fill(layer.values, 2 * 40 * 48, 1.1);
  fill(layer.queries, 4 * 40 * 32, 1.9);
  return layer;
}

Subject copy_of(const ExactLayer& layer) {
  Subject subject;
  subject.keys = layer.keys;
  subject.values = layer.values;
  subject.is_coded.assign(layer.tokens, 1);
  return subject;
}

TEST(Accuracy, AnExactCopyHasNoError) {
  const ExactLayer layer = wave_layer();
  const Accuracy accuracy = compare(layer, std::vector{copy_of(layer)}).at(0);
  EXPECT_EQ(accuracy.coded_tokens, 40U);
  EXPECT_EQ(accuracy.key_error, 0);
  EXPECT_EQ(accuracy.value_error, 0);
  EXPECT_EQ(accuracy.output_error, 0);
  EXPECT_EQ(accuracy.kl, 0);
  EXPECT_EQ(accuracy.top1, 1);
}

TEST(Accuracy, AnOffsetOfAllKeysIsNoError) {
  const ExactLayer layer = wave_layer();
  Subject subject = copy_of(layer);
  for (std::size_t i = 0; i < subject.keys.size(); ++i) subject.keys[i] += 0.5F * static_cast<float>(i % 32);
  const Accuracy accuracy = compare(layer, std::vector{subject}).at(0);
  EXPECT_LT(accuracy.key_error, 1e-11);
  EXPECT_LT(std::abs(accuracy.kl), 1e-5);  // float keys, shifted by up to 15.5
  EXPECT_LT(accuracy.output_error, 1e-9);
}

TEST(Accuracy, ScaledErrorsAreKnown) {
  const ExactLayer layer = wave_layer();
  Subject subject = copy_of(layer);
  for (float& x : subject.keys) x *= 1.25F;
  for (float& x : subject.values) x *= 0.5F;
  const std::vector<Accuracy> accuracies = compare(layer, std::vector{subject});
  EXPECT_NEAR(accuracies[0].key_error, 0.0625, 1e-6);
  EXPECT_NEAR(accuracies[0].value_error, 0.25, 1e-6);
  EXPECT_EQ(accuracies[0].top1, 1);
  EXPECT_GT(accuracies[0].kl, 0);
}

TEST(Accuracy, RawTokensDoNotCount) {
  const ExactLayer layer = wave_layer();
  Subject subject = copy_of(layer);
  for (std::size_t i = 0; i < 32 * 20; ++i) subject.keys[i] = 1e6F;  // head 0, tokens 0 to 19
  for (std::size_t token = 0; token < 20; ++token) subject.is_coded[token] = 0;
  const Accuracy accuracy = compare(layer, std::vector{subject}).at(0);
  EXPECT_EQ(accuracy.coded_tokens, 20U);
  EXPECT_EQ(accuracy.key_error, 0);
  subject.is_coded.assign(layer.tokens, 0);
  EXPECT_TRUE(std::isnan(compare(layer, std::vector{subject}).at(0).key_error));
}

TEST(Accuracy, WithoutQueriesTheirFiguresAreUnknown) {
  ExactLayer layer = wave_layer();
  layer.heads = 0;
  layer.queries.clear();
  const Accuracy accuracy = compare(layer, std::vector{copy_of(layer)}).at(0);
  EXPECT_EQ(accuracy.key_error, 0);
  EXPECT_TRUE(std::isnan(accuracy.output_error));
  EXPECT_TRUE(std::isnan(accuracy.kl));
  turboquant_eval::draw_queries(layer, 1);
  EXPECT_EQ(compare(layer, std::vector{copy_of(layer)}).at(0).kl, 0);
}

#ifdef TURBOQUANT_EVAL_PROGRAM

class EvalProgram : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = Path(testing::TempDir()) / (std::string("turboquant_eval_") + test->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Runs the program; returns its exit code and keeps what it printed, errors included.
  int run(const std::string& arguments) {
    const Path printed = folder_ / "printed.txt";
    const std::string command = "\"" TURBOQUANT_EVAL_PROGRAM "\" " + arguments + " > \"" + printed.string() + "\" 2>&1";
    const int status = std::system(command.c_str());
    std::ifstream stream(printed);
    printed_.assign(std::istreambuf_iterator<char>(stream), {});
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  json run_json(const std::string& arguments) {
    const Path file = folder_ / "report.json";
    std::filesystem::remove(file);
    EXPECT_EQ(run(arguments + " --json \"" + file.string() + "\""), 0) << printed_;
    std::ifstream stream(file);
    return json::parse(stream, nullptr, false);
  }

  static json format(const json& report, const std::string& name) {
    if (report.is_object()) {
      for (const json& entry : report.at("formats")) {
        if (entry.at("format") == name) return entry;
      }
    }
    ADD_FAILURE() << "no format " << name;
    return {};
  }

  static double figure(const json& report, const std::string& name, const char* key) {
    const json entry = format(report, name);
    return entry.contains(key) && entry[key].is_number() ? entry[key].get<double>() : std::nan("");
  }

  static Path qwen() { return Path(TURBOQUANT_DATA_DIR) / "kv" / "qwen3.5-0.8b.safetensors"; }

  Path folder_;
  std::string printed_;
};

void expect_sizes_agree(const json& report) {
  double coordinates = 0;
  for (const json& layer : report.at("layers")) {
    coordinates +=
        layer.at("kv_heads").get<double>() * (layer.at("head_dim").get<double>() + layer.at("value_dim").get<double>());
  }
  ASSERT_EQ(report.at("formats").size(), 12U);
  for (const json& format : report.at("formats")) {
    const double bytes = format.at("bytes_per_token").get<double>();
    EXPECT_NEAR(format.at("bits_per_coordinate").get<double>(), 8 * bytes / coordinates, 1e-9) << format.at("format");
    EXPECT_NEAR(format.at("compression").get<double>(), 2 * coordinates / bytes, 1e-9) << format.at("format");
  }
}

TEST_F(EvalProgram, MeasuresTheSample) {
  const json report = run_json("");
  ASSERT_TRUE(report.is_object());
  expect_sizes_agree(report);
  EXPECT_NE(printed_.find("coded: 1024 of 1024 tokens"), std::string::npos) << printed_;
  EXPECT_NE(printed_.find("flatters"), std::string::npos);
  for (const json& format : report.at("formats")) {
    EXPECT_EQ(format.at("coded_tokens"), 1024) << format.at("format");
    for (const char* key : {"key_error", "value_error", "output_error", "kl", "top1"}) {
      EXPECT_TRUE(format.at(key).is_number()) << format.at("format") << " " << key;
    }
    EXPECT_NE(printed_.find(format.at("format").get<std::string>()), std::string::npos);
  }
  for (const char* key : {"key_error", "value_error", "output_error", "kl"}) {
    EXPECT_LT(figure(report, "f16", key), figure(report, "TQ8", key)) << key;
    EXPECT_LT(figure(report, "TQ8", key), figure(report, "TQ4", key)) << key;
    EXPECT_LT(figure(report, "TQ4", key), figure(report, "TQ3", key)) << key;
    EXPECT_LT(figure(report, "TQ3", key), figure(report, "TQ2", key)) << key;
    EXPECT_LT(figure(report, "TQ4", key), figure(report, "q4_0", key)) << key;
  }
  EXPECT_EQ(figure(report, "keys 4, values 3", "key_error"), figure(report, "TQ4", "key_error"));
  EXPECT_GT(figure(report, "keys 4, values 3", "value_error"), figure(report, "TQ4", "value_error"));
  EXPECT_LT(figure(report, "TQ4", "kl"), 0.004);
  EXPECT_GT(figure(report, "TQ4", "top1"), 0.97);
}

TEST_F(EvalProgram, MeasuresQwen) {
  if (std::string(TURBOQUANT_DATA_DIR).empty()) GTEST_SKIP() << "TURBOQUANT_DATA_DIR is not set";
  const json report = run_json("\"" + qwen().string() + "\"");
  ASSERT_TRUE(report.is_object());
  expect_sizes_agree(report);
  EXPECT_NE(printed_.find("99 tokens in 1 full page and a sealed page of 35"), std::string::npos) << printed_;
  EXPECT_NE(printed_.find("coded: 396 of 396 tokens"), std::string::npos) << printed_;
  const double four = figure(report, "TQ4", "key_error"), three = figure(report, "TQ3", "key_error");
  EXPECT_LE(four, 0.0090);
  EXPECT_LE(three, 0.034);
  EXPECT_GE(figure(report, "TQ4, not centred", "key_error"), 2 * four);
  EXPECT_GE(figure(report, "TQ3, not centred", "key_error"), 2 * three);
  EXPECT_TRUE(format(report, "TQ4").at("kl").is_null());  // the file has no queries
  EXPECT_LT(figure(run_json("--synthetic-queries --layers 3 \"" + qwen().string() + "\""), "TQ4", "output_error"), 0.1);
}

TEST_F(EvalProgram, HonoursItsOptions) {
  const json report = run_json("--layers 3 --page-tokens 256 --seed 7 --per-layer");
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report.at("layers").size(), 1U);
  EXPECT_EQ(report.at("page_tokens"), 256);
  EXPECT_EQ(report.at("seed"), 7);
  EXPECT_NE(printed_.find("layer   3"), std::string::npos) << printed_;
  EXPECT_EQ(run("--layers 0 --quiet"), 0);
  EXPECT_EQ(printed_, "");
}

TEST_F(EvalProgram, RefusesBadInputWithCodeTwo) {
  const Path file = folder_ / "foreign.safetensors";
  std::ofstream(file) << "GGUF and more bytes than eight";
  EXPECT_EQ(run("\"" + file.string() + "\""), 2);
  EXPECT_NE(printed_.find("foreign.safetensors: header length: expected"), std::string::npos) << printed_;
  EXPECT_EQ(run("\"" + (folder_ / "missing").string() + "\""), 2);
  EXPECT_EQ(run("--no-such-option"), 2);
  EXPECT_EQ(run("--page-tokens 17"), 2);
  EXPECT_NE(printed_.find("page_tokens"), std::string::npos) << printed_;
  EXPECT_EQ(run("--layers 1"), 2);
  EXPECT_EQ(run("--help"), 0);
}

TEST_F(EvalProgram, FailsIfNothingWasCoded) {
  // Zeros read back exactly, so no token can be told from a raw one.
  const std::string header =
      "{\"layers.0.k\":{\"dtype\":\"F32\",\"shape\":[1,2,32],\"data_offsets\":[0,256]},"
      "\"layers.0.v\":{\"dtype\":\"F32\",\"shape\":[1,2,32],\"data_offsets\":[256,512]}}";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  const Path file = folder_ / "zeros.safetensors";
  std::ofstream(file, std::ios::binary) << bytes << header << std::string(512, '\0');
  EXPECT_EQ(run("\"" + file.string() + "\""), 1);
  EXPECT_NE(printed_.find("no token of layer 0 was coded"), std::string::npos) << printed_;
  EXPECT_EQ(run("--layers 0 --json \"" + (folder_ / "no" / "such.json").string() + "\""), 1);
}

#endif

}  // namespace
