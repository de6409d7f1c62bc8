// The container behind KVCache<F...>, written once for all formats: create, fork, truncate, erase, reserve, seal, read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

#include <turboquant/cache/config.hpp>
#include <turboquant/cache/layer.hpp>
#include <turboquant/cache/sequence.hpp>
#include <turboquant/cache/sequence_edits.hpp>
#include <turboquant/core/owned.hpp>
#include <turboquant/core/rows.hpp>
#include <turboquant/core/status.hpp>

namespace turboquant::detail {

class CacheCore : public SequenceEdits {
 public:
  using SequenceEdits::SequenceEdits;

  Status create_sequence(SequenceId& created) noexcept {
    Sequence* sequence = make_sequence();
    if (sequence == nullptr) return {Status::out_of_memory, "sequence"};
    return adopt(sequence, created);
  }

  Status fork(SequenceId source_id, std::size_t length, SequenceId& created) noexcept {
    Sequence* source = nullptr;
    if (const Status status = mutable_sequence(source_id, source); status.code != Status::ok) return status;
    if (const Status status = check_shorten(*source, length); status.code != Status::ok) return status;
    // All memory of the child first, so that a failure changes nothing.
    Sequence* child = make_sequence();
    if (child == nullptr) return {Status::out_of_memory, "sequence"};
    Status status;
    for (std::size_t l = 0; l < layers_.size() && status == Status::ok; ++l) {
      const LayerState& from = source->layers[l];
      LayerState& to = child->layers[l];
      if (!copy(from.entries, to.entries) || !copy(from.first_tiles, to.first_tiles) || !copy(from.tail, to.tail) ||
          !to.coding.reserve(from.coding.size() + pages_to_begin(from))) {
        status = {Status::out_of_memory, "sequence"};
      }
    }
    SequenceId id;
    if (status == Status::ok && !table_.insert(child, id)) status = {Status::out_of_memory, "sequence"};
    // Children share finished pages, so nobody may still be writing them.
    if (status == Status::ok) {
      status = finish_pages(*source);
      if (status != Status::ok) (void)table_.remove(id);
    }
    if (status != Status::ok) {
      // Nothing is shared yet: forget the pointers before they are released.
      for (std::size_t l = 0; l < layers_.size(); ++l) forget_blocks(child->layers[l]);
      destroy(child);
      return status;
    }
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerState& from = source->layers[l];
      LayerState& to = child->layers[l];
      (void)copy(from.coding, to.coding);  // room was made
      to.length = from.length;
      to.first = from.first;
      to.base = from.base;
      to.coding_work = from.coding_work;
      to.tail_begin = from.tail_begin;
      to.held_begin = from.held_begin;
      to.dropped_entries = from.dropped_entries;
      for_each_block(to, [](Block* block) { block->retain(); });
      shorten(*child, l, length);
    }
    account(*child);
    created = id;
    return {};
  }

