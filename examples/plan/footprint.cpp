// Counts of pages and raw tiles, by the rules in docs/engines.md.
#include "footprint.hpp"

#include <eval/layer_plan.hpp>

#include <turboquant/layout/page.hpp>

#include <algorithm>
#include <vector>

namespace turboquant_plan {
namespace {

using std::uint64_t;
using turboquant::CacheConfig;
using turboquant::LayerShape;
using turboquant::layout::kTileTokens;

uint64_t minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }
uint64_t plus(uint64_t a, uint64_t b) { return a > kTooMany - b ? kTooMany : a + b; }
uint64_t times(uint64_t a, uint64_t b) { return b != 0 && a > kTooMany / b ? kTooMany : a * b; }
uint64_t divided_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Pages that queries read when `tokens` have come.
uint64_t pages_coded(const CacheConfig& config, uint64_t tokens) {
  return minus(minus(tokens, config.first_tokens), config.recent_tokens) / config.page_tokens;
}

// Page blocks that a layer has taken by then, those included that it has let go since: pages are coded ahead, from the
// first token behind them on.
uint64_t pages_taken(const CacheConfig& config, uint64_t tokens) {
  return minus(tokens, config.first_tokens + (config.recent_tokens > 0 ? 1 : 0)) / config.page_tokens;
}

// A fork codes the last page, too, if it is finished, so that it can be shared.
uint64_t pages_shared(const CacheConfig& config, const Load& load) {
  if (load.sequences < 2) return pages_taken(config, load.shared_tokens);
  return minus(load.shared_tokens, config.first_tokens) / config.page_tokens;
}

// Those of them that it has let go behind its window.
uint64_t pages_freed(const CacheConfig& config, const LayerShape& layer, uint64_t tokens) {
  if (layer.window == 0) return 0;
  const uint64_t unseen = minus(tokens, config.rollback_tokens + layer.window);
  return (std::min)(minus(unseen, config.first_tokens) / config.page_tokens, pages_coded(config, tokens));
}

// Where the raw tail begins: a sequence shortened by rollback_tokens must find all that it reads raw.
uint64_t tail_begin(const CacheConfig& config, uint64_t tokens) {
  return config.first_tokens + config.page_tokens * pages_coded(config, minus(tokens, config.rollback_tokens));
}

// Of the blocks [begin, end) of each sequence, those before `shared_end` are one block for all.
uint64_t distinct(uint64_t begin, uint64_t end, uint64_t shared_end, uint64_t sequences) {
  if (begin >= end) return 0;
  const uint64_t own_begin = std::clamp(shared_end, begin, end);
  return plus(own_begin - begin, times(end - own_begin, sequences));
}

struct LayerCounts {
  uint64_t pages, tiles;
};

// Blocks of one layer while a step from `before` to load.tokens runs; before = load.tokens: after it.
LayerCounts counts(const CacheConfig& config, const LayerShape& layer, const Load& load, uint64_t before) {
  const uint64_t first = config.first_tokens, shared = load.shared_tokens;
  const bool is_all_shared = shared == load.tokens;
  const uint64_t begin = tail_begin(config, before);
  const uint64_t tail_tiles = divided_up(minus(load.tokens, begin), kTileTokens);
  const uint64_t first_tiles = divided_up((std::min)(load.tokens, first), kTileTokens);
  // A tile that shared tokens fill in part is copied by whoever appends to it.
  const uint64_t shared_tail = is_all_shared ? tail_tiles : minus(shared, begin) / kTileTokens;
  const uint64_t shared_first = is_all_shared || shared >= first ? first_tiles : shared / kTileTokens;
  const uint64_t shared_pages = pages_shared(config, load);
  return {distinct(pages_freed(config, layer, before), (std::max)(pages_taken(config, load.tokens), shared_pages),
                   shared_pages, load.sequences),
          plus(distinct(0, tail_tiles, shared_tail, load.sequences),
               distinct(0, first_tiles, shared_first, load.sequences))};
}

uint64_t page_bytes(const CacheConfig& config, const LayerShape& layer) {
  const auto shape = turboquant_eval::page_shape(layer, config.page_tokens);
  return turboquant::layout::round_up(turboquant::layout::page_layout(shape).bytes, 64);
}

uint64_t coordinates(const LayerShape& layer) {
  return layer.kv_heads * (uint64_t{layer.head_dim} + (layer.value_dim != 0 ? layer.value_dim : layer.head_dim));
}

uint64_t tile_bytes(const LayerShape& layer) {
  return turboquant::layout::round_up(coordinates(layer) * kTileTokens * 2, 64);
}

// Blocks of one size and use, which are cut from slabs of their own.
struct BlockClass {
  bool is_page;
  uint64_t bytes, count;
};

uint64_t& count_of(std::vector<BlockClass>& classes, bool is_page, uint64_t bytes) {
  for (BlockClass& known : classes) {
    if (known.is_page == is_page && known.bytes == bytes) return known.count;
  }
  return classes.emplace_back(BlockClass{is_page, bytes, 0}).count;
}

std::vector<BlockClass> classes_of(const CacheConfig& config, const Load& load, uint64_t before) {
  std::vector<BlockClass> classes;
  for (const LayerShape& layer : config.layers) {
    const LayerCounts more = counts(config, layer, load, before);
    for (const bool is_page : {true, false}) {
      uint64_t& count = count_of(classes, is_page, is_page ? page_bytes(config, layer) : tile_bytes(layer));
      count = plus(count, is_page ? more.pages : more.tiles);
    }
  }
  return classes;
}

}  // namespace

Footprint footprint(const CacheConfig& config, const Load& load) {
  Footprint sum;
  for (const BlockClass& blocks : classes_of(config, load, load.tokens)) {
    uint64_t& bytes = blocks.is_page ? sum.page_bytes : sum.tail_bytes;
    bytes = plus(bytes, times(blocks.count, blocks.bytes));
  }
  return sum;
}

uint64_t slab_bytes(const CacheConfig& config, const Load& load) {
  // A page of tokens later there are at least as many blocks of each class, so the most so far were held during one of
  // the last page_tokens steps.
  std::vector<BlockClass> most;
  const uint64_t begin = (std::max)({minus(load.tokens + 1, config.page_tokens), load.shared_tokens, uint64_t{1}});
  for (uint64_t tokens = begin; tokens <= load.tokens; ++tokens) {
    const Load then{tokens, load.sequences, load.shared_tokens};
    for (const BlockClass& blocks : classes_of(config, then, tokens - 1)) {
      uint64_t& count = count_of(most, blocks.is_page, blocks.bytes);
      count = (std::max)(count, blocks.count);
    }
  }
  constexpr uint64_t kSlabBytes = uint64_t{1} << 21;
  uint64_t sum = 0;
  for (const BlockClass& blocks : most) {
    const uint64_t per_slab = divided_up(kSlabBytes, blocks.bytes);
    sum = plus(sum, times(divided_up(blocks.count, per_slab), per_slab * blocks.bytes));
  }
  return sum;
}

uint64_t f16_bytes(std::span<const LayerShape> layers, const Load& load) {
  uint64_t sum = 0;
  for (const LayerShape& layer : layers) {
    const uint64_t begin = layer.window != 0 ? minus(load.tokens, layer.window) : 0;
    sum = plus(sum, times(distinct(begin, load.tokens, load.shared_tokens, load.sequences), 2 * coordinates(layer)));
  }
  return sum;
}

}  // namespace turboquant_plan
