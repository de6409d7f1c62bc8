// Sampling by inversion.
#include "sampler.hpp"

#include <turboquant/core/random.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace engine {

Token sample(const float* logits, std::size_t vocabulary, const Sampling& sampling, std::uint64_t stream,
             std::size_t position) {
  const float* const end = logits + vocabulary;
  const float* const best = std::max_element(logits, end);
  if (!(sampling.temperature > 0)) return static_cast<Token>(best - logits);
  float least = -std::numeric_limits<float>::infinity();  // logit of the last token to choose among
  if (sampling.top > 0 && sampling.top < vocabulary) {
    std::vector<float> sorted(logits, end);
    const auto last = sorted.begin() + static_cast<std::ptrdiff_t>(sampling.top - 1);
    std::nth_element(sorted.begin(), last, sorted.end(), std::greater<>());
    least = *last;
  }
  const auto weight = [&](float logit) {
    return logit < least ? 0.0 : std::exp(static_cast<double>((logit - *best) / sampling.temperature));
  };
  double sum = 0;
  for (const float* logit = logits; logit != end; ++logit) sum += weight(*logit);
  const double uniform = static_cast<double>(turboquant::random_bits(sampling.seed, stream, position) >> 11) * 0x1p-53;
  double left = uniform * sum;
  for (const float* logit = logits; logit != end; ++logit) {
    left -= weight(*logit);
    if (left < 0) return static_cast<Token>(logit - logits);
  }
  return static_cast<Token>(best - logits);  // what rounding has left over
}

}  // namespace engine
