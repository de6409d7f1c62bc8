// Log-softmax, in double, and sums.
#include "next_token.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace demo {
namespace {

void log_softmax(const float* logits, std::vector<double>& out) {
  const double largest = static_cast<double>(*std::max_element(logits, logits + out.size()));
  double sum = 0;
  for (std::size_t i = 0; i < out.size(); ++i) sum += std::exp(static_cast<double>(logits[i]) - largest);
  const double log_sum = largest + std::log(sum);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(logits[i]) - log_sum;
}

}  // namespace

Prediction& Prediction::operator+=(const Prediction& other) {
  tokens += other.tokens;
  bits += other.bits;
  kl += other.kl;
  same += other.same;
  return *this;
}

engine::Rows window_logits(const engine::Model& model, engine::KvCache& cache, std::span<const engine::Token> window,
                           std::size_t* cache_bytes) {
  const engine::SequenceStep step{cache.create(), window, true};
  engine::Rows logits = model.forward(cache, {&step, 1});
  if (cache_bytes != nullptr) *cache_bytes = cache.bytes();
  cache.release(step.sequence);
  return logits;
}

Prediction compare(const engine::Rows& reference, const engine::Rows& logits, std::span<const engine::Token> targets) {
  Prediction result;
  std::vector<double> exact(logits.width()), found(logits.width());
  for (std::size_t t = 0; t < targets.size(); ++t) {
    log_softmax(reference[t], exact);
    log_softmax(logits[t], found);
    result.bits -= found[targets[t]] / std::numbers::ln2;
    for (std::size_t i = 0; i < exact.size(); ++i) result.kl += std::exp(exact[i]) * (exact[i] - found[i]);
    const std::size_t width = logits.width();
    result.same += most_likely(reference[t], width) == most_likely(logits[t], width) ? 1 : 0;
  }
  result.tokens = targets.size();
  return result;
}

std::size_t most_likely(const float* logits, std::size_t count) {
  return static_cast<std::size_t>(std::max_element(logits, logits + count) - logits);
}

}  // namespace demo
