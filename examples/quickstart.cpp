// Keeps keys and values in 4 bits and attends to them there; prints the size and the error of the last output.
#include <cmath>
#include <cstdio>
#include <random>
#include <turboquant/turboquant.hpp>
#include <vector>

int main() {
  constexpr std::size_t kDim = 128, kPrompt = 1000, kTokens = 1024;
  std::vector<float> k(kTokens * kDim), v(kTokens * kDim), q(kTokens * kDim), out(kDim);
  std::mt19937 random;
  for (auto* numbers : {&k, &v, &q}) {  // an engine has its model's
    for (float& x : *numbers) x = std::normal_distribution<float>()(random);
  }

  turboquant::KVCache<turboquant::TQ4> cache({.layers = {{.kv_heads = 1, .head_dim = kDim}}});
  turboquant::BatchItem step;
  if (cache.create_sequence(step.sequence) != turboquant::Status::ok) return 1;
  for (std::size_t done = 0, count = kPrompt; done < kTokens; done += count, count = 1) {  // prompt, then singly
    step.keys = {&k[done * kDim], count, 1, kDim};
    step.values = {&v[done * kDim], count, 1, kDim};
    step.queries = {&q[(done + count - 1) * kDim], 1, 1, kDim};
    step.out = {out.data(), 1, 1, kDim};
    if (turboquant::attend(cache, 0, {&step, 1}) != turboquant::Status::ok) return 1;
  }

  double sum = 0, error = 0, energy = 0, exact[kDim] = {};
  for (std::size_t t = 0; t < kTokens; ++t) {
    double logit = 0;
    for (std::size_t i = 0; i < kDim; ++i) logit += double(k[t * kDim + i]) * double(q[(kTokens - 1) * kDim + i]);
    const double weight = std::exp(logit / std::sqrt(double(kDim)));
    sum += weight;
    for (std::size_t i = 0; i < kDim; ++i) exact[i] += weight * double(v[t * kDim + i]);
  }
  for (std::size_t i = 0; i < kDim; ++i) error += std::pow(double(out[i]) - exact[i] / sum, 2);
  for (std::size_t i = 0; i < kDim; ++i) energy += std::pow(exact[i] / sum, 2);
  const std::size_t bytes = cache.memory().page_bytes + cache.memory().tail_bytes, f16_bytes = 4 * kTokens * kDim;
  std::printf("%zu bytes (f16: %zu), output errs by %.2f %% of its energy\n", bytes, f16_bytes, 100 * error / energy);
}
