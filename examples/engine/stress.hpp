// The same model with keys as large models have them. Each change keeps what exact attention computes, so that only
// caches that code keys notice.
#pragma once

#include "cache_decorator.hpp"
#include "model.hpp"

#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace engine {

enum class Stress {
  none,
  key_offset,        // 20 deviations of the keys on every coordinate of every key, which adds the same to all logits of
                     // a query; keys are then rounded to bf16, before any cache sees them
  outlier_channels,  // four channels of every head: keys 16 times as large, queries as small
  sink_token,  // before the first token a key of 20 times the usual length, in two channels, with a value of zero;
               // no query attends to it
};
constexpr Stress kStresses[] = {Stress::none, Stress::key_offset, Stress::outlier_channels, Stress::sink_token};
std::string_view to_string(Stress stress);

/// What a model's keys are like, on a text.
struct Calibration {
  struct Layer {
    float deviation = 0;  // of all coordinates of all keys
    float length = 0;     // root mean square of the keys' lengths
  };
  std::vector<Layer> layers;
};

Calibration calibrate(const Model& model, std::span<const Token> text);

/// The cache behind the change. Lengths are those of the text.
std::unique_ptr<KvCache> make_stressed(Stress stress, const Calibration& calibration, const AttentionShape& shape,
                                       std::unique_ptr<KvCache> cache);

}  // namespace engine
