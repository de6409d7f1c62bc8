// The rows of a plan: f16, the formats and the mixed plans, and what fits into a memory with each.
#pragma once

#include "footprint.hpp"
#include "model.hpp"

#include <turboquant/cache/config.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace turboquant_plan {

inline constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 30, kMostSequences = std::uint64_t{1} << 20;

struct Candidate {
  std::string name;
  turboquant::CacheConfig config;
  bool is_f16 = false;

  /// Pages and raw tails, or the numbers of f16.
  std::uint64_t bytes(const Load& load) const;
  /// The same with all that is needed on the way there; monotone in tokens and in sequences.
  std::uint64_t needed(const Load& load) const;
};

/// f16, TQ8, TQ4, TQ3, TQ2, "conservative" and, if it is not empty, `plan` (as in turboquant_eval::layer_plan).
/// `settings.layers` does not matter. Throws PlanError.
std::vector<Candidate> candidates(const Model& model, const turboquant::CacheConfig& settings, std::uint8_t center_bits,
                                  const std::string& plan);

/// The most tokens for which `budget` bytes suffice, up to kMostTokens; 0: not even load.shared_tokens or 1 fit.
std::uint64_t longest_context(const Candidate& candidate, Load load, std::uint64_t budget);

/// The most sequences of load.tokens for which `budget` bytes suffice, up to kMostSequences.
std::uint64_t most_sequences(const Candidate& candidate, Load load, std::uint64_t budget);

}  // namespace turboquant_plan
