// The library's formats, measured through the real cache.
#pragma once

#include "exact_layer.hpp"
#include "layer_set.hpp"
#include "subject.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace turboquant_eval {

struct CacheSettings {
  std::size_t page_tokens = 64;
  std::uint64_t seed = 42;
};

/// What is wrong with these settings, in words; empty: nothing.
std::string why_invalid(const CacheSettings& settings);

/// A pair of codecs and how many bits a page's mean has.
struct CachedFormat {
  std::string name;
  std::size_t pair = 0;  // in the list of cached_formats.cpp
  unsigned center_bits = 8;
};

/// The rows of the table: TQ8, TQ4, TQ3 and TQ2, the same without centring, 4-bit keys with 3-bit values, and each
/// other pair of codecs under the codecs' own names, "polar3" or "polar4/scalar4" (keys/values).
std::vector<CachedFormat> cached_formats();

/// The pair called `codecs`, a name as above. Throws MeasurementError if there is none.
CachedFormat cached_format(std::string_view codecs, unsigned center_bits);

/// Appends the layer's tokens to a cache that keeps none of them raw, seals it, and reads it back. `layer` must outlive
/// the subject. Throws MeasurementError if the cache refuses a call.
Subject store(const CachedFormat& format, const LayerTensors& tensors, const ExactLayer& layer,
              const CacheSettings& settings);

}  // namespace turboquant_eval
