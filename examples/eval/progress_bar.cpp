// Drawing the bar.
#include "progress_bar.hpp"

#include <fmt/format.h>

#include <cstdio>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

namespace turboquant_eval {
namespace {

constexpr std::size_t kWidth = 40;

bool is_terminal() {
#if __has_include(<unistd.h>)
  return isatty(STDERR_FILENO) != 0;
#else
  return false;
#endif
}

}  // namespace

ProgressBar::ProgressBar(std::size_t steps, bool is_wanted)
    : steps_(steps), is_enabled_(is_wanted && steps > 0 && is_terminal()) {}

ProgressBar::~ProgressBar() {
  if (shown_ > 0) fmt::print(stderr, "\r{:{}}\r", "", kWidth + 10);
}

void ProgressBar::advance() {
  ++done_;
  const std::size_t permille = done_ * 1000 / steps_;
  if (!is_enabled_ || permille == shown_ || std::chrono::steady_clock::now() - start_ < std::chrono::seconds(1)) return;
  shown_ = permille;
  const std::size_t filled = kWidth * permille / 1000;
  fmt::print(stderr, "\r[{:#<{}}{:{}}] {:>3} %", "", filled, "", kWidth - filled, permille / 10);
  std::fflush(stderr);
}

}  // namespace turboquant_eval
