// What a cache is made of: layers, page size, what stays raw, limits; and in words why a configuration is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <turboquant/core/memory.hpp>
#include <turboquant/layout/fragment.hpp>
#include <turboquant/transform/hadamard.hpp>

namespace turboquant {

/// One layer of the model.
struct LayerShape {
  std::uint32_t kv_heads = 1;    ///< KV heads: 1 to 65536
  std::uint32_t head_dim = 128;  ///< coordinates of a key: a multiple of 16 of the form 2^k {1, 3, 5, 7, 9}, 32 to 1024
  std::uint32_t value_dim = 0;   ///< coordinates of a value, same rule; 0: head_dim
  std::uint32_t window = 0;      ///< 0: all keys; else a query at p sees keys j with p - j < window
  std::uint32_t format = 0;      ///< index into the formats of KVCache<F...>
  std::uint8_t center_bits = 8;  ///< bits per coordinate of a page's mean: 0 (not centred), 8 or 16
};

/// The longest sequence.
inline constexpr std::size_t kMostTokens = std::size_t{1} << 48;

/// A whole cache. Token counts are per sequence.
struct CacheConfig {
  /// The model's layers, from 0.
  std::vector<LayerShape> layers = std::vector<LayerShape>(1);  // not {LayerShape{}}: g++ 12 warns of that, wrongly
  std::size_t page_tokens = 64;                                 ///< tokens per page: a multiple of 16, at most 256
  std::size_t recent_tokens = 64;    ///< at least so many of the newest tokens are read raw (bf16)
  std::size_t first_tokens = 0;      ///< so many of the first tokens stay raw for ever (attention sinks)
  std::size_t rollback_tokens = 32;  ///< truncating by at most so many below the longest length leaves no trace
  std::size_t max_bytes = 0;         ///< limit for live pages and tails together (MemoryUse::slab_bytes may be more);
                                     ///< 0: none
  std::uint64_t seed = 42;           ///< of the rotation; part of the meaning of the codes
  MemorySource memory{};             ///< where slabs come from; default: aligned operator new, huge pages advised
};

/// Empty if the configuration is valid for a cache of `formats` formats, else what is wrong and what is supported.
inline std::string why_invalid(const CacheConfig& config, std::size_t formats) {
  const auto text = [](std::uint64_t n) { return std::to_string(n); };
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 40;
  if (config.layers.empty()) return "layers is empty; a cache needs at least one layer";
  if (config.page_tokens == 0 || config.page_tokens % layout::kTileTokens != 0 ||
      config.page_tokens > layout::kMaxPageTokens) {
    return "page_tokens is " + text(config.page_tokens) + "; supported are multiples of 16 from 16 to " +
           text(layout::kMaxPageTokens);
  }
  if (config.recent_tokens > kLargest) return "recent_tokens is " + text(config.recent_tokens) + "; at most 2^40";
  if (config.first_tokens > kLargest) return "first_tokens is " + text(config.first_tokens) + "; at most 2^40";
  if (config.rollback_tokens > kLargest) return "rollback_tokens is " + text(config.rollback_tokens) + "; at most 2^40";
  if ((config.memory.allocate == nullptr) != (config.memory.release == nullptr)) {
    return "memory has only one of allocate and release; give both or none";
  }
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const LayerShape& layer = config.layers[l];
    const std::string where = "layers[" + text(l) + "].";
    if (layer.kv_heads == 0 || layer.kv_heads > 65536) {
      return where + "kv_heads is " + text(layer.kv_heads) + "; supported are 1 to 65536";
    }
    if (!is_supported_dim(layer.head_dim)) return where + "head_dim: " + why_unsupported_dim(layer.head_dim);
    if (layer.value_dim != 0 && !is_supported_dim(layer.value_dim)) {
      return where + "value_dim: " + why_unsupported_dim(layer.value_dim);
    }
    if (layer.format >= formats) {
      return where + "format is " + text(layer.format) + "; this cache has " + text(formats) +
             " format(s), counted from 0";
    }
    if (layer.center_bits != 0 && layer.center_bits != 8 && layer.center_bits != 16) {
      return where + "center_bits is " + text(layer.center_bits) + "; supported are 0, 8 and 16";
    }
  }
  return {};
}

/// What a cache holds, in bytes.
struct MemoryUse {
  std::size_t page_bytes;  ///< live pages, those set aside by reserve() included
  std::size_t tail_bytes;  ///< live raw tiles, those set aside by reserve() included
  std::size_t slab_bytes;  ///< taken from the memory source for pages and tiles: live ones, free ones of the same slabs
  std::size_t table_bytes;     ///< sequence tables
  double bits_per_coordinate;  ///< of full pages: scales, centres, header and padding included; mean over all layers'
                               ///< coordinates
  std::size_t work_bytes;      ///< work space that a call has left for the next one
};

}  // namespace turboquant
