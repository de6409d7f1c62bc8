// What the queries of one call can read of one layer of a sequence: pages, raw tiles, and the rows of the call itself.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include <turboquant/cache/cache_core.hpp>

namespace turboquant::detail {

// `count` tokens of a page from its token `first` on, at positions [begin, begin + count).
struct PageView {
  const std::byte* memory;
  std::size_t begin;
  std::uint32_t first, count;

  std::size_t end() const { return begin + count; }
};

// The sequence as it stands after the call's append, without having been changed: old entries and tiles, new pages, and
// the caller's own rows for the new tokens.
struct SequenceView {
  const Layer* layer = nullptr;
  const LayerState* state = nullptr;
  const CodingRule* rule = nullptr;
  std::size_t first_tokens = 0;
  std::size_t before = 0, after = 0;  // tokens before and after the append
  std::size_t coded_end = 0;          // codes after the append: [held_begin, coded_end)
  std::size_t tail_begin = 0;         // raw rows after the append: [tail_begin, after)
  std::size_t raw_origin = 0;         // raw rows are taken in chunks counted from here
  ConstRows keys{}, values{};         // rows of the positions [before, after)
  // The last tokens, from tree_begin on, are a tree; `path` tells which of them stand at the positions tree_begin,
  // tree_begin + 1, ... of one query: bit j is token tree_begin + j.
  std::size_t tree_begin = npos;
  std::uint64_t path = 0;
  Block* const* new_pages = nullptr;  // pages coded in this call, from state->coded_end() on
  std::span<const PageView> pages{};  // instead of entries, where the caller owns the pages

  // Entries are numbered for ever: freed ones count.
  std::size_t first_entry() const { return state->dropped_entries; }
  std::size_t end_entry() const {
    if (!pages.empty()) return pages.size();
    return state->dropped_entries + state->entries.size() + (coded_end - state->coded_end()) / rule->page_tokens;
  }
  PageView entry(std::size_t number) const {
    if (!pages.empty()) return pages[number];
    const std::size_t index = number - state->dropped_entries;
    if (index < state->entries.size()) {
      const Entry& held = state->entries[index];
      return {held.page->memory, held.begin, held.first, held.count};
    }
    const std::size_t fresh = index - state->entries.size();
    return {new_pages[fresh]->memory, state->coded_end() + fresh * rule->page_tokens, 0,
            static_cast<std::uint32_t>(rule->page_tokens)};
  }

  // A query at p reads codes up to here. Does the query come later than the call which appended its position, old raw
  // rows are gone (or go with this call's append) and it reads codes instead.
  std::size_t coded_for(std::size_t p) const {
    const std::size_t coded = rule->coded(state->base, p + 1);
    return (std::min)(p < before ? (std::max)(coded, tail_begin) : coded, coded_end);
  }

  // Raw rows of positions below this are held, each for itself.
  std::size_t held() const { return (std::min)(before, tree_begin); }

  // Copies one raw row, rounded to bf16. Requires position < first_tokens or position >= tail_begin.
  void raw_row(Side side, std::size_t head, std::size_t position, bfloat16* out) const {
    if (position >= tree_begin) position = tree_begin + on_path(position - tree_begin);
    if (position >= before) {
      layer->load(side == Side::key ? keys : values, position - before, head, out);
    } else {
      std::copy_n(held_row(side, head, position), layer->dim(side), out);
    }
  }

  // Rows [begin, begin + count) of one head, contiguous: in place if they lie in one tile, else copied to `staging`
  // ([16][dim]). Requires count <= 16 and begin on the tile grid or beyond its start in the same tile.
  const bfloat16* raw_rows(Side side, std::size_t head, std::size_t begin, std::size_t count, bfloat16* staging) const {
    if (begin + count <= held() && tile_of(begin) == tile_of(begin + count - 1)) return held_row(side, head, begin);
    for (std::size_t t = 0; t < count; ++t) raw_row(side, head, begin + t, staging + t * layer->dim(side));
    return staging;
  }

  // What is read behind the codes: the keys of the tile `number` of those that come after them. Null if there is none.
  const std::uint8_t* keys_ahead(std::size_t head, std::size_t number) const {
    const std::size_t position = coded_end + number * layout::kTileTokens;
    if (!pages.empty() || coded_end < state->tail_begin || position >= held()) return nullptr;
    return reinterpret_cast<const std::uint8_t*>(held_row(Side::key, head, position));
  }

  // Fetches what raw_rows would find in place, as far as it lies in one tile.
  void fetch_rows(Side side, std::size_t head, std::size_t begin, std::size_t count) const {
    if (begin >= held()) return;
    const std::size_t rows = (std::min)({count, held() - begin, 16 - offset_of(begin) % 16});
    const auto* bytes = reinterpret_cast<const std::byte*>(held_row(side, head, begin));
    for (std::size_t at = 0; at < rows * layer->dim(side) * sizeof(bfloat16); at += 64) kernels::fetch_line(bytes + at);
  }

 private:
  // The number of the path's token at depth `depth`. Requires that the path is so long.
  std::size_t on_path(std::size_t depth) const {
    std::uint64_t rest = path;
    while (depth-- > 0) rest &= rest - 1;
    return static_cast<std::size_t>(std::countr_zero(rest));
  }
  std::size_t tile_of(std::size_t position) const {
    return (position < first_tokens ? 0 : npos / 2) + offset_of(position) / 16;
  }
  // Of a position among the tiles that hold it: those of the first tokens, or the tail's.
  std::size_t offset_of(std::size_t position) const {
    return position < first_tokens ? position : position - state->tail_begin;
  }
  const bfloat16* held_row(Side side, std::size_t head, std::size_t position) const {
    const Array<Block*>& from = position < first_tokens ? state->first_tiles : state->tail;
    const std::size_t offset = offset_of(position);
    return layer->tile_row(from[offset / 16], side, head, offset % 16);
  }
};

}  // namespace turboquant::detail
