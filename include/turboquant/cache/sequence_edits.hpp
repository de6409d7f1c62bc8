// Taking tokens out of the middle of a sequence: codes by splitting entries, raw rows by moving up those behind them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/cache/sequence_store.hpp>

namespace turboquant::detail {

// The mechanics of erase and keep; calls are checked in CacheCore.
class SequenceEdits : public SequenceStore {
 public:
  using SequenceStore::SequenceStore;

 protected:
  // True if tokens from `begin` on can be taken out of a layer, leaving `length`, as if they had never come: their rows
  // are raw, and so are all rows that the shorter sequence reads raw, and no page that it reads has changed.
  bool is_traceless(const LayerState& state, std::size_t begin, std::size_t length) const noexcept {
    const bool all_raw = state.entries.empty() && state.held_begin == state.first && state.tail_begin == state.first;
    const std::size_t coded = rule_.coded(state.base, length);
    return (all_raw || begin >= state.tail_begin) && (length <= state.first || coded >= state.tail_begin) &&
           coded <= (std::max)(begin, state.first);
  }

  // Tiles of the raw rows [begin, end). visit(tile) may replace it.
  template <class State, class Visit>
  static void for_each_raw_tile(State& state, std::size_t begin, std::size_t end, Visit visit) {
    for (std::size_t i = begin / 16; i < layout::tile_count((std::min)({end, state.first, state.length})); ++i) {
      visit(state.first_tiles[i]);
    }
    const std::size_t last = layout::tile_count(saturating_subtract((std::min)(end, state.length), state.tail_begin));
    for (std::size_t i = saturating_subtract(begin, state.tail_begin) / 16; i < last; ++i) visit(state.tail[i]);
  }

  // Blocks that own_tiles may need: rows cannot move in a tile that another sequence holds too.
  static std::size_t shared_tiles(const LayerState& state, std::size_t begin) noexcept {
    std::size_t count = 0;
    for_each_raw_tile(state, begin, npos, [&count](const Block* tile) { count += tile->is_exclusive() ? 0u : 1u; });
    return count;
  }

  // Replaces shared tiles of [begin, end) by copies, taken from the end of `fresh`. Blocks of another layer that lie in
  // the way are left over: their tile was let go by its other holder meanwhile.
  void own_tiles(const Layer& layer, LayerState& state, std::size_t begin, std::size_t end,
                 Array<Block*>& fresh) noexcept {
    for_each_raw_tile(state, begin, end, [&](Block*& tile) {
      if (tile->is_exclusive()) return;
      while (fresh.back()->slab->size_class != layer.tile_class) release_last(fresh);
      Block* copy = fresh.back();
      fresh.erase(fresh.size() - 1, fresh.size());
      std::memcpy(copy->memory, tile->memory, layer.tile_bytes());
      pool_.release(tile);
      tile = copy;
    });
  }

  // The raw row of one token replaces that of another one before it.
  static void move_row(const Layer& layer, const LayerState& state, std::size_t from, std::size_t to) noexcept {
    if (from == to) return;
    const auto row = [&](Side side, std::size_t head, std::size_t position) {
      const bool first = position < state.first;
      const std::size_t offset = first ? position : position - state.tail_begin;
      return layer.tile_row((first ? state.first_tiles : state.tail)[offset / 16], side, head, offset % 16);
    };
    for (const Side side : {Side::key, Side::value}) {
      for (std::size_t head = 0; head < layer.shape.kv_heads; ++head) {
        std::memcpy(row(side, head, to), row(side, head, from), layer.dim(side) * sizeof(bfloat16));
      }
    }
  }

  // Erases [begin, end) of a layer where that is not traceless. What is coded stays coded, what is raw stays raw,
  // except raw rows kept for a rollback; page counting starts anew behind the codes. Requires room for one more entry,
  // and shared_tiles(begin) blocks in `fresh`.
  void erase_codes_and_rows(Sequence& sequence, std::size_t index, std::size_t begin, std::size_t end,
                            Array<Block*>& fresh) noexcept {
    const Layer& layer = layers_[index];
    LayerState& state = sequence.layers[index];
    const std::size_t coded = state.coded_end();
    if (end > coded) {
      const std::size_t to = (std::max)(begin, coded);
      keep_coding(sequence, index, (to - coded) / rule_.page_tokens);
      own_tiles(layer, state, to, npos, fresh);
      for (std::size_t from = end; from < state.length; ++from) move_row(layer, state, from, to + (from - end));
      state.length -= end - to;
      cut_tiles(sequence, index, state.tail, layout::tile_count(state.length - state.tail_begin));
    }
    // Raw rows of coded tokens can no longer serve a rollback.
    const std::size_t dead = (std::min)((coded - state.tail_begin) / layout::kTileTokens, state.tail.size());
    for (std::size_t i = 0; i < dead; ++i) pool_.release(state.tail[i]);
    state.tail.erase(0, dead);
    state.base = state.tail_begin = coded;
    const std::size_t low = (std::max)(begin, state.first), high = (std::min)(end, coded);
    if (low < high) erase_codes(state, low, high);
    if (begin < state.first) {
      const std::size_t behind = (std::min)(end, state.first), removed = behind - begin;
      own_tiles(layer, state, begin, state.first, fresh);
      for (std::size_t from = behind; from < state.first; ++from) move_row(layer, state, from, from - removed);
      state.first -= removed;
      for (Entry& entry : state.entries) entry.begin -= removed;
      state.base -= removed;
      state.tail_begin -= removed;
      state.held_begin -= removed;
      state.length -= removed;
      cut_tiles(sequence, index, state.first_tiles, layout::tile_count(state.first));
    }
  }

 private:
  // Requires first <= begin < end <= coded_end() == tail_begin, and room for one more entry.
  void erase_codes(LayerState& state, std::size_t begin, std::size_t end) noexcept {
    const std::size_t removed = end - begin, coded = state.coded_end();
    for (std::size_t i = 0; i < state.entries.size();) {
      Entry& entry = state.entries[i];
      const std::size_t low = (std::max)(entry.begin, begin), high = (std::min)(entry.end(), end);
      if (low >= high) {
        if (entry.begin >= end) entry.begin -= removed;
        ++i;
      } else if (low == entry.begin && high == entry.end()) {
        pool_.release(entry.page);
        state.entries.erase(i, i + 1);
      } else if (low == entry.begin) {
        const auto count = static_cast<std::uint32_t>(high - low);
        entry.first += count;
        entry.count -= count;
        entry.begin = begin;
        ++i;
      } else {
        const Entry behind{entry.page, begin, static_cast<std::uint32_t>(entry.first + (high - entry.begin)),
                           static_cast<std::uint32_t>(entry.end() - high)};
        entry.count = static_cast<std::uint32_t>(low - entry.begin);
        ++i;
        if (behind.count > 0) {
          behind.page->retain();
          (void)state.entries.insert(i, behind);  // room was made by the caller
          ++i;
        }
      }
    }
    if (begin < state.held_begin) state.held_begin -= (std::min)(end, state.held_begin) - begin;
    state.base = state.tail_begin = coded - removed;
    state.length -= removed;
  }
};

}  // namespace turboquant::detail
