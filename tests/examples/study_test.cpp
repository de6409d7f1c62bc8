// Accuracy per bit on real keys and values: the goals, keys with an offset, and what is suggested for them.
#include <eval/accuracy.hpp>
#include <eval/cached_formats.hpp>
#include <eval/study.hpp>
#include <eval/suggestion.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/sanitized.hpp"

namespace {

using namespace turboquant_eval;
using tests::kSanitized;

LayerSet read_layer_set(const std::filesystem::path& file, const std::set<unsigned>& wanted = {}) {
  return read_layers(std::array{file}, wanted);
}

LayerSet sample(const std::set<unsigned>& wanted = {}) {
  return read_layer_set(TURBOQUANT_SOURCE_DIR "/examples/data/qkv-sample.safetensors", wanted);
}

// The first tokens of the first heads of [heads, tokens, dim]; heads 0: all.
Tensor first_tokens(const Tensor& tensor, std::size_t count, std::size_t heads = 0) {
  Tensor result = tensor;
  const std::size_t row = tensor.bytes.size() / tensor.shape[0] / tensor.shape[1];
  if (heads != 0) result.shape[0] = heads;
  result.shape[1] = count;
  result.bytes.clear();
  for (std::size_t head = 0; head < result.shape[0]; ++head) {
    const auto begin = tensor.bytes.begin() + static_cast<std::ptrdiff_t>(head * tensor.shape[1] * row);
    result.bytes.insert(result.bytes.end(), begin, begin + static_cast<std::ptrdiff_t>(count * row));
  }
  return result;
}

LayerSet first_tokens(LayerSet layers, std::size_t count) {
  for (auto& [number, tensors] : layers) {
    tensors = {first_tokens(tensors.keys, count), first_tokens(tensors.values, count),
               first_tokens(*tensors.queries, count)};
  }
  return layers;
}

LayerSet with_offsets(const LayerSet& layers, double deviations) {
  LayerSet result;
  for (const auto& [number, tensors] : layers) result.emplace(number, with_offset(tensors, deviations));
  return result;
}

// Means over layers, 8-bit centres.
Accuracy measured(const LayerSet& layers, std::string_view codecs, std::size_t page_tokens = 64) {
  std::vector<Accuracy> accuracies;
  for (const auto& [number, tensors] : layers) {
    ExactLayer layer = exact_layer(tensors);
    layer.heads = 0;
    const Subject subject = store(cached_format(codecs, 8), tensors, layer, {.page_tokens = page_tokens});
    accuracies.push_back(compare(layer, std::span(&subject, 1)).front());
  }
  return mean(accuracies);
}

// Four layers; under sanitizers the first of them, which shows all that the means over them show.
class QwenKeys : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::string(TURBOQUANT_DATA_DIR).empty()) {
      layers_ = read_layer_set(std::filesystem::path(TURBOQUANT_DATA_DIR) / "kv" / "qwen3.5-0.8b.safetensors",
                               kSanitized ? std::set{3U} : std::set<unsigned>{});
      ASSERT_EQ(layers_.size(), kSanitized ? 1U : 4U);
      return;
    }
#ifdef TURBOQUANT_REQUIRE_DATA
    FAIL() << "TURBOQUANT_DATA_DIR is not set";
#else
    GTEST_SKIP() << "TURBOQUANT_DATA_DIR is not set";
#endif
  }

  LayerSet layers_;
};

// Codes are the same on every machine, so a figure moves only if the code does.
TEST_F(QwenKeys, MeetTheGoals) {
  const Accuracy four = measured(layers_, "polar4");
  EXPECT_LE(four.key_error, 0.0080);
  EXPECT_LE(four.value_error, 0.0053);  // the goal of 0.0052 takes smaller pages, or a trellis
  EXPECT_LE(measured(layers_, "polar4", 48).value_error, 0.0052);
  const Accuracy four_paths = measured(layers_, "trellis4");
  EXPECT_LE(four_paths.key_error, 0.0055);
  EXPECT_LE(four_paths.value_error, 0.0052);
  const Accuracy three = measured(layers_, "trellis3");
  EXPECT_LE(three.key_error, 0.022);
  EXPECT_LE(three.value_error, 0.015);
  const Accuracy two = measured(layers_, "trellis2");
  EXPECT_LE(two.key_error, 0.086);
  EXPECT_LE(two.value_error, 0.055);
  // Nearest levels of the same width, also with a searched scale, are far off: a trellis that falls back to them shows.
  EXPECT_GE(measured(layers_, "polar3").key_error, 1.4 * three.key_error);
  EXPECT_GE(measured(layers_, "polar2").key_error, 1.4 * two.key_error);
}

TEST_F(QwenKeys, SmallerPagesCostBitsAndGainAccuracy) {
  LayerSet one{*layers_.begin()};
  if (kSanitized) {
    LayerTensors& tensors = one.begin()->second;
    tensors = {first_tokens(tensors.keys, 64, 1), first_tokens(tensors.values, 64, 1), {}};
  }
  const std::vector<PageStudy> rows = study_pages(one, {});
  const auto at = [&](std::string_view codecs, std::size_t page, unsigned bits) {
    return *std::find_if(rows.begin(), rows.end(), [&](const PageStudy& row) {
      return row.codecs == codecs && row.page_tokens == page && row.center_bits == bits;
    });
  };
  for (const char* codecs : {"polar4", "trellis3", "polar2"}) {
    EXPECT_LT(at(codecs, 32, 8).key_error, at(codecs, 64, 8).key_error) << codecs;
    EXPECT_GT(at(codecs, 32, 8).key_bits, at(codecs, 64, 8).key_bits) << codecs;
    EXPECT_GT(at(codecs, 64, 0).key_error, 1.9 * at(codecs, 64, 8).key_error) << codecs;
    EXPECT_GT(at(codecs, 64, 16).key_bits, at(codecs, 64, 8).key_bits) << codecs;
    // 16 bits buy nothing where the offset is ordinary.
    EXPECT_NEAR(at(codecs, 64, 16).key_error / at(codecs, 64, 8).key_error, 1, 0.01) << codecs;
  }
}

