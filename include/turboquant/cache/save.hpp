// Saving a sequence, or a single page of one, to a byte sink.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/cache/byte_stream.hpp>
#include <turboquant/cache/file_format.hpp>
#include <turboquant/cache/kv_cache.hpp>

namespace turboquant {
namespace detail {

inline void put_preamble(const Magic& magic, SectionWriter& out) noexcept {
  out.put(magic.data(), magic.size());
  out.put(kEndianMark, 4);
  out.put(kFileFormatVersion, 4);
}

// Section: the first `count` rows of a tile, keys [head][count][head_dim], then values.
inline Status save_tile(const Layer& layer, const Block* tile, std::size_t count, SectionWriter& out) {
  for (const Side side : {Side::key, Side::value}) {
    for (std::size_t head = 0; head < layer.shape.kv_heads; ++head) {
      out.put(layer.tile_row(tile, side, head, 0), count * layer.dim(side) * sizeof(bfloat16));
    }
  }
  return out.end();
}

// The first `tokens` rows of consecutive tiles.
inline Status save_tiles(const Layer& layer, const Array<Block*>& tiles, std::size_t tokens, SectionWriter& out) {
  for (std::size_t begin = 0; begin < tokens; begin += 16) {
    const Status status = save_tile(layer, tiles[begin / 16], (std::min)(tokens - begin, std::size_t{16}), out);
    if (status.code != Status::ok) return status;
  }
  return {};
}

// Two sections: which tokens of a page are in use; and the page with all others taken out. The page itself may be
// shared.
inline Status save_page(const Layer& layer, const Block* page, const Span* spans, std::size_t count,
                        SectionWriter& out) {
  out.put(count, 4);
  for (std::size_t s = 0; s < count; ++s) {
    out.put(spans[s].first, 4);
    out.put(spans[s].count, 4);
  }
  if (const Status status = out.end(); status.code != Status::ok) return status;
  std::uint8_t* copy = out.extend(layer.page.bytes);
  if (copy != nullptr) {
    std::memcpy(copy, page->memory, layer.page.bytes);
    clear_dead_tokens(layer, spans, count, reinterpret_cast<std::byte*>(copy));
  }
  return out.end();
}

// Calls visit(page, spans, count) for every page in order; erase leaves neighbouring entries that share one.
template <class Visit>
Status for_each_page(const Array<Entry>& entries, Visit visit) {
  for (std::size_t i = 0; i < entries.size();) {
    Span spans[layout::kMaxPageTokens];
    std::size_t count = 0;
    const Block* page = entries[i].page;
    while (i < entries.size() && entries[i].page == page && count < layout::kMaxPageTokens) {
      spans[count++] = {entries[i].first, entries[i].count};
      ++i;
    }
    if (const Status status = visit(page, spans, count); status.code != Status::ok) return status;
  }
  return {};
}

inline Status save_layer(const CacheCore& core, std::size_t index, const LayerState& state, SectionWriter& out) {
  const Layer& layer = core.layer(index);
  const std::size_t first = state.first;
  std::size_t pages = 0;
  (void)for_each_page(state.entries, [&pages](const Block*, const Span*, std::size_t) {
    ++pages;
    return Status{};
  });
  for (const std::size_t number :
       {first, state.base, state.tail_begin, state.held_begin, state.dropped_entries, pages}) {
    out.put(number);
  }
  Status status = out.end();
  if (status.code == Status::ok) status = save_tiles(layer, state.first_tiles, (std::min)(state.length, first), out);
  if (status.code == Status::ok) {
    status = save_tiles(layer, state.tail, saturating_subtract(state.length, state.tail_begin), out);
  }
  if (status.code != Status::ok) return status;
  return for_each_page(state.entries, [&](const Block* page, const Span* spans, std::size_t count) {
    return save_page(layer, page, spans, count, out);
  });
}

inline Status save(const CacheCore& core, SequenceId id, const ByteSink& sink) {
  if (const Status status = check_byte_order(); status.code != Status::ok) return status;
  const Sequence* sequence = core.find(id);
  if (sequence == nullptr) return {Status::unknown_sequence, "sequence"};
  const std::size_t length = sequence->layers[0].length;
  for (std::size_t l = 1; l < core.layer_count(); ++l) {
    if (sequence->layers[l].length != length) {
      return CacheCore::bad_shape("layer lengths", length, sequence->layers[l].length);
    }
  }
  SectionWriter out(sink);
  const auto put = [&out](const char*, std::uint64_t number) { out.put(number); };
  put_preamble(kSequenceMagic, out);
  describe_cache(core, put);
  out.put(length);
  if (const Status status = out.end(); status.code != Status::ok) return status;
  for (std::size_t l = 0; l < core.layer_count(); ++l) {
    describe_layer(core.layer(l), put);
    out.put(core.layer(l).shape.window);
    if (const Status status = out.end(); status.code != Status::ok) return status;
  }
  for (std::size_t l = 0; l < core.layer_count(); ++l) {
    if (const Status status = save_layer(core, l, sequence->layers[l], out); status.code != Status::ok) return status;
  }
  return {};
}

inline Status save_page(const CacheCore& core, SequenceId id, std::size_t index, std::size_t position,
                        const ByteSink& sink, std::size_t* tokens) {
  if (const Status status = check_byte_order(); status.code != Status::ok) return status;
  const Sequence* sequence = core.find(id);
  if (sequence == nullptr) return {Status::unknown_sequence, "sequence"};
  if (index >= core.layer_count()) {
    return {Status::bad_layer, "layer", CacheCore::as_signed(core.layer_count()), CacheCore::as_signed(index)};
  }
  const Layer& layer = core.layer(index);
  const LayerState& state = sequence->layers[index];
  if (position < state.first) return CacheCore::bad_shape("position", state.first, position);
  if (position >= state.coded_end()) return CacheCore::bad_shape("position", state.coded_end(), position);
  if (position < state.held_begin) {
    return {Status::behind_window, "position", CacheCore::as_signed(state.held_begin), CacheCore::as_signed(position)};
  }
  const Entry* entry = std::upper_bound(state.entries.begin(), state.entries.end(), position,
                                        [](std::size_t p, const Entry& e) { return p < e.end(); });
  const auto skipped = static_cast<std::uint32_t>(position - entry->begin);
  const Span span{entry->first + skipped, entry->count - skipped};
  SectionWriter out(sink);
  const auto put = [&out](const char*, std::uint64_t number) { out.put(number); };
  put_preamble(kPageMagic, out);
  out.put(core.config().page_tokens);
  out.put(core.config().seed);
  describe_layer(layer, put);
  Status status = out.end();
  if (status.code == Status::ok) status = save_page(layer, entry->page, &span, 1, out);
  if (status.code == Status::ok && tokens != nullptr) *tokens = span.count;
  return status;
}

}  // namespace detail

/// Writes a sequence to a sink, so that `load` makes one that continues like it, bit for bit. Tokens that were
/// truncated or erased are not written, only codes of trellis values that later ones continue. A const call: it may run
/// beside other const calls on the sequence and any calls on others. Errors: unknown_sequence, bad_shape (layers of
/// unequal length: between the layers of a step), out_of_memory, io_error (the sink failed: what it took is no file),
/// format_mismatch (a big-endian machine).
template <class... F>
Status save(const KVCache<F...>& cache, SequenceId sequence, ByteSink sink) {
  return detail::save(detail::CacheAccess::core(cache), sequence, sink);
}

/// Writes the codes of one layer from `position` to the end of their page, for `load_page`; their number to `tokens`.
/// Const as `save`. Errors: unknown_sequence, bad_layer, bad_shape (no codes there), behind_window, out_of_memory,
/// io_error, format_mismatch (a big-endian machine).
template <class... F>
Status save_page(const KVCache<F...>& cache, SequenceId sequence, std::size_t layer, std::size_t position,
                 ByteSink sink, std::size_t* tokens = nullptr) {
  return detail::save_page(detail::CacheAccess::core(cache), sequence, layer, position, sink, tokens);
}

}  // namespace turboquant
