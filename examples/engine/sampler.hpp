// Choosing the next token.
#pragma once

#include "model.hpp"

#include <cstddef>
#include <cstdint>

namespace engine {

struct Sampling {
  float temperature = 0;  // 0: the most likely token
  std::size_t top = 0;    // only among so many of the most likely; 0: all
  std::uint64_t seed = 0;
};

/// The token for `position` of a sequence. Its random number is a function of seed, stream and position alone, so that
/// the same logits give the same token however they came about: in a batch, one by one, or to verify a draft.
Token sample(const float* logits, std::size_t vocabulary, const Sampling& sampling, std::uint64_t stream,
             std::size_t position);

}  // namespace engine
