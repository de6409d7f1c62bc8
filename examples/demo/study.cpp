// Windows, stresses and passages as independent jobs; times one after another.
#include "study.hpp"

#include "parallel.hpp"
#include "text.hpp"

#include <engine/cache_decorator.hpp>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace demo {
namespace {

using engine::CacheChoice;
using engine::Stress;
using engine::Token;

constexpr std::size_t kFirstTokens = 16, kCalibrationTokens = 512, kTimedSteps = 64;

Row coded_row(const std::string& format) {
  Row row;
  row.name = format;
  row.choice = {format, 0, 0, true};
  return row;
}

Row window_row(const std::string& format, std::size_t first_tokens) {
  Row row;
  row.choice = {format, CacheChoice{}.recent_tokens, first_tokens, false};
  row.name = format + (first_tokens == 0 ? " +recent" : " +recent +first");
  return row;
}

// One text under one stress, in all rows.
struct Job {
  Stress stress = Stress::none;
  std::size_t window = 0;            // of the tokens, or
  const Passage* passage = nullptr;  // this
};

class Study {
 public:
  Study(const engine::Model& model, std::span<const Token> tokens, const Extent& extent, std::vector<Row>& rows,
        const std::function<void()>& advance)
      : model_(model), tokens_(tokens), extent_(extent), rows_(rows), advance_(advance) {
    if (extent.windows * extent.window_tokens + 1 > tokens.size()) {
      throw std::invalid_argument("the text is shorter than its windows");
    }
    const std::size_t count = (std::min)(kCalibrationTokens, tokens.size());
    calibration_ = engine::calibrate(model, tokens.last(count));
  }

  void run(const std::vector<Job>& jobs) {
    run_parallel(jobs.size(), [&](std::size_t i) { run(jobs[i]); });
  }

  void time() {
    if (extent_.timed_context == 0) return;
    for (Row& row : rows_) {
      // Formats of others are decoded before use here, which takes no time worth telling; centres and raw tokens
      // hardly change what the library's own take.
      const std::string& format = row.choice.format;
      const bool is_real = format == "f32" || format == "f16" || format.starts_with("TQ");
      const bool is_variant = !row.choice.codes_everything || format.find("not centred") != std::string::npos;
      if (is_real && !is_variant) row.attention_time = time(row.choice);
      advance_();
    }
  }

 private:
  void run(const Job& job) {
    std::vector<Token> window;
    std::span<const Token> targets;
    if (job.passage != nullptr) {
      window = bytes_as_tokens(job.passage->text);
    } else {
      const auto begin = job.window * extent_.window_tokens;
      const auto part = tokens_.subspan(begin, extent_.window_tokens);
      window.assign(part.begin(), part.end());
      targets = tokens_.subspan(begin + 1, extent_.window_tokens);
    }
    std::optional<engine::Rows> reference;
    for (Row& row : rows_) {
      const auto shape = model_.attention_shape();
      const auto cache = engine::make_stressed(job.stress, calibration_, shape, engine::make_cache(row.choice, shape));
      std::size_t bytes = 0;
      engine::Rows logits = window_logits(model_, *cache, window, &bytes);
      if (!reference) reference.emplace(std::move(logits));  // the first row is f32
      const engine::Rows& found = &row == rows_.data() ? *reference : logits;
      const std::lock_guard lock(mutex_);
      if (job.passage != nullptr) {
        row.recall[job.passage->text.size()] += count_recalled(*job.passage, found);
      } else {
        add(job, compare(*reference, found, targets), bytes, row);
      }
      advance_();
    }
  }

  void add(const Job& job, const Prediction& prediction, std::size_t bytes, Row& row) const {
    if (job.stress != Stress::none) {
      row.stressed[job.stress] += prediction;
      return;
    }
    row.prediction += prediction;
    if (job.window < extent_.stress_windows) row.same_windows += prediction;
    const auto shape = model_.attention_shape();
    const std::size_t coordinates = extent_.window_tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim;
    row.cache_bytes = static_cast<double>(bytes);
    row.bits = 8 * row.cache_bytes / static_cast<double>(coordinates);
  }

  // The median of the last tokens before the context is full.
  double time(CacheChoice choice) const {
    choice.codes_everything = false;
    engine::TimedCache cache(engine::make_cache(choice, model_.attention_shape()), 1);
    const std::size_t sequence = cache.create(), context = (std::min)(extent_.timed_context, tokens_.size());
    const std::size_t steps = (std::min)(kTimedSteps, context / 2);
    const engine::SequenceStep prompt{sequence, tokens_.first(context - steps), false};
    static_cast<void>(model_.forward(cache, {&prompt, 1}));
    for (std::size_t i = context - steps; i < context; ++i) {
      const engine::SequenceStep step{sequence, tokens_.subspan(i, 1), false};
      static_cast<void>(model_.forward(cache, {&step, 1}));
    }
    std::vector<double> seconds = cache.seconds();
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle;
  }

  const engine::Model& model_;
  std::span<const Token> tokens_;
  const Extent& extent_;
  std::vector<Row>& rows_;
  const std::function<void()>& advance_;
  engine::Calibration calibration_;
  std::mutex mutex_;
};

}  // namespace

Recall Row::whole_recall() const {
  Recall sum;
  for (const auto& [length, part] : recall) sum += part;
  return sum;
}

std::vector<Row> standard_rows() {
  std::vector<Row> rows;
  for (const char* format : {"f32", "f16", "q8_0", "q4_0", "q4_0, rotated", "KIVI-4", "KIVI-2", "plain 3", "TQ8", "TQ4",
                             "TQ3", "TQ2", "TQ4, not centred"}) {
    rows.push_back(coded_row(format));
  }
  for (const char* format : {"q4_0, rotated", "TQ4", "TQ3"}) rows.push_back(window_row(format, 0));
  rows.push_back(window_row("TQ3", kFirstTokens));
  return rows;
}

std::vector<Row> ablation_rows() {
  std::vector<Row> rows;
  for (const char* format :
       {"f32", "TQ8", "TQ4 keys", "TQ4 values", "TQ3 keys", "TQ3 values", "TQ2 keys", "TQ2 values"}) {
    rows.push_back(coded_row(format));
  }
  return rows;
}

std::size_t study_steps(const Extent& extent, std::size_t rows) {
  const std::size_t stresses = std::size(engine::kStresses) - 1;
  const std::size_t texts = extent.windows + stresses * extent.stress_windows +
                            extent.passage_lengths.size() * extent.passages + (extent.timed_context > 0 ? 1 : 0);
  return texts * rows;
}

void measure(const engine::Model& model, std::span<const Token> tokens, std::string_view text, const Extent& extent,
             std::vector<Row>& rows, const std::function<void()>& advance) {
  Study study(model, tokens, extent, rows, advance);
  std::vector<Passage> passages;
  for (const std::size_t length : extent.passage_lengths) {
    for (Passage& passage : make_passages(text, length, extent.passages, length)) {
      passages.push_back(std::move(passage));
    }
  }
  // Long ones first, so that no core waits long for another at the end.
  std::stable_sort(passages.begin(), passages.end(),
                   [](const Passage& a, const Passage& b) { return a.text.size() > b.text.size(); });
  std::vector<Job> jobs;
  for (const Passage& passage : passages) jobs.push_back({Stress::none, 0, &passage});
  for (const Stress stress : engine::kStresses) {
    const std::size_t windows = stress == Stress::none ? extent.windows : extent.stress_windows;
    for (std::size_t i = 0; i < windows; ++i) jobs.push_back({stress, i, nullptr});
  }
  study.run(jobs);
  study.time();
}

}  // namespace demo