TEST_F(QwenKeys, ValueCodecsKeepTheirOrder) {
  const std::vector<ValueStudy> rows = study_values(layers_, {});
  for (const char* bits : {"4", "3", "2"}) {
    const auto error = [&](const char* codec) {
      return std::find_if(rows.begin(), rows.end(),
                          [&](const ValueStudy& row) { return row.codec == std::string(codec) + bits; })
          ->error;
    };
    EXPECT_LT(error("trellis"), error("polar")) << bits;
    EXPECT_LT(error("polar"), error("scalar")) << bits;
  }
}

// Key errors are sums over many keys and move by the offset alone; outputs of few drawn queries also by chance.
void expect_robust(const std::vector<OffsetStudy>& rows, double output_growth) {
  for (const OffsetStudy& row : rows) {
    const double keys = row.key_error / row.plain_key_error, outputs = row.output_error / row.plain_output_error;
    SCOPED_TRACE(row.codecs + ", " + std::to_string(row.center_bits) + " bits, " + std::to_string(row.deviations));
    if (row.center_bits == 0) {
      EXPECT_GT(keys, 5);
      EXPECT_GT(outputs, 5);
    } else if (row.center_bits == 8 && row.deviations > 20) {
      EXPECT_GT(keys, 1.3);  // int8 rounds the mean by up to the keys' deviation
    } else {
      EXPECT_LT(keys, 1.1);
      EXPECT_LT(outputs, output_growth);
      EXPECT_GT(outputs, 2 - output_growth);
    }
  }
}

TEST(KeyOffset, IsHarmlessAtEveryWidthOnTheSample) {
  const LayerSet layers =
      first_tokens(sample(kSanitized ? std::set{0U} : std::set<unsigned>{}), kSanitized ? 128 : 256);
  constexpr std::array<std::string_view, 7> kWidths{"polar8",   "polar4", "trellis4", "polar3",
                                                    "trellis3", "polar2", "trellis2"};
  expect_robust(study_offsets(layers, {}, kWidths), 1.1);
}

TEST_F(QwenKeys, WithAnOffsetKeepTheirErrors) {
  constexpr std::array<std::string_view, 2> kWidths{"polar4", "trellis3"};
  expect_robust(study_offsets(layers_, {}, kWidths), 1.1);
}

TEST_F(QwenKeys, NeedNothingBeyondTheDefault) {
  for (const LayerSuggestion& layer : suggest(layers_, {})) {
    EXPECT_EQ(layer.center_bits, 8) << layer.layer;
    EXPECT_LE(layer.bits, 4U) << layer.layer;
    EXPECT_TRUE(layer.is_within_limit) << layer.layer;
    EXPECT_LT(layer.offset, 10) << layer.layer;
  }
}

TEST_F(QwenKeys, NeedWiderCentresWithAnOffset) {
  for (const double deviations : {20.0, 100.0}) {
    const std::vector<LayerSuggestion> layers = suggest(with_offsets(layers_, deviations), {});
    ASSERT_EQ(layers.size(), layers_.size());
    for (const LayerSuggestion& layer : layers) {
      EXPECT_EQ(layer.center_bits, 16) << deviations << " " << layer.layer;
      EXPECT_LE(layer.bits, 4U) << deviations << " " << layer.layer;
      EXPECT_TRUE(layer.is_within_limit) << deviations << " " << layer.layer;
      EXPECT_GT(layer.offset, deviations) << layer.layer;
      EXPECT_GT(layer.rounding, deviations == 20 ? 0.01 : 0.25) << layer.layer;
    }
  }
}

TEST(Suggestion, TheSampleNeedsNothingBeyondTheDefault) {
  const std::vector<LayerSuggestion> layers = suggest(sample(kSanitized ? std::set{3U} : std::set<unsigned>{}), {});
  for (const LayerSuggestion& layer : layers) {
    EXPECT_EQ(layer.center_bits, 8);
    EXPECT_LE(layer.bits, 4U);
  }
  const std::string text = describe(layers, kErrorLimit);
  EXPECT_NE(text.find("plan: {\"default\": " + std::to_string(layers.front().bits) + "}"), std::string::npos) << text;
}

TEST(Suggestion, ASmallerLimitAsksForMoreBits) {
  const LayerSet layers = first_tokens(sample({0}), kSanitized ? 128 : 512);
  EXPECT_EQ(suggest(layers, {}, 0.2).front().bits, 2U);
  EXPECT_EQ(suggest(layers, {}, 0.001).front().bits, 8U);
  const std::vector<LayerSuggestion> impossible = suggest(layers, {}, 1e-9);
  EXPECT_EQ(impossible.front().bits, 8U);
  EXPECT_FALSE(impossible.front().is_within_limit);
  EXPECT_NE(describe(impossible, 1e-9).find("above the limit"), std::string::npos);
}

}  // namespace
