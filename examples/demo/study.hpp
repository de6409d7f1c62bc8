// Everything that the demo measures.
#pragma once

#include "next_token.hpp"
#include "passkey.hpp"

#include <engine/caches.hpp>
#include <engine/stress.hpp>

#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace demo {

/// How much is measured.
struct Extent {
  std::size_t window_tokens = 1024, windows = 2, stress_windows = 1;
  std::vector<std::size_t> passage_lengths;  // none: no recall, as for a model with another vocabulary
  std::size_t passages = 1;                  // of each length
  std::size_t timed_context = 2048;          // 0: no times
};

struct Row {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  std::string name;
  engine::CacheChoice choice;
  double cache_bytes = 0;  // of a window, all layers
  double bits = 0;         // the same per coordinate
  Prediction prediction;
  std::map<engine::Stress, Prediction> stressed;  // against f32 under the same stress
  Prediction same_windows;                        // without stress, on the windows of the stresses
  std::map<std::size_t, Recall> recall;           // by length
  double attention_time = kUnknown;               // of a decode step at the context, all layers, seconds

  Recall whole_recall() const;
};

/// The rows of the table, f32 first; or those that show which side an error comes from.
std::vector<Row> standard_rows();
std::vector<Row> ablation_rows();

/// Fills the rows in. `tokens`: at least windows * window_tokens + 1 of them. `text`: what passages are cut from.
/// `advance` is called, from any thread, study_steps() times.
void measure(const engine::Model& model, std::span<const engine::Token> tokens, std::string_view text,
             const Extent& extent, std::vector<Row>& rows, const std::function<void()>& advance);
std::size_t study_steps(const Extent& extent, std::size_t rows);

}  // namespace demo
