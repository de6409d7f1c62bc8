// The caches to choose from, by name.
#pragma once

#include "kv_cache.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

struct CacheChoice {
  std::string format = "TQ4";                        // one of cache_formats()
  std::size_t recent_tokens = 64, first_tokens = 0;  // raw, at least so many; f32 and f16 ignore them
  /// For measuring accuracy: every token is read as codes but the first ones, a query's own token included. Such a
  /// cache takes a text in one step and keeps nothing of it.
  bool codes_everything = false;
};

/// f32, f16; q8_0, q4_0 (ggml), "q4_0, rotated", "KIVI-4", "KIVI-2", and "plain 4", "plain 3" and "plain 2": rotated
/// Lloyd-Max levels as in the TurboQuant paper, all of which take a text in one step; TQ8, TQ4, TQ3, TQ2, "TQ4, not
/// centred" and so on, and "TQ4 keys", "TQ4 values" and so on, where the other side is PolarQuant<8>.
std::vector<std::string> cache_formats();

/// Throws std::invalid_argument for an unknown format or a shape or numbers that it does not support.
std::unique_ptr<KvCache> make_cache(const CacheChoice& choice, const AttentionShape& shape);

}  // namespace engine
