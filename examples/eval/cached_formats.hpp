// The library's formats, measured through the real cache.
#pragma once

#include "exact_layer.hpp"
#include "layer_set.hpp"
#include "subject.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace turboquant_eval {

struct CacheSettings {
  std::size_t page_tokens = 64;
  std::uint64_t seed = 42;
};

/// What is wrong with these settings, in words; empty: nothing.
std::string why_invalid(const CacheSettings& settings);

struct CachedFormat {
  std::string name;
  /// Appends the layer's tokens to a cache that keeps none of them raw, seals it, and reads it back.
  /// Throws MeasurementError if the cache refuses a call.
  std::function<Subject(const LayerTensors&, const ExactLayer&, const CacheSettings&)> store;
};

/// TQ8, TQ4, TQ3 and TQ2, the same without centring, and 4-bit keys with 3-bit values.
std::vector<CachedFormat> cached_formats();

}  // namespace turboquant_eval
