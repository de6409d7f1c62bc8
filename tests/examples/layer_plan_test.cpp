// Layer plans: the rules, the text form and its errors, and true average bits against a cache.
#include <eval/layer_plan.hpp>

#include <eval/more_formats.hpp>
#include <turboquant/turboquant.hpp>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

using namespace turboquant_eval;

std::vector<unsigned> widths(const LayerPlan& plan) {
  std::vector<unsigned> result;
  for (const auto& layer : plan) result.push_back(bits_of(layer));
  return result;
}

ModelShape model_of(std::uint32_t layers) {
  ModelShape model;
  model.layers = layers;
  return model;
}

std::string error_of(const std::string& text, std::uint32_t layers = 4) {
  try {
    layer_plan(text, model_of(layers));
  } catch (const PlanError& error) {
    return error.what();
  }
  return "";
}

TEST(LayerPlan, UniformHasOneWidth) {
  for (const unsigned bits : {8U, 4U, 3U, 2U}) {
    EXPECT_EQ(widths(uniform_plan(model_of(3), bits)), std::vector<unsigned>(3, bits));
    EXPECT_EQ(widths(layer_plan(std::to_string(bits), model_of(3))), std::vector<unsigned>(3, bits));
  }
  EXPECT_EQ(widths(layer_plan("aggressive", model_of(5))), std::vector<unsigned>(5, 3));
  EXPECT_THROW(uniform_plan(model_of(3), 5), PlanError);
}

TEST(LayerPlan, ConservativeKeepsATenthOfEitherEnd) {
  EXPECT_EQ(widths(conservative_plan(model_of(1))), std::vector<unsigned>{8});
  EXPECT_EQ(widths(conservative_plan(model_of(2))), (std::vector<unsigned>{8, 8}));
  EXPECT_EQ(widths(conservative_plan(model_of(10))), (std::vector<unsigned>{8, 4, 4, 4, 4, 4, 4, 4, 4, 8}));
  EXPECT_EQ(widths(layer_plan("conservative", model_of(11))), (std::vector<unsigned>{8, 8, 4, 4, 4, 4, 4, 4, 4, 8, 8}));
}

TEST(LayerPlan, TextNamesLayers) {
  EXPECT_EQ(widths(layer_plan(R"({"layers.0": 8, "layers.3": 2, "default": 4})", model_of(4))),
            (std::vector<unsigned>{8, 4, 4, 2}));
  EXPECT_EQ(widths(layer_plan(R"({"default": 3})", model_of(2))), (std::vector<unsigned>{3, 3}));
  EXPECT_EQ(widths(layer_plan(R"({"layers.1": 8, "layers.0": 4})", model_of(2))), (std::vector<unsigned>{4, 8}));
  const LayerPlan large = layer_plan(R"({"layers.0": 8, "layers.79": 8, "default": 4})", model_of(80));
  EXPECT_EQ(bits_of(large[0]), 8U);
  EXPECT_EQ(bits_of(large[78]), 4U);
  EXPECT_EQ(bits_of(large[79]), 8U);
}

TEST(LayerPlan, ErrorsSayWhatWasExpected) {
  const std::vector<std::vector<std::string>> cases{
      {R"({"layers.4": 8, "default": 4})", "layers below 4", "layers.4"},
      {R"({"layers.0": 8})", "\"layers.1\" or \"default\"", "neither"},
      {R"({"layers.0": 8, "layers.0": 4, "default": 4})", "each name once", "layers.0"},
      {R"({"default": 4, "default": 8})", "each name once", "default"},
      {R"({"layer.0": 8, "default": 4})", "\"layers.N\" or \"default\"", "layer.0"},
      {R"({"layers.00": 8, "default": 4})", "a number N", "layers.00"},
      {R"({"layers.-1": 8, "default": 4})", "a number N", "layers.-1"},
      {R"({"layers.99999999999": 8, "default": 4})", "a number N", "layers.99999999999"},
      {R"({"layers.": 8, "default": 4})", "a number N", "layers."},
      {R"({"default": 5})", "default: expected 8, 4, 3 or 2 bits", "5"},
      {R"({"default": 4.0})", "default: expected 8, 4, 3 or 2 bits", "4.0"},
      {R"({"default": -4})", "default: expected 8, 4, 3 or 2 bits", "-4"},
      {R"({"default": "4"})", "default: expected 8, 4, 3 or 2 bits", "\"4\""},
      {R"({"default": 18446744073709551615})", "default: expected 8, 4, 3 or 2 bits", "18446744073709551615"},
      {R"({"default": {"layers.0": 4}})", "default: expected 8, 4, 3 or 2 bits", "layers.0"},
      {"16", "plan: expected 8, 4, 3 or 2 bits", "16"},
      {"[8, 4]", "plan: expected 8, 4, 3 or 2 bits", "[8,4]"},
      {"modest", "expected a width, \"conservative\"", "modest"},
      {"", "expected a width", ""},
      {R"({"default": 4)", "expected a width", "parse error"}};
  for (const auto& c : cases) {
    const std::string error = error_of(c[0]);
    EXPECT_NE(error.find(c[1]), std::string::npos) << c[0] << ": " << error;
    EXPECT_NE(error.find(c[2]), std::string::npos) << c[0] << ": " << error;
  }
  EXPECT_NE(error_of("4", 0).find("expected 1 to"), std::string::npos);
  ModelShape odd = model_of(2);
  odd.head_dim = 100;
  EXPECT_THROW(uniform_plan(odd, 4), PlanError);
  odd.head_dim = 128;
  odd.center_bits = 4;
  EXPECT_THROW(uniform_plan(odd, 4), PlanError);
}

TEST(LayerPlan, AverageBitsAreThoseOfACache) {
  ModelShape model{7, 2, 192, 128, 16};
  for (const char* text : {"conservative", "2", R"({"layers.1": 8, "layers.2": 2, "default": 3})"}) {
    turboquant::CacheConfig config;
    config.layers = layer_plan(text, model);
    for (const std::size_t page : {std::size_t{64}, std::size_t{48}}) {
      config.page_tokens = page;
      const turboquant::KVCache<turboquant::TQ8, turboquant::TQ4, turboquant::TQ3, turboquant::TQ2> cache(config);
      EXPECT_NEAR(average_bits(config.layers, page), cache.memory().bits_per_coordinate, 1e-12) << text;
    }
  }
  model = {10, 8, 128, 0, 8};
  EXPECT_GT(average_bits(conservative_plan(model), 64), 0.2 * 8 + 0.8 * 4);
  EXPECT_LT(average_bits(conservative_plan(model), 64), 0.2 * 8 + 0.8 * 4 + 0.35);
}

TEST(LayerPlan, DescriptionJoinsEqualLayers) {
  const std::string text = describe(layer_plan(R"({"layers.0": 8, "default": 3})", model_of(4)), 64);
  EXPECT_NE(text.find("layer 0 "), std::string::npos) << text;
  EXPECT_NE(text.find("layers 1 to 3 "), std::string::npos) << text;
  EXPECT_NE(text.find("true average: "), std::string::npos) << text;
}

}  // namespace
