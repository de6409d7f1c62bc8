// libFuzzer target for the container: the input chooses the configuration, the operations and their arguments, and
// every step is held against the plain model of tests/cache/history.hpp.
#include <turboquant/turboquant.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cache/history.hpp"
#include "fuzz/target.hpp"

namespace {

/// Decisions are the input's, numbers are not: what a step appends depends on how many steps came before.
class InputDice final : public tests::Dice {
 public:
  InputDice(const std::uint8_t* data, std::size_t size) : numbers_(data, size) {}

  bool empty() const { return numbers_.left() == 0; }
  std::size_t roll(std::size_t sides) override { return numbers_.below(sides); }
  std::uint64_t fresh_stream() override { return ++streams_; }

 private:
  fuzz::Numbers numbers_;
  std::uint64_t streams_ = 0;
};

constexpr std::size_t kMostSteps = 60;

}  // namespace

/// Random bytes: short histories and long ones, in several configurations.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  fuzz::Seeds seeds(*argc, *argv);
  for (std::uint64_t seed = 0; seeds && seed < 60; ++seed) {
    std::string bytes(1, static_cast<char>(seed));
    for (std::uint64_t i = 0; i < 4 + 5 * seed; ++i) bytes += static_cast<char>(oracle::hash(seed, 1, i));
    seeds.write(bytes);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string failure = tests::first_failure([&](const auto& stop) {
    tests::Counts counts;
    tests::History history(data[0], counts);
    InputDice dice(data + 1, size - 1);
    for (std::size_t step = 0; step < kMostSteps && !dice.empty(); ++step) {
      history.take(dice);
      if (stop()) return;
    }
    history.end();
  });
  fuzz::require(failure.empty(), failure);
  return 0;
}