  Status truncate(SequenceId id, std::size_t length) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    if (const Status status = check_shorten(*sequence, length); status.code != Status::ok) return status;
    for (std::size_t l = 0; l < layers_.size(); ++l) shorten(*sequence, l, length);
    account(*sequence);
    return {};
  }

  // Removes the positions [begin, end); later tokens move down.
  Status erase(SequenceId id, std::size_t begin, std::size_t end) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    const std::size_t length = shortest(*sequence);
    if (end > length || begin > end)
      return bad_shape(begin > end ? "begin" : "end", begin > end ? end : length, begin > end ? begin : end);
    if (begin == end) return {};
    if (const Status status = check_aligned(*sequence); status.code != Status::ok) return status;
    if (end == length) return truncate(id, begin);
    const std::size_t left = length - (end - begin);
    Array<Block*> fresh;
    std::size_t needed = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      if (const Status status = check_erase(layers_[l], state, begin, end); status.code != Status::ok) return status;
      if (!state.entries.reserve(state.entries.size() + 1)) return {Status::out_of_memory, "entries"};
      needed += shared_tiles(state, begin);
    }
    if (!acquire_tiles(*sequence, begin, needed, fresh)) return {Status::out_of_memory, "tiles"};
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      if (!is_traceless(state, begin, left)) {
        erase_codes_and_rows(*sequence, l, begin, end, fresh);
        continue;
      }
      own_tiles(layers_[l], state, begin, npos, fresh);
      for (std::size_t from = end; from < length; ++from) move_row(layers_[l], state, from, begin + (from - end));
      shorten(*sequence, l, left, begin);
    }
    while (!fresh.empty()) release_last(fresh);
    account(*sequence);
    return {};
  }

  // Of the tokens from `begin` on keeps begin + tokens[i], i ascending.
  Status keep(SequenceId id, std::size_t begin, std::span<const std::uint32_t> tokens) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    const std::size_t length = shortest(*sequence);
    if (begin > length) return bad_shape("begin", length, begin);
    std::size_t next = 0;
    for (const std::uint32_t token : tokens) {
      if (token < next) return bad_shape("tokens", next, token);  // not ascending
      if (token >= length - begin) return bad_shape("tokens", length - begin, token);
      next = std::size_t{token} + 1;
    }
    if (const Status status = check_aligned(*sequence); status.code != Status::ok) return status;
    const std::size_t left = begin + tokens.size();
    if (left == length) return {};
    if (const Status status = check_shorten(*sequence, left); status.code != Status::ok) return status;
    Array<Block*> fresh;
    std::size_t needed = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerState& state = sequence->layers[l];
      if (!is_traceless(state, begin, left)) return bad_shape("begin", state.coded_end(), begin);
      needed += shared_tiles(state, begin);
    }
    if (!acquire_tiles(*sequence, begin, needed, fresh)) return {Status::out_of_memory, "tiles"};
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      own_tiles(layers_[l], state, begin, npos, fresh);
      for (std::size_t i = 0; i < tokens.size(); ++i) move_row(layers_[l], state, begin + tokens[i], begin + i);
      shorten(*sequence, l, left, begin);
    }
    while (!fresh.empty()) release_last(fresh);
    account(*sequence);
    return {};
  }

  Status reserve(SequenceId id, std::size_t tokens) noexcept {
    Sequence* sequence = nullptr;
    if (const Status status = mutable_sequence(id, sequence); status.code != Status::ok) return status;
    if (tokens > kMostTokens) return bad_shape("tokens", kMostTokens, tokens);
    if (tokens == 0) {
      end_reserve(*sequence);
      return {};
    }
    Owned<std::size_t[]> needed(new (std::nothrow) std::size_t[pool_.class_count()]());
    if (!needed) return {Status::out_of_memory, "reserve"};
    const auto pages_of = [&](const LayerState& state) {
      const std::size_t held = pages_before_coding(state) + state.coding.size();
      return saturating_subtract(rule_.pages_begun(state.base, state.length + tokens), held);
    };
    const auto tiles_of = [&](const LayerState& state) {
      // One for every 16 tokens that are ever in the tail at once, and two partial ones that may have to be copied.
      // Those that the tail leaves behind come back to the reserve (recycle).
      const std::size_t widest = (std::min)(tokens, rule_.recent_tokens + rule_.page_tokens + rule_.rollback_tokens);
      return layout::round_up(widest, 16) / 16 + 1 + 2 +
             (state.length < state.first ? (std::min)(tokens, state.first - state.length) / 16 + 1 : 0);
    };
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      needed[layers_[l].page_class] += pages_of(sequence->layers[l]);
      needed[layers_[l].tile_class] += tiles_of(sequence->layers[l]);
    }
    // Tables grow for what can be had only.
    std::size_t room = pool_.room();
    for (unsigned c = 0; c < pool_.class_count(); ++c) {
      const std::size_t missing = saturating_subtract(needed[c], sequence->reserved[c].size());
      if (missing > room / pool_.block_bytes(c)) return {Status::out_of_memory, "reserve"};
      room -= missing * pool_.block_bytes(c);
    }
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      const std::size_t pages = pages_of(state), tiles = tiles_of(state);
      if (!state.entries.reserve(state.entries.size() + state.coding.size() + pages) ||
          !state.coding.reserve(state.coding.size() + pages) || !state.tail.reserve(state.tail.size() + tiles) ||
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
        if (enough) pool_.touch(block);
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
    std::size_t scratch_bytes = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      scratch_bytes = (std::max)(scratch_bytes, layers_[l].encode_scratch_bytes());
      if (!state.entries.reserve(state.entries.size() + state.coding.size() + pages_to_begin(state) + 1)) {
        return {Status::out_of_memory, "entries"};
      }
    }
    const Scratch scratch(scratch_bytes);
    Array<Block*> fresh;
    Status status;
    if (!scratch || !fresh.reserve(layers_.size())) status = {Status::out_of_memory, "pages"};
    for (std::size_t l = 0; l < layers_.size() && status == Status::ok; ++l) {
      Block* block = nullptr;
      if (tokens_to_seal(sequence->layers[l]) > 0) {
        block = pool_.acquire(layers_[l].page_class);  // a reserve is for tokens to come
        if (block == nullptr) status = {Status::out_of_memory, "pages"};
      }
      (void)fresh.push_back(block);
    }
    if (status == Status::ok) status = finish_pages(*sequence);
    if (status != Status::ok) {
      for (Block* block : fresh) {
        if (block != nullptr) pool_.release(block);
      }
      return status;
    }
    for (std::size_t l = 0; l < layers_.size(); ++l) seal(*sequence, l, fresh[l], scratch.get());
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
      const Status status = check_rows(ConstRows(rows), side == Side::key ? kKeyFields : kValueFields,
                                       layer.shape.kv_heads, layer.dim(side));
      if (status.code != Status::ok) return status;
      if (begin > state.length || rows.tokens > state.length - begin) {
        return bad_shape(side == Side::key ? "keys.tokens" : "values.tokens",
                         state.length - (std::min)(begin, state.length), rows.tokens);
      }
      if (begin + rows.tokens > state.first && begin < state.held_begin && state.held_begin > state.first) {
        return {Status::behind_window, "begin", as_signed(state.held_begin), as_signed(begin)};
      }
    }
    const std::size_t coded = (std::max)(rule_.coded(state.base, state.length), state.tail_begin);
    for (const Side side : {Side::key, Side::value}) {
      const Rows& rows = side == Side::key ? keys : values;
      for (std::size_t t = 0; t < rows.tokens; ++t) {
        for (std::size_t head = 0; head < layer.shape.kv_heads; ++head) {
          float out[kMaxDim];
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
    use.slab_bytes = pool_.slab_bytes();
    use.table_bytes = table_.bytes() + table_bytes_.load(std::memory_order_relaxed);
    use.work_bytes = spare().bytes();
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
    state.coding.clear();
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
      if (state.held_begin <= state.first || length <= state.first) continue;
      // The last query of the shortened sequence sees the keys from here on.
      const std::size_t needed = (std::max)(saturating_subtract(length, layers_[l].shape.window), state.first);
      if (needed < state.held_begin) {
        return {Status::behind_window, "length", as_signed(state.held_begin + layers_[l].shape.window),
                as_signed(length)};
      }
    }
    return {};
  }

  // What is left of a windowed layer must be all that its next query sees.
  Status check_erase(const Layer& layer, const LayerState& state, std::size_t begin, std::size_t end) const noexcept {
    if (state.held_begin <= state.first) return {};
    const std::size_t left = state.length - (end - begin);
    const std::size_t gone = (std::min)(end, state.held_begin) - (std::min)(begin, state.held_begin);
    const std::size_t first = state.first - ((std::min)(end, state.first) - (std::min)(begin, state.first));
    if ((std::max)(saturating_subtract(left, layer.shape.window), first) < state.held_begin - gone) {
      return {Status::behind_window, "end", as_signed(state.held_begin), as_signed(end)};
    }
    return {};
  }

  // `count` raw tiles for own_tiles, layer by layer from the end; false: nothing was taken.
  bool acquire_tiles(const Sequence& sequence, std::size_t begin, std::size_t count, Array<Block*>& fresh) noexcept {
    if (!fresh.reserve(count)) return false;
    for (std::size_t l = layers_.size(); l-- > 0;) {
      for (std::size_t i = shared_tiles(sequence.layers[l], begin); i > 0 && fresh.size() < count; --i) {
        Block* block = pool_.acquire(layers_[l].tile_class);
        if (block == nullptr) {
          while (!fresh.empty()) release_last(fresh);
          return false;
        }
        (void)fresh.push_back(block);
      }
    }
    return true;
  }

  // All finished pages of all layers coded, none in work. A failure changes nothing that can be seen.
  Status finish_pages(Sequence& sequence) noexcept {
    std::size_t pages = 0, scratch_bytes = 0;
    bool open = false;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence.layers[l];
      const std::size_t count = pages_to_begin(state);
      pages += count;
      open = open || (!state.coding.empty() && state.coding_work < layers_[l].page_work());
      scratch_bytes = (std::max)(scratch_bytes, layers_[l].encode_scratch_bytes());
      if (!state.coding.reserve(state.coding.size() + count)) return {Status::out_of_memory, "entries"};
    }
    if (pages == 0 && !open) return {};
    const Scratch scratch(scratch_bytes);
    Array<Block*> fresh;
    bool enough = static_cast<bool>(scratch) && fresh.reserve(pages);
    for (std::size_t l = 0; enough && l < layers_.size(); ++l) {
      for (std::size_t i = pages_to_begin(sequence.layers[l]); enough && i > 0; --i) {
        Block* block = pool_.acquire(layers_[l].page_class);
        enough = block != nullptr && fresh.push_back(block);
      }
    }
    if (!enough) {
      while (!fresh.empty()) release_last(fresh);
      return {Status::out_of_memory, "pages"};
    }
    std::size_t next = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::size_t count = pages_to_begin(sequence.layers[l]);
      SequenceStore::finish_pages(sequence.layers[l], layers_[l], {fresh.data() + next, count}, scratch.get());
      next += count;
    }
    account(sequence);
    return {};
  }

  // Tokens behind the finished pages.
  std::size_t tokens_to_seal(const LayerState& state) const noexcept {
    return saturating_subtract(state.length, state.coded_end()) % rule_.page_tokens;
  }

  // Requires that all finished pages are coded. `page`: for the rest, null if there is none.
  void seal(Sequence& sequence, std::size_t index, Block* page, std::byte* scratch) noexcept {
    const Layer& layer = layers_[index];
    LayerState& state = sequence.layers[index];
    const auto add = [&](Block* block, std::size_t count) {
      (void)state.entries.push_back(Entry{block, state.coded_end(), 0, static_cast<std::uint32_t>(count)});
    };
    const std::size_t rest = tokens_to_seal(state);
    for (Block* block : state.coding) add(block, rule_.page_tokens);
    state.coding.clear();
    if (page != nullptr) {
      layer.clear_padding(page->memory);
      code_held(state, layer, page->memory, state.coded_end(), rest, 0, scratch);
      add(page, rest);
    }
    if (state.length > state.first) {
      cut_tiles(sequence, index, state.tail, 0);
      state.base = state.tail_begin = state.length;
    }
    free_behind_window(layer, state);
  }

  void read_row(const Layer& layer, const LayerState& state, Side side, std::size_t head, std::size_t at,
                std::size_t coded, float* out) const noexcept {
    const std::size_t width = layer.dim(side);
    const bool first = at < state.first;
    if (first || at >= coded) {
      const Array<Block*>& from = first ? state.first_tiles : state.tail;
      const std::size_t offset = first ? at : at - state.tail_begin;
      const bfloat16* row = layer.tile_row(from[offset / 16], side, head, offset % 16);
      for (std::size_t i = 0; i < width; ++i) out[i] = to_float(row[i]);
      return;
    }
    const auto entry = std::upper_bound(state.entries.begin(), state.entries.end(), at,
                                        [](std::size_t p, const Entry& e) { return p < e.end(); });
    layer.operations->decode_row(side, layer.part(entry->page->memory, side, head), entry->first + (at - entry->begin),
                                 out);
    layer.operations->rotate_back(layer.rotation(side), out, out);
  }
};

}  // namespace turboquant::detail
