// Counts every reference to every block of a cache and holds the counts against those that the blocks keep.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <turboquant/turboquant.hpp>

namespace tests {

/// What a cache must hold for the sequences `ids`, which are all there are: each block as often as they name it, and
/// no other block alive. Blocks that a test took from the pool itself are told by their bytes.
template <class Cache>
testing::AssertionResult is_balanced(Cache& cache, std::span<const turboquant::SequenceId> ids,
                                     std::size_t foreign_pages = 0, std::size_t foreign_tiles = 0) {
  namespace detail = turboquant::detail;
  auto& core = turboquant::detail::CacheAccess::core(cache);
  const auto rounded = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
  std::map<unsigned, std::size_t> page_bytes, tile_bytes;  // by size class
  for (std::size_t l = 0; l < core.layer_count(); ++l) {
    page_bytes[core.layer(l).page_class] = rounded(core.layer(l).page.bytes);
    tile_bytes[core.layer(l).tile_class] = rounded(core.layer(l).tile_bytes());
  }
  std::map<const detail::Block*, std::uint32_t> counted;
  for (const turboquant::SequenceId id : ids) {
    const detail::Sequence* sequence = core.find(id);
    if (sequence == nullptr) return testing::AssertionFailure() << "sequence " << id.index << " is unknown";
    for (std::size_t l = 0; l < core.layer_count(); ++l) {
      const detail::LayerState& state = sequence->layers[l];
      std::size_t at = state.held_begin;
      for (const detail::Entry& entry : state.entries) {
        ++counted[entry.page];
        if (entry.begin != at || entry.count == 0 || entry.first + entry.count > core.rule().page_tokens)
          return testing::AssertionFailure() << "an entry begins at " << entry.begin << ", not at " << at;
        at = entry.end();
      }
      for (const detail::Block* tile : state.first_tiles) ++counted[tile];
      for (const detail::Block* tile : state.tail) ++counted[tile];
      for (const detail::Block* page : state.coding) ++counted[page];
      const std::size_t first = state.length < state.first ? state.length : state.first;
      const std::size_t tail = state.length > state.tail_begin ? state.length - state.tail_begin : 0;
      if (state.first_tiles.size() != (first + 15) / 16 || state.tail.size() != (tail + 15) / 16)
        return testing::AssertionFailure() << "layer " << l << " has " << state.first_tiles.size() << " + "
                                           << state.tail.size() << " tiles for " << first << " + " << tail << " rows";
    }
    for (std::size_t l = 0; l < core.layer_count(); ++l) {
      const detail::LayerState& state = sequence->layers[l];
      if (!state.coding.empty() && !state.coding.back()->is_exclusive() &&
          state.coding_work < core.layer(l).page_work())
        return testing::AssertionFailure() << "layer " << l << " would write to a page that others share";
    }
    for (unsigned c = 0; c < core.pool().class_count(); ++c)
      for (const detail::Block* block : sequence->reserved[c]) {
        if (counted[block]++ != 0) return testing::AssertionFailure() << "a reserved block is in use";
      }
  }
  std::size_t pages = foreign_pages, tiles = foreign_tiles;
  for (const auto& [block, count] : counted) {
    if (block->references.load() != count)
      return testing::AssertionFailure() << "a block has " << block->references.load() << " references, found "
                                         << count;
    const unsigned size_class = block->slab->size_class;
    if (page_bytes.contains(size_class)) {
      pages += page_bytes[size_class];
    } else {
      tiles += tile_bytes[size_class];
    }
  }
  const turboquant::MemoryUse use = cache.memory();
  if (use.page_bytes != pages || use.tail_bytes != tiles)
    return testing::AssertionFailure() << "alive: " << use.page_bytes << " bytes of pages, " << use.tail_bytes
                                       << " of tiles; held: " << pages << ", " << tiles;
  return testing::AssertionSuccess();
}

/// What the tables of these sequences, which are all there are, take; the table of sequences itself, of some sixteen,
/// is below a kibibyte. Those of `refused` sequences may have grown in a call that was refused: that is counted with
/// their next one.
template <class Cache>
testing::AssertionResult counts_its_tables(Cache& cache, std::span<const turboquant::SequenceId> ids,
                                           std::span<const turboquant::SequenceId> refused = {}) {
  auto& core = turboquant::detail::CacheAccess::core(cache);
  std::size_t bytes = 0;
  for (const turboquant::SequenceId id : ids) {
    const turboquant::detail::Sequence* sequence = core.find(id);
    std::size_t own = sizeof(turboquant::detail::Sequence);
    for (std::size_t l = 0; l < core.layer_count(); ++l) own += sequence->layers[l].table_bytes();
    for (unsigned c = 0; c < core.pool().class_count(); ++c)
      own += sizeof(sequence->reserved[c]) + sequence->reserved[c].capacity() * sizeof(turboquant::detail::Block*);
    const bool late = std::find(refused.begin(), refused.end(), id) != refused.end();
    if (late ? own < sequence->accounted_bytes : own != sequence->accounted_bytes)
      return testing::AssertionFailure() << "sequence " << id.index << " has tables of " << own << " bytes, not "
                                         << sequence->accounted_bytes;
    bytes += sequence->accounted_bytes;
  }
  const std::size_t all = cache.memory().table_bytes;
  if (all < bytes || all - bytes > 1024)
    return testing::AssertionFailure() << all << " bytes of tables; the sequences have " << bytes;
  return testing::AssertionSuccess();
}

/// Whether a sequence has blocks set aside for tokens to come.
template <class Cache>
bool has_reserve(Cache& cache, turboquant::SequenceId id) {
  auto& core = turboquant::detail::CacheAccess::core(cache);
  for (unsigned c = 0; c < core.pool().class_count(); ++c)
    if (!core.find(id)->reserved[c].empty()) return true;
  return false;
}

}  // namespace tests
