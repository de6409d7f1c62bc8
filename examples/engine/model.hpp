// The forward pass: embedding, layers of attention and MLP, logits.
#pragma once

#include "config.hpp"
#include "kv_cache.hpp"
#include "product.hpp"
#include "weights.hpp"

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace engine {

using Token = std::uint32_t;

/// New tokens of one sequence; they follow those that the cache has.
struct SequenceStep {
  std::size_t sequence = 0;
  std::span<const Token> tokens{};
  bool wants_all_logits = false;  // else only those of the last token
};

class Model {
 public:
  /// Reads a Hugging Face checkpoint folder. Throws turboquant_eval::FileError.
  explicit Model(const std::filesystem::path& folder);
  Model(const ModelConfig& config, Weights weights);

  const ModelConfig& config() const { return config_; }
  AttentionShape attention_shape() const;

  /// Runs all steps as one batch, one call of the cache per layer. Logits [rows][vocabulary]: for each step in turn
  /// those of all its tokens or of its last. Throws std::invalid_argument for a token beyond the vocabulary.
  Rows forward(KvCache& cache, std::span<const SequenceStep> steps) const;

 private:
  struct Batch;
  void attend(std::size_t layer, KvCache& cache, Batch& batch) const;
  void feed_forward(const LayerWeights& layer, Batch& batch) const;
  Rows logits(const Rows& hidden, std::span<const SequenceStep> steps) const;

  ModelConfig config_;
  Weights weights_;
  std::vector<double> frequencies_;  // of rotary positions, [head_dim / 2]
};

}  // namespace engine
