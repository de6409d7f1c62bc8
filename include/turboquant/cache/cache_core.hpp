// The container behind KVCache<F...>, written once for all formats: create, fork, truncate, erase, reserve, seal, read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

#include <turboquant/cache/config.hpp>
#include <turboquant/cache/layer.hpp>
#include <turboquant/cache/sequence.hpp>
#include <turboquant/cache/sequence_store.hpp>
#include <turboquant/core/rows.hpp>
#include <turboquant/core/status.hpp>

namespace turboquant::detail {

class CacheCore : public SequenceStore {
 public:
  using SequenceStore::SequenceStore;

  Status create_sequence(SequenceId& created) noexcept {
    Sequence* sequence = make_sequence();
    if (sequence == nullptr) return {Status::out_of_memory, "sequence"};
    return adopt(sequence, created);
  }

  Status fork(SequenceId source_id, std::size_t length, SequenceId& created) noexcept {
    Sequence* source = nullptr;
    if (const Status status = mutable_sequence(source_id, source); status.code != Status::ok) return status;
    if (const Status status = check_shorten(*source, length); status.code != Status::ok) return status;
    Sequence* child = make_sequence();
    if (child == nullptr) return {Status::out_of_memory, "sequence"};
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerState& from = source->layers[l];
      LayerState& to = child->layers[l];
      if (!copy(from.entries, to.entries) || !copy(from.first_tiles, to.first_tiles) || !copy(from.tail, to.tail)) {
        // Nothing is shared yet: forget the pointers before they are released.
        for (std::size_t k = 0; k <= l; ++k) forget_blocks(child->layers[k]);
        destroy(child);
        return {Status::out_of_memory, "sequence"};
      }
      to.length = from.length;
      to.base = from.base;
      to.tail_begin = from.tail_begin;
      to.held_begin = from.held_begin;
      to.dropped_entries = from.dropped_entries;
    }
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for_each_block(child->layers[l], [](Block* block) { block->retain(); });
      shorten(*child, l, length);
    }
    return adopt(child, created);
  }

  Status truncate(SequenceId id, std::size_t length) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    if (const Status status = check_shorten(*sequence, length); status.code != Status::ok) return status;
    for (std::size_t l = 0; l < layers_.size(); ++l) shorten(*sequence, l, length);
    return {};
  }

  // Removes the positions [begin, end); later tokens move down. Codes only: the range must lie between first_tokens and
  // the last coded token, or reach the end of the sequence.
  Status erase(SequenceId id, std::size_t begin, std::size_t end) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    const std::size_t length = shortest(*sequence);
    if (end > length || begin > end)
      return bad_shape(begin > end ? "begin" : "end", begin > end ? end : length, begin > end ? begin : end);
    if (begin == end) return {};
    if (const Status status = check_aligned(*sequence); status.code != Status::ok) return status;
    if (end == length) return truncate(id, begin);
    if (begin < config_.first_tokens) return bad_shape("begin", config_.first_tokens, begin);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      if (end > state.coded_end()) return bad_shape("end", state.coded_end(), end);
      if (begin < state.held_begin)
        return {Status::behind_window, "begin", as_signed(state.held_begin), as_signed(begin)};
      if (!state.entries.reserve(state.entries.size() + 1)) return {Status::out_of_memory, "entries"};
    }
    for (std::size_t l = 0; l < layers_.size(); ++l) erase_codes(sequence->layers[l], begin, end);
    account(*sequence);
    return {};
  }

  Status reserve(SequenceId id, std::size_t tokens) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    std::unique_ptr<std::size_t[]> needed(new (std::nothrow) std::size_t[pool_.class_count()]());
    if (needed == nullptr) return {Status::out_of_memory, "reserve"};
    constexpr std::size_t kMost = std::size_t{1} << 48;
    if (tokens > kMost) return {Status::out_of_memory, "reserve", as_signed(kMost), -1};
    if (tokens == 0) return {};
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      const std::size_t length = state.length + tokens;
      const std::size_t pages =
          (rule_.coded(state.base, length) - rule_.coded(state.base, state.length)) / rule_.page_tokens;
      // Tiles: one for every 16 tokens that are ever in the tail at once, and two partial ones that may have to be
      // copied. Those that the tail leaves behind come back to the reserve (recycle).
      const std::size_t widest = (std::min)(tokens, rule_.recent_tokens + rule_.page_tokens + rule_.rollback_tokens);
      const std::size_t tiles =
          layout::round_up(widest, 16) / 16 + 1 + 2 +
          (state.length < config_.first_tokens ? (std::min)(tokens, config_.first_tokens - state.length) / 16 + 1 : 0);
      needed[layers_[l].page_class] += pages;
      needed[layers_[l].tile_class] += tiles;
      if (!state.entries.reserve(state.entries.size() + pages) || !state.tail.reserve(state.tail.size() + tiles) ||
          !state.first_tiles.reserve(state.first_tiles.size() + tiles)) {
        return {Status::out_of_memory, "entries"};
      }
    }
    // All or nothing.
    for (unsigned c = 0; c < pool_.class_count(); ++c) {
      Array<Block*>& blocks = sequence->reserved[c];
      const std::size_t before = blocks.size();
      bool enough = blocks.reserve(2 * needed[c]);  // room for what comes back
      while (enough && blocks.size() < needed[c]) {
        Block* block = pool_.acquire(c);
        enough = block != nullptr && blocks.push_back(block);
      }
      if (enough) {
        needed[c] = before;  // from here on: what to go back to
        continue;
      }
      needed[c] = before;
      for (unsigned k = 0; k <= c; ++k) {
        while (sequence->reserved[k].size() > needed[k]) release_last(sequence->reserved[k]);
      }
      account(*sequence);
      return {Status::out_of_memory, "reserve"};
    }
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      state.reserved_length = (std::max)(state.reserved_length, state.length + tokens);
    }
    account(*sequence);
    return {};
  }

  Status seal(SequenceId id) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    if (const Status status = check_aligned(*sequence); status.code != Status::ok) return status;
    // All memory first, so that a failure changes nothing.
    std::size_t pages = 0, scratch_bytes = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::size_t count = pages_to_seal(sequence->layers[l]);
      pages += count;
      scratch_bytes = (std::max)(scratch_bytes, layers_[l].encode_scratch_bytes());
      if (!sequence->layers[l].entries.reserve(sequence->layers[l].entries.size() + count)) {
        return {Status::out_of_memory, "entries"};
      }
    }
    const Scratch scratch(scratch_bytes);
    Array<Block*> fresh;
    bool enough = static_cast<bool>(scratch) && fresh.reserve(pages);
    for (std::size_t l = 0; enough && l < layers_.size(); ++l) {
      for (std::size_t i = pages_to_seal(sequence->layers[l]); enough && i > 0; --i) {
        Block* block = pool_.acquire(layers_[l].page_class);  // a reserve is for tokens to come
        enough = block != nullptr && fresh.push_back(block);
      }
    }
    if (!enough) {
      while (!fresh.empty()) release_last(fresh);
      return {Status::out_of_memory, "pages"};
    }
    std::size_t next = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::size_t count = pages_to_seal(sequence->layers[l]);
      seal(*sequence, l, {fresh.data() + next, count}, scratch.get());
      next += count;
    }
    account(*sequence);
    return {};
  }

  void release(SequenceId id) noexcept {
    Sequence* sequence = table_.find(id);
    if (sequence == nullptr || sequence->is_planned()) return;
    sequence = table_.remove(id);
    if (sequence != nullptr) destroy(sequence);
  }

  std::size_t length(SequenceId id) const noexcept {
    const Sequence* sequence = table_.find(id);
    return sequence != nullptr ? shortest(*sequence) : 0;
  }

  Status read(SequenceId id, std::size_t index, std::size_t begin, Rows keys, Rows values) const noexcept {
    const Sequence* sequence = table_.find(id);
    if (sequence == nullptr) return {Status::unknown_sequence, "sequence"};
    if (index >= layers_.size()) return {Status::bad_layer, "layer", as_signed(layers_.size()), as_signed(index)};
    const Layer& layer = layers_[index];
    const LayerState& state = sequence->layers[index];
    if (keys.tokens != 0 && values.tokens != 0 && keys.tokens != values.tokens) {
      return bad_shape("values.tokens", keys.tokens, values.tokens);
    }
    for (const Side side : {Side::key, Side::value}) {
      const Rows& rows = side == Side::key ? keys : values;
      if (rows.tokens == 0) continue;
      if (rows.data == nullptr) return bad_shape(side == Side::key ? "keys.data" : "values.data", 1, 0);
      if (size_of(rows.type) == 0) return {Status::bad_shape, side == Side::key ? "keys.type" : "values.type"};
      if (rows.heads != layer.shape.kv_heads)
        return bad_shape(side == Side::key ? "keys.heads" : "values.heads", layer.shape.kv_heads, rows.heads);
      if (rows.dim != layer.dim(side))
        return bad_shape(side == Side::key ? "keys.dim" : "values.dim", layer.dim(side), rows.dim);
      if (begin > state.length || rows.tokens > state.length - begin) {
        return bad_shape(side == Side::key ? "keys.tokens" : "values.tokens",
                         state.length - (std::min)(begin, state.length), rows.tokens);
      }
      if (begin + rows.tokens > config_.first_tokens && begin < state.held_begin &&
          state.held_begin > config_.first_tokens) {
        return {Status::behind_window, "begin", as_signed(state.held_begin), as_signed(begin)};
      }
    }
    const std::size_t coded = (std::max)(rule_.coded(state.base, state.length), state.tail_begin);
    for (const Side side : {Side::key, Side::value}) {
      const Rows& rows = side == Side::key ? keys : values;
      for (std::size_t t = 0; t < rows.tokens; ++t) {
        for (std::size_t head = 0; head < layer.shape.kv_heads; ++head) {
          float out[1024];
          read_row(layer, state, side, head, begin + t, coded, out);
          store_row(rows, t, head, out);
        }
      }
    }
    return {};
  }

  MemoryUse memory() const noexcept {
    MemoryUse use{};
    use.page_bytes = pool_.live_bytes(BlockUse::page);
    use.tail_bytes = pool_.live_bytes(BlockUse::tile);
    use.table_bytes = table_.bytes() + table_bytes_.load(std::memory_order_relaxed);
    double bits = 0, coordinates = 0;
    for (const Layer& layer : layers_) {
      const double width = static_cast<double>(layer.shape.kv_heads) * (layer.shape.head_dim + layer.shape.value_dim);
      bits += layout::bits_per_coordinate(layer.page_shape) * width;
      coordinates += width;
    }
    use.bits_per_coordinate = bits / coordinates;
    return use;
  }

  // ---- for load: a sequence outside the table, and its way in, which takes it over
  using SequenceStore::destroy;
  using SequenceStore::make_sequence;

  Status adopt(Sequence* sequence, SequenceId& created) noexcept {
    SequenceId id;
    if (!table_.insert(sequence, id)) {
      destroy(sequence);
      return {Status::out_of_memory, "sequence"};
    }
    account(*sequence);
    created = id;
    return {};
  }

 private:
  static void forget_blocks(LayerState& state) noexcept {
    state.entries.clear();
    state.first_tiles.clear();
    state.tail.clear();
  }

  template <class T>
  static bool copy(const Array<T>& from, Array<T>& to) noexcept {
    if (!to.reserve(from.size())) return false;
    for (const T& element : from) {
      if (!to.push_back(element)) return false;
    }
    return true;
  }

  // Between the layers of a step lengths differ; a table operation would have to guess.
  Status check_aligned(const Sequence& sequence) const noexcept {
    const std::size_t length = shortest(sequence);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      if (sequence.layers[l].length != length) return bad_shape("layer lengths", length, sequence.layers[l].length);
    }
    return {};
  }

  Status check_shorten(const Sequence& sequence, std::size_t length) const noexcept {
    const std::size_t longest = shortest(sequence);
    if (length > longest) return bad_shape("length", longest, length);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerState& state = sequence.layers[l];
      if (state.held_begin <= config_.first_tokens || length <= config_.first_tokens) continue;
      // The last query of the shortened sequence sees the keys from here on.
      const std::size_t needed = (std::max)(saturating_subtract(length, layers_[l].shape.window), config_.first_tokens);
      if (needed < state.held_begin) {
        return {Status::behind_window, "length", as_signed(state.held_begin + layers_[l].shape.window),
                as_signed(length)};
      }
    }
    return {};
  }

  std::size_t pages_to_seal(const LayerState& state) const noexcept {
    const std::size_t begin = seal_begin(state);
    return layout::round_up(saturating_subtract(state.length, begin), rule_.page_tokens) / rule_.page_tokens;
  }

  // A window shorter than the raw tail may have let go of codes that a rollback has made raw again.
  std::size_t seal_begin(const LayerState& state) const noexcept {
    return (std::max)(rule_.coded(state.base, state.length), state.coded_end());
  }

  void seal(Sequence& sequence, std::size_t index, std::span<Block* const> pages, std::byte* scratch) noexcept {
    const Layer& layer = layers_[index];
    LayerState& state = sequence.layers[index];
    std::size_t begin = seal_begin(state);
    for (Block* page : pages) {
      const std::size_t count = (std::min)(rule_.page_tokens, state.length - begin);
      layer.clear_padding(page);
      for (const Side side : {Side::key, Side::value}) {
        for (std::size_t head = 0; head < layer.shape.kv_heads; ++head) {
          layer.encode(page, side, head, count, scratch, [&](std::size_t t, bfloat16* out) {
            const std::size_t at = begin + t - state.tail_begin;
            std::copy_n(layer.tile_row(state.tail[at / 16], side, head, at % 16), layer.dim(side), out);
          });
        }
      }
      (void)state.entries.push_back(Entry{page, begin, 0, static_cast<std::uint32_t>(count)});  // room was made
      begin += count;
    }
    if (state.length > config_.first_tokens) {
      cut_tiles(sequence, index, state.tail, 0);
      state.base = state.tail_begin = state.length;
    }
    free_behind_window(layer, state);
  }

  void read_row(const Layer& layer, const LayerState& state, Side side, std::size_t head, std::size_t at,
                std::size_t coded, float* out) const noexcept {
    const std::size_t width = layer.dim(side);
    const bool first = at < config_.first_tokens;
    if (first || at >= coded) {
      const Array<Block*>& from = first ? state.first_tiles : state.tail;
      const std::size_t offset = first ? at : at - state.tail_begin;
      const bfloat16* row = layer.tile_row(from[offset / 16], side, head, offset % 16);
      for (std::size_t i = 0; i < width; ++i) out[i] = to_float(row[i]);
      return;
    }
    const auto entry = std::upper_bound(state.entries.begin(), state.entries.end(), at,
                                        [](std::size_t p, const Entry& e) { return p < e.end(); });
    layer.operations->decode_row(side, layer.part(entry->page, side, head), entry->first + (at - entry->begin), out);
    layer.operations->rotate_back(layer.rotation(side), out, out);
  }
};

}  // namespace turboquant::detail
