// Changing queries and keys on their way to the cache.
#include "stress.hpp"

#include "plain_cache.hpp"

#include <turboquant/core/dtype.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace engine {
namespace {

constexpr float kOffsetDeviations = 20, kOutlierFactor = 16, kSinkLengths = 20;
constexpr std::size_t kOutlierChannels[] = {5, 13, 19, 28}, kSinkChannels[] = {7, 22};  // of every head, 32 at least

// Exact attention that remembers what it saw.
class Recorder final : public CacheDecorator {
 public:
  Recorder(const AttentionShape& shape, Calibration& calibration)
      : CacheDecorator(make_f32_cache(shape)), shape_(shape), calibration_(calibration) {
    calibration_.layers.resize(shape.layers);
  }

  void attend(std::size_t index, std::span<const AttentionPart> parts) override {
    Calibration::Layer& layer = calibration_.layers[index];
    const AttentionPart& part = parts.front();
    const std::size_t rows = part.tokens * shape_.kv_heads;
    double sum = 0, squares = 0;
    for (const float x : std::span(part.keys, rows * shape_.head_dim)) {
      sum += static_cast<double>(x);
      squares += static_cast<double>(x) * static_cast<double>(x);
    }
    const double count = static_cast<double>(rows * shape_.head_dim), mean = sum / count;
    layer.deviation = static_cast<float>(std::sqrt((std::max)(squares / count - mean * mean, 0.0)));
    layer.length = static_cast<float>(std::sqrt(squares / static_cast<double>(rows)));
    CacheDecorator::attend(index, parts);
  }

 private:
  AttentionShape shape_;
  Calibration& calibration_;
};

class StressedCache final : public CacheDecorator {
 public:
  StressedCache(Stress stress, const Calibration& calibration, const AttentionShape& shape,
                std::unique_ptr<KvCache> inner)
      : CacheDecorator(std::move(inner)), stress_(stress), calibration_(calibration), shape_(shape) {}

  std::size_t fork(std::size_t sequence, std::size_t length) override {
    return CacheDecorator::fork(sequence, length + sinks_before(length));
  }
  void truncate(std::size_t sequence, std::size_t length) override {
    CacheDecorator::truncate(sequence, length + sinks_before(length));
  }
  std::size_t length(std::size_t sequence) const override {
    const std::size_t length = CacheDecorator::length(sequence);
    return length - sinks_before(length);
  }

  void attend(std::size_t layer, std::span<const AttentionPart> parts) override {
    std::vector<Rows> copies(parts.size());
    std::vector<AttentionPart> changed(parts.begin(), parts.end());
    for (std::size_t i = 0; i < parts.size(); ++i) copies[i] = change(calibration_.layers[layer], changed[i]);
    CacheDecorator::attend(layer, changed);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::size_t size = parts[i].tokens * shape_.heads * shape_.head_dim;
      std::copy(copies[i].out.end() - static_cast<std::ptrdiff_t>(size), copies[i].out.end(), parts[i].out);
    }
  }

 private:
  struct Rows {
    std::vector<float> queries, keys, values, out;
  };

  // A sequence of some tokens has a sink before them.
  std::size_t sinks_before(std::size_t length) const { return stress_ == Stress::sink_token && length > 0 ? 1 : 0; }

  // Makes `part` one of changed rows, which are returned.
  Rows change(const Calibration::Layer& layer, AttentionPart& part) const {
    const std::size_t width = shape_.heads * shape_.head_dim, kv_width = shape_.kv_heads * shape_.head_dim;
    Rows rows{{part.queries, part.queries + part.tokens * width},
              {part.keys, part.keys + part.tokens * kv_width},
              {part.values, part.values + part.tokens * kv_width},
              {}};
    if (stress_ == Stress::key_offset) {
      for (float& x : rows.keys) {
        x = turboquant::to_float(turboquant::to_bfloat16(x + kOffsetDeviations * layer.deviation));
      }
    } else if (stress_ == Stress::outlier_channels) {
      for (const std::size_t channel : kOutlierChannels) {
        scale(channel, 1 / kOutlierFactor, rows.queries);
        scale(channel, kOutlierFactor, rows.keys);
      }
    } else if (stress_ == Stress::sink_token) {
      part.first_key = 1;
      if (CacheDecorator::length(part.sequence) == 0) {
        rows.queries.insert(rows.queries.begin(), width, 0.0F);
        rows.values.insert(rows.values.begin(), kv_width, 0.0F);
        rows.keys.insert(rows.keys.begin(), kv_width, 0.0F);
        for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
          for (const std::size_t channel : kSinkChannels) {
            rows.keys[head * shape_.head_dim + channel] = kSinkLengths * std::sqrt(0.5F) * layer.length;
          }
        }
        ++part.tokens;
      }
    }
    rows.out.resize(part.tokens * width);
    part.queries = rows.queries.data();
    part.keys = rows.keys.data();
    part.values = rows.values.data();
    part.out = rows.out.data();
    return rows;
  }

  // One channel of every head.
  void scale(std::size_t channel, float factor, std::vector<float>& rows) const {
    for (std::size_t i = channel; i < rows.size(); i += shape_.head_dim) rows[i] *= factor;
  }

  Stress stress_;
  const Calibration& calibration_;
  AttentionShape shape_;
};

}  // namespace

std::string_view to_string(Stress stress) {
  switch (stress) {
    case Stress::none:
      return "none";
    case Stress::key_offset:
      return "key offset";
    case Stress::outlier_channels:
      return "outlier channels";
    case Stress::sink_token:
      return "sink token";
  }
  return "";
}

Calibration calibrate(const Model& model, std::span<const Token> text) {
  Calibration calibration;
  Recorder recorder(model.attention_shape(), calibration);
  const SequenceStep step{recorder.create(), text, false};
  static_cast<void>(model.forward(recorder, {&step, 1}));
  return calibration;
}

std::unique_ptr<KvCache> make_stressed(Stress stress, const Calibration& calibration, const AttentionShape& shape,
                                       std::unique_ptr<KvCache> cache) {
  if (stress == Stress::none) return cache;
  return std::make_unique<StressedCache>(stress, calibration, shape, std::move(cache));
}

}  // namespace engine
