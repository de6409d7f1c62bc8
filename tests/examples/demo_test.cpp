// The demo's measurements: divergences, hidden keys, token files, and a small run from end to end.
#include "checkpoint.hpp"

#include <demo/next_token.hpp>
#include <demo/passkey.hpp>
#include <demo/report.hpp>
#include <demo/study.hpp>
#include <demo/text.hpp>
#include <eval/tensor.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

namespace {

using engine::Rows;

Rows rows_of(std::initializer_list<float> numbers, std::size_t width) {
  Rows rows(numbers.size() / width, width);
  std::copy(numbers.begin(), numbers.end(), rows[0]);
  return rows;
}

TEST(NextToken, ComparesDistributions) {
  const Rows reference = rows_of({0, 0, 0, 1}, 2), other = rows_of({std::log(3.0F), 0, 0, 1}, 2);
  const engine::Token targets[] = {0, 1};
  const demo::Prediction same = demo::compare(reference, reference, targets);
  EXPECT_NEAR(same.kl, 0, 1e-12);
  EXPECT_EQ(same.same, 2U);
  EXPECT_NEAR(same.bits, 1 + std::log2(1 + std::exp(-1.0)), 1e-6);
  const demo::Prediction changed = demo::compare(reference, other, targets);
  EXPECT_NEAR(changed.kl, 0.5 * std::log(0.5 / 0.75) + 0.5 * std::log(0.5 / 0.25), 1e-6);
  EXPECT_NEAR(changed.bits, std::log2(4.0 / 3) + std::log2(1 + std::exp(-1.0)), 1e-6);
  EXPECT_EQ(changed.same, 2U) << "of equal logits the first is the most likely";
  EXPECT_EQ(changed.tokens, 2U);
}

TEST(Passkey, PassagesHaveTheirLengthAndTheirKeys) {
  const std::string text(5000, 'x');
  for (const std::size_t length : {100U, 256U, 512U, 2048U}) {
    const auto passages = demo::make_passages(text, length, 20, 3);
    ASSERT_EQ(passages.size(), 20U);
    std::vector<std::size_t> depths(demo::kDepths);
    for (const demo::Passage& passage : passages) {
      EXPECT_EQ(passage.text.size(), length);
      EXPECT_EQ(passage.questions.size(), length < 200 ? 1U : length < 400 ? 2U : 4U);
      for (const auto& question : passage.questions) {
        const std::string key = passage.text.substr(question.begin, demo::kDigits);
        const std::string asked = passage.text.substr(0, question.begin);
        const std::size_t name = asked.rfind("key of ") + 7;
        const std::string fact = "The pass key of " + asked.substr(name, 5) + " is " + key + ".";
        const std::size_t at = passage.text.find(fact);
        ASSERT_NE(at, std::string::npos) << fact;
        EXPECT_LT(at, passage.text.find(" Question"));
        ASSERT_LT(question.depth, demo::kDepths);
        ++depths[question.depth];
      }
    }
    if (length >= 512) {
      for (const std::size_t count : depths) EXPECT_GE(count, 10U) << length;
    }
  }
  EXPECT_EQ(demo::make_passages(text, 512, 2, 8)[1].text, demo::make_passages(text, 512, 2, 8)[1].text);
  EXPECT_NE(demo::make_passages(text, 512, 1, 8)[0].text, demo::make_passages(text, 512, 1, 9)[0].text);
  EXPECT_THROW(static_cast<void>(demo::make_passages(text, 50, 1, 1)), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(demo::make_passages("short", 512, 1, 1)), std::invalid_argument);
}

TEST(Passkey, CountsDigits) {
  const demo::Passage passage{"a12345.", {{1, 2}}};
  Rows logits(7, 256);
  for (std::size_t i = 0; i < 5; ++i)
    logits[i][static_cast<unsigned char>(passage.text[i + 1])] = i == 3 ? -1.0F : 1.0F;
  const demo::Recall recall = demo::count_recalled(passage, logits);
  EXPECT_EQ(recall.all_digits(), 5U);
  EXPECT_DOUBLE_EQ(recall.accuracy(), 0.8);
  EXPECT_DOUBLE_EQ(recall.accuracy(2), 0.8);
  EXPECT_TRUE(std::isnan(recall.accuracy(0)));
}

TEST(Text, ReadsTokenIdsAndRefusesOthers) {
  const auto folder = checkpoint::fresh_folder("demo_text");
  const auto read = [&](const std::string& text) {
    std::ofstream(folder / "tokens") << text;
    return demo::read_token_ids(folder / "tokens", 100);
  };
  EXPECT_EQ(read(" 1 2\n99,3\n"), (std::vector<engine::Token>{1, 2, 99, 3}));
  EXPECT_TRUE(read("").empty());
  for (const char* text : {"1 100", "x", "1 2x", "-1", "99999999999999999999"}) {
    EXPECT_THROW(static_cast<void>(read(text)), turboquant_eval::FileError) << text;
  }
  std::filesystem::remove_all(folder);
}

TEST(Demo, MeasuresAModelOfAnotherVocabulary) {
  const auto folder = checkpoint::fresh_folder("demo_study");
  checkpoint::write(checkpoint::random_checkpoint("llama"), folder);
  const engine::Model model(folder);
  std::vector<engine::Token> tokens;
  for (std::size_t i = 0; i < 300; ++i) tokens.push_back(static_cast<engine::Token>(oracle::hash(1, 4, i) % 61));
  demo::Extent extent;
  extent.window_tokens = 128;
  extent.windows = 2;
  extent.stress_windows = 1;
  extent.timed_context = 100;
  std::vector<demo::Row> rows = demo::ablation_rows();
  std::size_t steps = 0;
  demo::measure(model, tokens, "", extent, rows, [&] { ++steps; });
  EXPECT_EQ(steps, demo::study_steps(extent, rows.size()));
  EXPECT_EQ(rows[0].prediction.mean_kl(), 0);
  EXPECT_EQ(rows[0].bits, 32);
  for (std::size_t i = 1; i < rows.size(); ++i) {
    EXPECT_GT(rows[i].prediction.mean_kl(), 0) << rows[i].name;
    EXPECT_EQ(rows[i].prediction.tokens, 256U);
    EXPECT_EQ(rows[i].stressed.size(), 3U);
    EXPECT_GT(rows[i].attention_time, 0);
  }
  const auto kl = [&](std::size_t row) { return rows[row].prediction.mean_kl(); };
  EXPECT_LT(kl(1), kl(2)) << "8 bits on both sides against 4 on one";
  EXPECT_NE(demo::table(extent, rows).find("TQ3 values"), std::string::npos);
  demo::write_json(extent, rows, folder / "report.json");
  const auto json = nlohmann::json::parse(std::ifstream(folder / "report.json"));
  EXPECT_EQ(json["rows"].size(), rows.size());
  EXPECT_EQ(json["rows"][2]["kl"].get<double>(), kl(2));
  demo::write_plot(rows, folder / "report.svg");
  EXPECT_NE(demo::read_text(folder / "report.svg").find("TQ3 keys"), std::string::npos);
  EXPECT_THROW(demo::write_json(extent, rows, folder / "none" / "report.json"), std::runtime_error);
  std::filesystem::remove_all(folder);
}

}  // namespace
