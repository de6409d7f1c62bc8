// Serving: what a request is answered depends on neither batch nor chunks nor drafts, on any cache.
#include "checkpoint.hpp"

#include <engine/caches.hpp>
#include <engine/model.hpp>
#include <engine/sampler.hpp>
#include <engine/serving.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace {

using engine::Request;
using engine::ServingOptions;
using engine::ServingReport;
using engine::Token;

std::vector<Token> random_tokens(std::size_t count, std::uint64_t seed) {
  std::vector<Token> tokens;
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(static_cast<Token>(oracle::hash(seed, 2, i) % 61));
  return tokens;
}

class Serving : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto folder = checkpoint::fresh_folder(std::string("serving_") + GetParam());
    checkpoint::write(checkpoint::random_checkpoint("qwen2"), folder);
    model_ = std::make_unique<engine::Model>(folder);
    std::filesystem::remove_all(folder);
    // Long enough that pages are coded in shared prompts, in prompts and in answers.
    shared_ = random_tokens(100, 1);
    for (std::size_t i = 0; i < 9; ++i) requests_.push_back({random_tokens(5 + 17 * i, 10 + i), 40 + i});
    requests_.push_back({{}, 25});                    // nothing behind the shared prompt
    requests_.push_back({random_tokens(30, 77), 0});  // nothing to generate
  }

  ServingReport serve(const ServingOptions& options) const {
    engine::CacheChoice choice;
    choice.format = GetParam();
    choice.recent_tokens = 16;
    const auto cache = engine::make_cache(choice, model_->attention_shape());
    ServingReport report = engine::serve(*model_, *cache, shared_, requests_, options);
    EXPECT_EQ(cache->bytes(), 0U) << "all sequences are released";
    return report;
  }

  std::unique_ptr<engine::Model> model_;
  std::vector<Token> shared_;
  std::vector<Request> requests_;
};

TEST_P(Serving, AnswersDoNotDependOnBatchChunksAndDrafts) {
  for (const float temperature : {0.0F, 0.7F}) {
    ServingOptions one_by_one;
    one_by_one.batch = 1;
    one_by_one.chunk_tokens = 1000;
    one_by_one.sampling = {temperature, temperature > 0 ? std::size_t{8} : std::size_t{0}, 5};
    const ServingReport expected = serve(one_by_one);
    ASSERT_EQ(expected.texts.size(), requests_.size());
    for (std::size_t i = 0; i < requests_.size(); ++i) EXPECT_EQ(expected.texts[i].size(), requests_[i].new_tokens);

    ServingOptions batched = one_by_one;
    batched.batch = 7;
    EXPECT_EQ(serve(batched).texts, expected.texts);
    batched.chunk_tokens = 13;
    EXPECT_EQ(serve(batched).texts, expected.texts);
    batched.draft_tokens = 5;
    const ServingReport drafted = serve(batched);
    EXPECT_EQ(drafted.texts, expected.texts);
    if (temperature == 0) {  // a model that only repeats itself: drafts of both kinds
      EXPECT_GT(drafted.accepted, 0U);
      EXPECT_LT(drafted.accepted, drafted.drafted);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Caches, Serving, testing::Values("f16", "TQ4", "TQ3"),
                         [](const auto& values) { return std::string(values.param); });

TEST(Drafts, FollowTheLastOccurrenceOfTheLongestEnding) {
  const std::vector<Token> text{1, 2, 3, 9, 8, 1, 2, 4, 7, 7, 1, 2};
  EXPECT_EQ(engine::draft_by_lookup(text, 3), (std::vector<Token>{4, 7, 7}));
  const std::vector<Token> longer{5, 1, 2, 3, 9, 8, 1, 2, 4, 7, 5, 1, 2};
  EXPECT_EQ(engine::draft_by_lookup(longer, 2), (std::vector<Token>{3, 9}));
  EXPECT_TRUE(engine::draft_by_lookup(std::vector<Token>{1, 2, 3}, 4).empty());
  EXPECT_TRUE(engine::draft_by_lookup(std::vector<Token>{}, 4).empty());
  EXPECT_TRUE(engine::draft_by_lookup(text, 0).empty());
  const std::vector<Token> repeated{6, 6, 6};  // ends of text are no limit: one token is known to follow
  EXPECT_EQ(engine::draft_by_lookup(repeated, 4), (std::vector<Token>{6}));
}

TEST(Sampler, DrawsWithTheSoftmaxProbabilities) {
  const float logits[] = {0, 1, 2, -1000, 1};
  EXPECT_EQ(engine::sample(logits, 5, {}, 0, 0), 2U);
  constexpr std::size_t kDraws = 20000;
  std::vector<double> counts(5);
  for (std::size_t i = 0; i < kDraws; ++i) ++counts[engine::sample(logits, 5, {2.0F, 0, 11}, 3, i)];
  const double sum = 1 + 2 * std::exp(0.5) + std::exp(1.0);
  // Five standard deviations of a count.
  const double tolerance = 5 * std::sqrt(0.25 / kDraws);
  EXPECT_NEAR(counts[0] / kDraws, 1 / sum, tolerance);
  EXPECT_NEAR(counts[1] / kDraws, std::exp(0.5) / sum, tolerance);
  EXPECT_NEAR(counts[2] / kDraws, std::exp(1.0) / sum, tolerance);
  EXPECT_EQ(counts[3], 0);
  for (std::size_t i = 0; i < 200; ++i) {
    EXPECT_EQ(engine::sample(logits, 5, {2.0F, 1, 11}, 3, i), 2U);
    EXPECT_EQ(engine::sample(logits, 5, {2.0F, 0, 11}, 3, i), engine::sample(logits, 5, {2.0F, 0, 11}, 3, i));
  }
}

}  // namespace
