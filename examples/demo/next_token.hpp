// How well a model with a given cache predicts a text, beside the same model with the f32 cache.
#pragma once

#include <engine/model.hpp>

#include <cstddef>
#include <span>

namespace demo {

/// Sums over predicted tokens.
struct Prediction {
  std::size_t tokens = 0;
  double bits = 0;       // -log2 of the probability of the true token
  double kl = 0;         // KL(reference || this), nats
  std::size_t same = 0;  // tokens whose most likely successor is the reference's

  Prediction& operator+=(const Prediction& other);
  double bits_per_token() const { return bits / static_cast<double>(tokens); }
  double mean_kl() const { return kl / static_cast<double>(tokens); }
  double agreement() const { return static_cast<double>(same) / static_cast<double>(tokens); }
};

/// Logits of a window's tokens: row t predicts token t + 1. The cache holds nothing afterwards.
engine::Rows window_logits(const engine::Model& model, engine::KvCache& cache, std::span<const engine::Token> window,
                           std::size_t* cache_bytes = nullptr);

/// `targets`: the tokens that follow; as many as there are logits.
Prediction compare(const engine::Rows& reference, const engine::Rows& logits, std::span<const engine::Token> targets);

/// Index of the largest, the first of equal ones.
std::size_t most_likely(const float* logits, std::size_t count);

}  // namespace demo
