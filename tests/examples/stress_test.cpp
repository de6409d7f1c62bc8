// Models with other keys compute what the model computes, and caches of the demo code what they say.
#include "checkpoint.hpp"

#include <engine/caches.hpp>
#include <engine/model.hpp>
#include <engine/plain_cache.hpp>
#include <engine/stress.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace {

using engine::Stress;
using engine::Token;

class Caches : public testing::Test {
 protected:
  void SetUp() override {
    const auto folder = checkpoint::fresh_folder(std::string("stress_") +
                                                 testing::UnitTest::GetInstance()->current_test_info()->name());
    checkpoint::write(checkpoint::random_checkpoint("qwen2"), folder);
    model_ = std::make_unique<engine::Model>(folder);
    std::filesystem::remove_all(folder);
    for (std::size_t i = 0; i < 150; ++i) tokens_.push_back(static_cast<Token>(oracle::hash(9, 3, i) % 61));
    calibration_ = engine::calibrate(*model_, tokens_);
  }

  std::unique_ptr<engine::KvCache> stressed(Stress stress, std::unique_ptr<engine::KvCache> cache) const {
    return engine::make_stressed(stress, calibration_, model_->attention_shape(), std::move(cache));
  }

  engine::Rows logits(engine::KvCache& cache) const {
    const engine::SequenceStep step{cache.create(), tokens_, true};
    return model_->forward(cache, {&step, 1});
  }
  engine::Rows logits(const engine::CacheChoice& choice) const {
    return logits(*engine::make_cache(choice, model_->attention_shape()));
  }

  // Root mean square of the difference over that of the logits.
  static double difference(const engine::Rows& a, const engine::Rows& b) {
    double squares = 0, energy = 0;
    for (std::size_t t = 0; t < a.count(); ++t) {
      for (std::size_t i = 0; i < a.width(); ++i) {
        squares += std::pow(static_cast<double>(a[t][i]) - static_cast<double>(b[t][i]), 2);
        energy += std::pow(static_cast<double>(a[t][i]), 2);
      }
    }
    return std::sqrt(squares / energy);
  }

  std::unique_ptr<engine::Model> model_;
  std::vector<Token> tokens_;
  engine::Calibration calibration_;
};

TEST_F(Caches, StressesKeepWhatExactAttentionComputes) {
  const engine::AttentionShape shape = model_->attention_shape();
  const engine::Rows expected = logits(*engine::make_f32_cache(shape));
  // Factors are powers of two, and nobody attends to the sink: the same numbers.
  EXPECT_EQ(difference(expected, logits(*stressed(Stress::outlier_channels, engine::make_f32_cache(shape)))), 0);
  EXPECT_EQ(difference(expected, logits(*stressed(Stress::sink_token, engine::make_f32_cache(shape)))), 0);
  EXPECT_EQ(difference(expected, logits(*stressed(Stress::none, engine::make_f32_cache(shape)))), 0);
  // bf16 has 8 bits: at 20 deviations keys are rounded to multiples of a tenth of their deviation.
  const double offset = difference(expected, logits(*stressed(Stress::key_offset, engine::make_f32_cache(shape))));
  EXPECT_GT(offset, 0);
  EXPECT_LT(offset, 0.15);
}

TEST_F(Caches, StressesReachTheCache) {
  engine::CacheChoice choice{"q4_0", 0, 0, true};
  const engine::AttentionShape shape = model_->attention_shape();
  const engine::Rows exact = logits(*stressed(Stress::key_offset, engine::make_f32_cache(shape)));
  const auto error = [&](const char* format) {
    choice.format = format;
    return difference(exact, logits(*stressed(Stress::key_offset, engine::make_cache(choice, shape))));
  };
  const double q4_0 = error("q4_0"), centred = error("TQ4"), uncentred = error("TQ4, not centred");
  EXPECT_LT(3 * centred, q4_0);
  EXPECT_LT(3 * centred, uncentred);
}

TEST_F(Caches, SinksAreNotCounted) {
  const auto cache = stressed(Stress::sink_token, engine::make_f16_cache(model_->attention_shape()));
  const std::size_t sequence = cache->create();
  EXPECT_EQ(cache->length(sequence), 0U);
  const engine::SequenceStep step{sequence, tokens_, false};
  const engine::Rows expected = model_->forward(*cache, {&step, 1});
  EXPECT_EQ(cache->length(sequence), tokens_.size());
  cache->truncate(sequence, 100);
  EXPECT_EQ(cache->length(sequence), 100U);
  const std::size_t copy = cache->fork(sequence, 90);
  EXPECT_EQ(cache->length(copy), 90U);
  const engine::SequenceStep rest{copy, std::span(tokens_).subspan(90), false};
  EXPECT_EQ(difference(expected, model_->forward(*cache, {&rest, 1})), 0);
}

TEST_F(Caches, FormatsAreSizedAndOrderedAsTheySay) {
  const engine::Rows exact = logits({"f32"});
  double before = 0;
  for (const char* format : {"f16", "q8_0", "TQ4", "TQ3", "TQ2"}) {
    const double error = difference(exact, logits({format, 0, 0, true}));
    EXPECT_GT(error, before) << format;
    before = error;
  }
  const std::size_t coordinates = 150 * 2 * 2 * 2 * 32;
  const auto cache = engine::make_cache({"q4_0", 0, 0, true}, model_->attention_shape());
  static_cast<void>(logits(*cache));
  EXPECT_EQ(cache->bytes(), coordinates * 9 / 16);
}

TEST_F(Caches, TextsShorterThanTheRecentTokensAreRaw) {
  const engine::Rows exact = logits({"f32"});
  for (const char* format : {"q4_0", "KIVI-2", "plain 2"}) {
    EXPECT_EQ(difference(exact, logits({format, 200, 0, false})), 0) << format;
    EXPECT_EQ(difference(exact, logits({format, 0, 150, true})), 0) << format;
    EXPECT_GT(difference(exact, logits({format, 64, 0, false})), 0) << format;
  }
  // Raw is bf16 in the library's own cache.
  EXPECT_LT(difference(exact, logits({"TQ2", 200, 0, false})), 0.01);
  EXPECT_GT(difference(exact, logits({"TQ2", 64, 0, false})), 0.01);
}

TEST_F(Caches, EveryNameMakesACacheAndOthersAreRefused) {
  for (const std::string& format : engine::cache_formats()) {
    EXPECT_NO_THROW(static_cast<void>(engine::make_cache({format, 0, 0, true}, model_->attention_shape()))) << format;
  }
  EXPECT_THROW(static_cast<void>(engine::make_cache({"TQ5"}, model_->attention_shape())), std::invalid_argument);
  engine::AttentionShape odd = model_->attention_shape();
  odd.head_dim = 48 * 11;
  EXPECT_THROW(static_cast<void>(engine::make_cache({"TQ4"}, odd)), std::invalid_argument);
}

TEST_F(Caches, CachesForMeasuringTakeATextInOneStep) {
  const auto cache = engine::make_cache({"TQ4", 0, 0, true}, model_->attention_shape());
  const std::size_t sequence = cache->create();
  const engine::SequenceStep step{sequence, std::span(tokens_).first(20), false};
  static_cast<void>(model_->forward(*cache, {&step, 1}));
  EXPECT_EQ(cache->length(sequence), 20U);
  EXPECT_THROW(static_cast<void>(model_->forward(*cache, {&step, 1})), std::runtime_error);
}

}  // namespace
