// Long random histories of several sequences in one pool, each step held against a plain model of the container. A
// history that fails is shrunk to a few steps before it is printed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "cache/history.hpp"
#include "cache/sanitized.hpp"

namespace {

using namespace tests;
using Steps = std::vector<std::size_t>;

/// Decisions and data are a function of (seed, step): a step means the same whatever came before it.
class HashDice final : public Dice {
 public:
  HashDice(std::uint64_t seed, std::size_t step) : stream_((seed << 32) + (step << 8)) {}
  std::size_t roll(std::size_t sides) override {
    return static_cast<std::size_t>(oracle::hash(stream_, 4711, ++count_) % sides);
  }
  std::uint64_t fresh_stream() override { return stream_ + ++count_; }

 private:
  std::uint64_t stream_, count_ = 0;
};

/// What the first failing check of the history said; empty: none failed.
std::string failure_of(std::uint64_t seed, const Steps& steps, Counts& counts) {
  return first_failure([&](const auto& stop) {
    History history(seed, counts);
    for (const std::size_t step : steps) {
      HashDice dice(seed, step);
      history.take(dice);
      if (stop()) return;
    }
    history.end();
  });
}

/// Leaves out steps as long as the rest still fails: halves first, single steps last.
Steps shrink(Steps steps, const std::function<bool(const Steps&)>& fails) {
  for (std::size_t piece = steps.size() / 2; piece > 0; piece = piece > 1 ? piece / 2 : 0) {
    for (std::size_t begin = 0; begin < steps.size();) {
      Steps fewer = steps;
      const auto first = fewer.begin() + static_cast<std::ptrdiff_t>(begin);
      fewer.erase(first, first + static_cast<std::ptrdiff_t>(std::min(piece, fewer.size() - begin)));
      if (fails(fewer)) {
        steps = fewer;
      } else {
        begin += piece;
      }
    }
  }
  return steps;
}

TEST(RandomOperations, ShrinkingKeepsWhatMatters) {
  Steps steps(100);
  std::iota(steps.begin(), steps.end(), 0U);
  const Steps culprits = shrink(steps, [](const Steps& some) {
    return std::binary_search(some.begin(), some.end(), 17U) && std::binary_search(some.begin(), some.end(), 63U);
  });
  EXPECT_EQ(culprits, (Steps{17, 63}));
}

TEST(RandomOperations, FollowThePlainModel) {
  constexpr std::size_t kOperations = kSanitized ? 6000 : 30000;
  constexpr std::size_t kLength = 120;
  Counts counts;
  Steps steps(kLength);
  std::iota(steps.begin(), steps.end(), 0U);
  for (std::uint64_t seed = 0; counts.operations < kOperations; ++seed) {
    const std::string failure = failure_of(seed, steps, counts);
    if (failure.empty()) continue;
    Counts ignored;
    const Steps few = shrink(steps, [&](const Steps& some) { return !failure_of(seed, some, ignored).empty(); });
    FAIL() << "seed " << seed << ": " << failure << "\nsteps " << testing::PrintToString(few)
           << " are enough: " << failure_of(seed, few, ignored);
  }
  // Every kind of step was taken many times.
  for (const std::size_t count :
       {counts.deep, counts.shallow, counts.erased, counts.traceless, counts.branches, counts.forks, counts.seals,
        counts.files, counts.moves, counts.reserves, counts.plans, counts.exhausted, counts.behind, counts.firm,
        counts.echoed, counts.erased - counts.traceless})
    EXPECT_GT(count, kOperations / 500);
}

}  // namespace
