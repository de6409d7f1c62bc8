// A bar on standard error for work that takes longer than a second.
#pragma once

#include <chrono>
#include <cstddef>

namespace turboquant_eval {

class ProgressBar {
 public:
  /// `steps`: calls of advance() until the work is done. Silent if not `is_wanted` or if standard error is no terminal.
  ProgressBar(std::size_t steps, bool is_wanted);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();  // erases the bar

  void advance();

 private:
  std::size_t steps_, done_ = 0, shown_ = 0;  // shown_: per mille last drawn
  bool is_enabled_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace turboquant_eval
