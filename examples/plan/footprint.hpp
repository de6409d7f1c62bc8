// Bytes of a cache that holds so many tokens, as its memory() reports them.
#pragma once

#include <turboquant/cache/config.hpp>

#include <cstdint>
#include <span>

namespace turboquant_plan {

/// Equally long sequences that were forked from one of `shared_tokens` tokens. shared_tokens <= tokens.
struct Load {
  std::uint64_t tokens = 0, sequences = 1, shared_tokens = 0;
};

/// Sums that do not fit 64 bits stay at this value.
inline constexpr std::uint64_t kTooMany = ~std::uint64_t{0};

/// MemoryUse::page_bytes and tail_bytes of a KVCache<TQ8, TQ4, TQ3, TQ2>, whatever calls brought the tokens (nothing
/// reserved, sealed or erased).
struct Footprint {
  std::uint64_t page_bytes = 0, tail_bytes = 0;

  std::uint64_t bytes() const { return tail_bytes > kTooMany - page_bytes ? kTooMany : page_bytes + tail_bytes; }
};
Footprint footprint(const turboquant::CacheConfig& config, const Load& load);

/// What the cache takes from its MemorySource, in slabs, to get there with one token per sequence and step: new blocks
/// are taken before old ones are let go, and slabs are of one block size each. (The step after a fork may hold one
/// more tile per layer.)
std::uint64_t slab_bytes(const turboquant::CacheConfig& config, const Load& load);

/// Two bytes per coordinate that a query can see, shared tokens once: a layer with a window holds min(tokens, window).
std::uint64_t f16_bytes(std::span<const turboquant::LayerShape> layers, const Load& load);

}  // namespace turboquant_plan
