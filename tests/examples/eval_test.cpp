// turboquant_eval: its baselines and metrics by hand, and the program itself on real keys and values.
#include <eval/accuracy.hpp>
#include <eval/baselines.hpp>

#include <turboquant/codec/qjl.hpp>
#include <turboquant/kernels/portable.hpp>
#include <turboquant/transform/rotation.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "cache/sanitized.hpp"

namespace {

using nlohmann::json;
using tests::kSanitized;
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

TEST(Baselines, MinMaxFollowsItsDefinition) {
  std::vector<float> group{0, 0.4F, 0.6F, 3};  // d = 1
  turboquant_eval::round_min_max(group, 2);
  EXPECT_EQ(group, (std::vector<float>{0, 0, 1, 3}));
  group = {-2, 5, 13, 12.4F};  // d = 1, 4 bits
  turboquant_eval::round_min_max(group, 4);
  EXPECT_EQ(group, (std::vector<float>{-2, 5, 13, 12}));
  group = {0.1F, 0.1F};
  turboquant_eval::round_min_max(group, 3);
  EXPECT_EQ(group[1], turboquant::to_float(turboquant::to_half(0.1F)));
}

TEST(Baselines, BitsOfGroupsIncludeTheLastShortOne) {
  using turboquant_eval::min_max_bits;
  EXPECT_EQ(min_max_bits(4, 128, 32), 5);
  EXPECT_EQ(min_max_bits(2, 256, 128), 2.25);
  EXPECT_EQ(min_max_bits(3, 40, 32), 3 + 64.0 / 40);
  EXPECT_EQ(min_max_bits(4, 99, 128), 4 + 32.0 / 99);
  EXPECT_EQ(min_max_bits(2, 1, 32), 34);
}

// Keys in even steps along the tokens, values in even steps along the channels: KIVI-2 keeps both exactly.
TEST(Baselines, KiviGroupsKeysByChannelAndValuesByToken) {
  ExactLayer layer;
  layer.tokens = 36;
  layer.kv_heads = 2;
  layer.head_dim = layer.value_dim = 48;
  for (std::size_t row = 0; row < 72; ++row) {
    for (std::size_t i = 0; i < 48; ++i) {
      layer.keys.push_back(static_cast<float>(32 * i + row % 4));
      layer.values.push_back(static_cast<float>(16 * row + i % 4));
    }
  }
  const Subject kivi = turboquant_eval::subject_kivi(layer, 2, 32);
  EXPECT_EQ(kivi.keys, layer.keys);
  EXPECT_EQ(kivi.values, layer.values);
  EXPECT_EQ(kivi.key_bits, 2 + 64.0 / 36);
  EXPECT_EQ(kivi.value_bits, 2 + 64.0 / 48);
  EXPECT_EQ(kivi.bits_per_coordinate, (kivi.key_bits + kivi.value_bits) / 2);
  layer.keys[0] = -29;  // widens the first group of channel 0: d = f16(32 / 3)
  const Subject wider = turboquant_eval::subject_kivi(layer, 2, 32);
  EXPECT_EQ(wider.keys[0], -29);
  EXPECT_NEAR(wider.keys[48], 3, 0.01);  // key 1, channel 0: 1 becomes the highest level
  EXPECT_EQ(wider.keys[32 * 48], 0);     // key 32 is in the next group
  EXPECT_EQ(wider.keys[36 * 48], 0);     // and another head in its own
}

TEST(Baselines, RotatedQ4RotatesBeforeAndBackAfter) {
  ExactLayer layer;
  layer.tokens = 1;
  layer.kv_heads = 1;
  layer.head_dim = layer.value_dim = 32;
  std::vector<float> levels(32);
  for (std::size_t i = 0; i < 32; ++i)
    levels[i] = static_cast<float>((7 * i + 3 * i * i * i) % 16) - 8;  // what q4_0 keeps exactly
  const turboquant::Rotation rotation(5, 32);
  layer.keys.resize(32);
  turboquant::kernels::Portable::rotate_back({32, rotation.signs(), nullptr, 1}, levels.data(), layer.keys.data());
  layer.values = layer.keys;
  const Subject rotated = turboquant_eval::subject_rotated_q4_0(layer, 5);
  const Subject plain = turboquant_eval::subject_q4_0(layer);
  double worst = 0, plain_worst = 0;
  for (std::size_t i = 0; i < 32; ++i) {
    worst = (std::max)(worst, std::abs(double(rotated.keys[i] - layer.keys[i])));
    plain_worst = (std::max)(plain_worst, std::abs(double(plain.keys[i] - layer.keys[i])));
  }
  EXPECT_LT(worst, 1e-5);
  EXPECT_GT(plain_worst, 0.1);
  EXPECT_EQ(rotated.values, rotated.keys);
  EXPECT_EQ(rotated.bits_per_coordinate, 4.5);
}

TEST(Baselines, TurboProdKeysGiveItsEstimates) {
  ExactLayer layer;
  layer.tokens = 3;
  layer.kv_heads = 1;
  layer.head_dim = layer.value_dim = 64;
  std::vector<float> query;
  for (std::size_t i = 0; i < 64; ++i) query.push_back(std::sin(static_cast<float>(3 * i * i % 101)));
  for (std::size_t i = 0; i < 192; ++i) layer.keys.push_back(std::cos(static_cast<float>(i * i % 113)));
  const Subject subject = turboquant_eval::subject_turbo_prod(layer, 3, 9);
  EXPECT_EQ(subject.key_bits, 3.5);  // and scale and residual norm in 16 bits each
  EXPECT_EQ(subject.bits_per_coordinate, 3.5);
  EXPECT_TRUE(subject.values.empty());
  const turboquant::TurboProd<3> codec(9, 64);
  turboquant::TurboProd<3>::Query prepared;
  turboquant::TurboProd<3>::Code code;
  codec.prepare(query.data(), prepared);
  for (std::size_t token = 0; token < 3; ++token) {
    codec.encode(layer.key(0, token), code);
    double product = 0;
    for (std::size_t i = 0; i < 64; ++i) product += double(query[i]) * double(subject.keys[64 * token + i]);
    // The sketch is a few units large and its norm rounded to bf16, by at most 2^-9 of it.
    EXPECT_NEAR(product, double(codec.estimate(prepared, code)), 0.02);
    EXPECT_NE(codec.estimate(prepared, code), codec.estimate(prepared, code, false));
  }
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

TEST(Accuracy, HeadsCountByTheirEnergy) {
  const ExactLayer layer = wave_layer();
  Subject subject = copy_of(layer);
  double first = 0, all = 0;
  for (std::size_t i = 0; i < layer.values.size(); ++i) {
    const double energy = double(layer.values[i]) * double(layer.values[i]);
    all += energy;
    if (i >= layer.values.size() / 2) continue;
    first += energy;
    subject.values[i] = 0;
  }
  EXPECT_NEAR(compare(layer, std::vector{subject}).at(0).value_error, first / all, 1e-12);
}

TEST(Accuracy, KeysAloneHaveWeightsButNoOutputs) {
  const ExactLayer layer = wave_layer();
  Subject subject = copy_of(layer);
  subject.values.clear();
  const Accuracy accuracy = compare(layer, std::vector{subject}).at(0);
  EXPECT_EQ(accuracy.key_error, 0);
  EXPECT_EQ(accuracy.kl, 0);
  EXPECT_TRUE(std::isnan(accuracy.value_error));
  EXPECT_TRUE(std::isnan(accuracy.output_error));
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

  // One layer of 32 tokens of 32 numbers, or of zeros.
  Path small_file(bool has_numbers = true) const {
    const std::string header =
        "{\"layers.0.k\":{\"dtype\":\"F32\",\"shape\":[1,32,32],\"data_offsets\":[0,4096]},"
        "\"layers.0.v\":{\"dtype\":\"F32\",\"shape\":[1,32,32],\"data_offsets\":[4096,8192]}}";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    std::vector<float> numbers(2048, 0.0F);
    for (std::size_t i = 0; has_numbers && i < numbers.size(); ++i) numbers[i] = std::sin(0.7F * float(i * i % 997));
    const Path file = folder_ / "small.safetensors";
    std::ofstream stream(file, std::ios::binary);
    stream << bytes << header;
    stream.write(reinterpret_cast<const char*>(numbers.data()), 8192);
    return file;
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
  std::set<std::string> names;
  for (const json& format : report.at("formats")) {
    EXPECT_TRUE(names.insert(format.at("format").get<std::string>()).second) << format.at("format") << " twice";
    if (format.at("value_bits").is_null()) {  // keys only
      EXPECT_EQ(format.at("key_bits"), format.at("bits_per_coordinate"));
      continue;
    }
    // Keys and values are of the same size in both inputs.
    EXPECT_NEAR(format.at("bits_per_coordinate").get<double>(),
                (format.at("key_bits").get<double>() + format.at("value_bits").get<double>()) / 2, 1e-9)
        << format.at("format");
    const double bytes = format.at("bytes_per_token").get<double>();
    EXPECT_NEAR(format.at("bits_per_coordinate").get<double>(), 8 * bytes / coordinates, 1e-9) << format.at("format");
    EXPECT_NEAR(format.at("compression").get<double>(), 2 * coordinates / bytes, 1e-9) << format.at("format");
  }
  for (const char* name : {"f16", "TQ8", "TQ4", "TQ3", "TQ2", "TQ4, not centred", "polar4/scalar4", "q8_0", "q4_0",
                           "q4_0, rotated", "KIVI-4, 32 tokens", "KIVI-3, 32 tokens", "KIVI-2, 32 tokens",
                           "KIVI-4, 128 tokens", "KIVI-2, 128 tokens", "TurboProd4, keys", "TurboProd3, keys"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

TEST_F(EvalProgram, MeasuresTheSample) {
  const json report = run_json(kSanitized ? "--layers 0" : "");
  const int tokens = kSanitized ? 512 : 1024;  // of all layers
  ASSERT_TRUE(report.is_object());
  expect_sizes_agree(report);
  EXPECT_NE(printed_.find(fmt::format("coded: {0} of {0} tokens", tokens)), std::string::npos) << printed_;
  EXPECT_NE(printed_.find("flatters"), std::string::npos);
  for (const json& format : report.at("formats")) {
    EXPECT_EQ(format.at("coded_tokens"), tokens) << format.at("format");
    for (const char* key : {"key_error", "value_error", "output_error", "kl", "top1"}) {
      const bool needs_values = key == std::string("value_error") || key == std::string("output_error");
      EXPECT_EQ(format.at(key).is_number(), !(needs_values && format.at("value_bits").is_null()))
          << format.at("format") << " " << key;
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
  EXPECT_EQ(figure(report, "polar4/polar3", "key_error"), figure(report, "polar4/scalar4", "key_error"));
  EXPECT_GT(figure(report, "polar4/polar3", "value_error"), figure(report, "TQ4", "value_error"));
  // Rotation helps q4_0 and groups of channels help KIVI's keys, but neither reaches TQ4 in as many bits.
  EXPECT_LT(figure(report, "q4_0, rotated", "key_error"), figure(report, "q4_0", "key_error"));
  EXPECT_LT(figure(report, "TQ4", "kl"), figure(report, "q4_0, rotated", "kl"));
  EXPECT_LT(figure(report, "TQ4", "kl"), figure(report, "KIVI-4, 128 tokens", "kl"));
  EXPECT_LT(figure(report, "TQ4", "kl"), figure(report, "TurboProd4, keys", "kl"));
  EXPECT_LT(figure(report, "TQ4", "kl"), 0.004);
  EXPECT_GT(figure(report, "TQ4", "top1"), 0.97);
}

TEST_F(EvalProgram, MeasuresQwen) {
  if (std::string(TURBOQUANT_DATA_DIR).empty()) GTEST_SKIP() << "TURBOQUANT_DATA_DIR is not set";
  const json report = run_json((kSanitized ? "--layers 3 \"" : "\"") + qwen().string() + "\"");
  ASSERT_TRUE(report.is_object());
  expect_sizes_agree(report);
  EXPECT_NE(printed_.find("99 tokens in 1 full page and a sealed page of 35"), std::string::npos) << printed_;
  EXPECT_NE(printed_.find(kSanitized ? "coded: 99 of 99 tokens" : "coded: 396 of 396 tokens"), std::string::npos)
      << printed_;
  const double four = figure(report, "TQ4", "key_error"), three = figure(report, "TQ3", "key_error");
  EXPECT_LE(four, 0.0090);
  EXPECT_LE(three, 0.034);
  EXPECT_GE(figure(report, "TQ4, not centred", "key_error"), 2 * four);
  EXPECT_GE(figure(report, "TQ3, not centred", "key_error"), 2 * three);
  EXPECT_TRUE(format(report, "TQ4").at("kl").is_null());  // the file has no queries
  EXPECT_LT(figure(run_json("--synthetic-queries --layers 3 \"" + qwen().string() + "\""), "TQ4", "output_error"), 0.1);
}

TEST_F(EvalProgram, HonoursItsOptions) {
  const std::string small = "\"" + small_file().string() + "\"";
  const json report = run_json("--page-tokens 256 --seed 7 --per-layer --layers " + (kSanitized ? "0 " + small : "3"));
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report.at("layers").size(), 1U);
  EXPECT_EQ(report.at("page_tokens"), 256);
  EXPECT_EQ(report.at("seed"), 7);
  EXPECT_NE(printed_.find(kSanitized ? "layer   0" : "layer   3"), std::string::npos) << printed_;
  EXPECT_EQ(run("--quiet " + small), 0);
  EXPECT_EQ(printed_, "");
}

TEST_F(EvalProgram, DrawsPlansAndSuggests) {
  const Path picture = folder_ / "picture.svg";
  EXPECT_EQ(run("--quiet --plot \"" + picture.string() + "\" \"" + small_file().string() + "\""), 0) << printed_;
  std::ifstream stream(picture);
  const std::string svg(std::istreambuf_iterator<char>(stream), {});
  EXPECT_NE(svg.find("TQ4"), std::string::npos);
  EXPECT_EQ(run("--suggest \"" + small_file().string() + "\""), 0) << printed_;
  EXPECT_NE(printed_.find("plan: {"), std::string::npos) << printed_;
  EXPECT_EQ(run("--study --layers 0 \"" + small_file().string() + "\""), 0) << printed_;
  EXPECT_NE(printed_.find("16-bit centres"), std::string::npos) << printed_;
  EXPECT_EQ(run("--plan conservative --layers-count 20"), 0) << printed_;
  EXPECT_NE(printed_.find("layers 2 to 17"), std::string::npos) << printed_;
  EXPECT_EQ(run("--plan \"{\\\"layers.20\\\": 8, \\\"default\\\": 4}\" --layers-count 20"), 2);
  EXPECT_NE(printed_.find("layers below 20"), std::string::npos) << printed_;
  EXPECT_EQ(run("--layers-count 20"), 2);
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
  EXPECT_EQ(run("\"" + small_file(false).string() + "\""), 1);
  EXPECT_NE(printed_.find("no token of layer 0 was coded"), std::string::npos) << printed_;
}

TEST_F(EvalProgram, FailsIfItCannotWrite) {
  const std::string nowhere = (folder_ / "no" / "such").string(), input = "\" \"" + small_file().string() + "\"";
  EXPECT_EQ(run("--json \"" + nowhere + input), 1);
  EXPECT_EQ(run("--plot \"" + nowhere + input), 1);
}

#endif

}  // namespace
