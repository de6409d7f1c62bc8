// The forward pass, layer by layer, for a whole batch.
#include "model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace engine {
namespace {

// x[i] = x[i] / rms(x) * weight[i]
void normalize(const float* in, const std::vector<float>& weight, float epsilon, float* out) {
  float squares = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) squares += in[i] * in[i];
  const float factor = 1 / std::sqrt(squares / static_cast<float>(weight.size()) + epsilon);
  for (std::size_t i = 0; i < weight.size(); ++i) out[i] = in[i] * factor * weight[i];
}

Rows normalized(const Rows& rows, const std::vector<float>& weight, float epsilon) {
  Rows result(rows.count(), rows.width());
  for (std::size_t r = 0; r < rows.count(); ++r) normalize(rows[r], weight, epsilon, result[r]);
  return result;
}

void normalize_heads(Rows& rows, const std::vector<float>& weight, float epsilon) {
  if (weight.empty()) return;
  for (std::size_t r = 0; r < rows.count(); ++r) {
    for (std::size_t i = 0; i < rows.width(); i += weight.size()) {
      normalize(rows[r] + i, weight, epsilon, rows[r] + i);
    }
  }
}

Rows apply(const Linear& linear, const Rows& in) {
  Rows out(in.count(), linear.outputs);
  multiply(linear.transposed.data(), in, out);
  if (linear.bias.empty()) return out;
  for (std::size_t r = 0; r < out.count(); ++r) {
    for (std::size_t i = 0; i < linear.outputs; ++i) out[r][i] += linear.bias[i];
  }
  return out;
}

// Of every head, coordinates i and i + head_dim / 2 turn by the angle of their row.
void rotate(const Rows& cosines, const Rows& sines, Rows& rows) {
  const std::size_t half = cosines.width();
  for (std::size_t r = 0; r < rows.count(); ++r) {
    for (float* x = rows[r]; x != rows[r] + rows.width(); x += 2 * half) {
      for (std::size_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[r][i] - b * sines[r][i];
        x[i + half] = b * cosines[r][i] + a * sines[r][i];
      }
    }
  }
}

void add(const Rows& change, Rows& rows) {
  for (std::size_t r = 0; r < rows.count(); ++r) {
    for (std::size_t i = 0; i < rows.width(); ++i) rows[r][i] += change[r][i];
  }
}

}  // namespace

struct Model::Batch {
  Rows hidden;                       // [tokens of all steps][hidden]
  Rows cosines, sines;               // of the rotary angles, [tokens][head_dim / 2]
  std::vector<AttentionPart> parts;  // one per step; pointers are set layer by layer
};

Model::Model(const std::filesystem::path& folder) : Model(read_config(folder / "config.json"), {}) {
  weights_ = read_weights(folder, config_);
}

Model::Model(const ModelConfig& config, Weights weights) : config_(config), weights_(std::move(weights)) {
  for (std::size_t i = 0; i < config_.head_dim / 2; ++i) {
    const double exponent = 2 * static_cast<double>(i) / static_cast<double>(config_.head_dim);
    frequencies_.push_back(std::pow(config_.rope_theta, -exponent));
  }
}

AttentionShape Model::attention_shape() const {
  return {config_.layers, config_.heads, config_.kv_heads, config_.head_dim};
}

Rows Model::forward(KvCache& cache, std::span<const SequenceStep> steps) const {
  std::size_t count = 0;
  for (const SequenceStep& step : steps) count += step.tokens.size();
  const std::size_t half = config_.head_dim / 2;
  Batch batch{Rows(count, config_.hidden), Rows(count, half), Rows(count, half), {}};
  std::size_t row = 0;
  for (const SequenceStep& step : steps) {
    const std::size_t begin = cache.length(step.sequence);
    for (std::size_t t = 0; t < step.tokens.size(); ++t, ++row) {
      const std::size_t token = step.tokens[t];
      if (token >= config_.vocabulary) {
        throw std::invalid_argument(fmt::format("token {} of a vocabulary of {}", token, config_.vocabulary));
      }
      std::copy_n(weights_.embedding.data() + token * config_.hidden, config_.hidden, batch.hidden[row]);
      for (std::size_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(begin + t) * frequencies_[i];
        batch.cosines[row][i] = static_cast<float>(std::cos(angle));
        batch.sines[row][i] = static_cast<float>(std::sin(angle));
      }
    }
    batch.parts.push_back({step.sequence, step.tokens.size()});
  }
  for (std::size_t layer = 0; layer < config_.layers; ++layer) {
    attend(layer, cache, batch);
    feed_forward(weights_.layers[layer], batch);
  }
  return logits(batch.hidden, steps);
}

void Model::attend(std::size_t layer, KvCache& cache, Batch& batch) const {
  const LayerWeights& weights = weights_.layers[layer];
  const Rows in = normalized(batch.hidden, weights.attention_norm, config_.norm_epsilon);
  Rows queries = apply(weights.query, in), keys = apply(weights.key, in);
  const Rows values = apply(weights.value, in);
  normalize_heads(queries, weights.query_norm, config_.norm_epsilon);
  normalize_heads(keys, weights.key_norm, config_.norm_epsilon);
  rotate(batch.cosines, batch.sines, queries);
  rotate(batch.cosines, batch.sines, keys);
  Rows out(queries.count(), queries.width());
  std::size_t row = 0;
  for (AttentionPart& part : batch.parts) {
    part.queries = queries[row];
    part.keys = keys[row];
    part.values = values[row];
    part.out = out[row];
    row += part.tokens;
  }
  cache.attend(layer, batch.parts);
  add(apply(weights.output, out), batch.hidden);
}

void Model::feed_forward(const LayerWeights& weights, Batch& batch) const {
  const Rows in = normalized(batch.hidden, weights.mlp_norm, config_.norm_epsilon);
  Rows gate = apply(weights.gate, in);
  const Rows up = apply(weights.up, in);
  for (std::size_t r = 0; r < gate.count(); ++r) {
    for (std::size_t i = 0; i < gate.width(); ++i) gate[r][i] *= up[r][i] / (1 + std::exp(-gate[r][i]));
  }
  add(apply(weights.down, gate), batch.hidden);
}

Rows Model::logits(const Rows& hidden, std::span<const SequenceStep> steps) const {
  std::size_t count = 0;
  for (const SequenceStep& step : steps) count += step.wants_all_logits ? step.tokens.size() : !step.tokens.empty();
  Rows chosen(count, config_.hidden);
  std::size_t from = 0, to = 0;
  for (const SequenceStep& step : steps) {
    const std::size_t wanted = step.wants_all_logits ? step.tokens.size() : !step.tokens.empty();
    from += step.tokens.size();
    for (std::size_t i = from - wanted; i < from; ++i) {
      normalize(hidden[i], weights_.final_norm, config_.norm_epsilon, chosen[to++]);
    }
  }
  return apply(weights_.head, chosen);
}

}  // namespace engine
