// Rows from a model, and the searches behind what fits.
#include "candidate.hpp"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

namespace turboquant_plan {
namespace {

// The largest n in [low, high] that fits, given that all below one that fits do too; low - 1: none.
template <class Fits>
std::uint64_t largest(std::uint64_t low, std::uint64_t high, Fits fits) {
  std::uint64_t none = high + 1;
  while (low < none) {
    const std::uint64_t middle = low + (none - low) / 2;
    if (fits(middle)) {
      low = middle + 1;
    } else {
      none = middle;
    }
  }
  return low - 1;
}

}  // namespace

std::uint64_t Candidate::bytes(const Load& load) const {
  return is_f16 ? f16_bytes(config.layers, load) : footprint(config, load).bytes();
}

std::uint64_t Candidate::needed(const Load& load) const {
  return is_f16 ? f16_bytes(config.layers, load) : slab_bytes(config, load);
}

std::vector<Candidate> candidates(const Model& model, const turboquant::CacheConfig& settings, std::uint8_t center_bits,
                                  const std::string& plan) {
  std::vector<Candidate> rows;
  const auto add = [&](std::string name, std::string_view text, bool is_f16) {
    Candidate row{std::move(name), settings, is_f16};
    row.config.layers = layers_of(model, text, center_bits);
    // The plan's own check knows nothing of the settings.
    constexpr std::size_t kFormats = 4;
    if (const std::string why = turboquant::why_invalid(row.config, kFormats); !why.empty()) throw PlanError(why);
    rows.push_back(std::move(row));
  };
  add("f16", "8", true);
  for (const char* bits : {"8", "4", "3", "2"}) add(std::string("TQ") + bits, bits, false);
  add("conservative", "conservative", false);
  if (!plan.empty()) add("plan", plan, false);
  return rows;
}

std::uint64_t longest_context(const Candidate& candidate, Load load, std::uint64_t budget) {
  const std::uint64_t least = (std::max)(load.shared_tokens, std::uint64_t{1});
  const std::uint64_t longest = largest(least, kMostTokens, [&](std::uint64_t tokens) {
    load.tokens = tokens;
    return candidate.needed(load) <= budget;
  });
  return longest < least ? 0 : longest;
}

std::uint64_t most_sequences(const Candidate& candidate, Load load, std::uint64_t budget) {
  return largest(1, kMostSequences, [&](std::uint64_t sequences) {
    load.sequences = sequences;
    return candidate.needed(load) <= budget;
  });
}

}  // namespace turboquant_plan
