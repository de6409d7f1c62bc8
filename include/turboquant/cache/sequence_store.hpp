// What a cache is made of, layers, pool and sequences, and the moves of blocks between them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <turboquant/cache/config.hpp>
#include <turboquant/cache/layer.hpp>
#include <turboquant/cache/page_pool.hpp>
#include <turboquant/cache/sequence.hpp>
#include <turboquant/core/owned.hpp>
#include <turboquant/core/refuse.hpp>
#include <turboquant/core/spare.hpp>
#include <turboquant/core/status.hpp>

namespace turboquant::detail {

// The mechanics under CacheCore: blocks of a sequence are taken, shared, let go and cut here; calls are checked there.
class SequenceStore {
 public:
  SequenceStore(CacheConfig config, std::span<const Operations* const> formats)
      : config_(std::move(config)),
        rule_{config_.page_tokens, config_.recent_tokens, config_.rollback_tokens},
        pool_(config_.memory, config_.max_bytes) {
    const std::string why = why_invalid(config_, formats.size());
    if (!why.empty()) refuse(why);
    layers_.reserve(config_.layers.size());
    for (const LayerShape& shape : config_.layers) {
      Layer layer(shape, config_.page_tokens, formats[shape.format]);
      layer.key_rotation = rotation(layer.shape.head_dim);
      layer.value_rotation = rotation(layer.shape.value_dim);
      if (!pool_.add_class(layer.page.bytes, BlockUse::page, layer.page_class) ||
          !pool_.add_class(layer.tile_bytes(), BlockUse::tile, layer.tile_class)) {
        refuse_for_memory();
      }
      layers_.push_back(layer);
    }
  }

  SequenceStore(const SequenceStore&) = delete;
  SequenceStore& operator=(const SequenceStore&) = delete;

  ~SequenceStore() {
    table_.for_each([this](Sequence* sequence) { destroy(sequence); });
  }

  const CacheConfig& config() const noexcept { return config_; }
  const CodingRule& rule() const noexcept { return rule_; }
  std::size_t layer_count() const noexcept { return layers_.size(); }
  const Layer& layer(std::size_t index) const noexcept { return layers_[index]; }
  PagePool& pool() noexcept { return pool_; }
  Sequence* find(SequenceId id) const noexcept { return table_.find(id); }

  // ---- for the attention plan
  // ----------------------------------------------------------------------------------------

  // A plan's memory, while nobody plans.
  Spare& spare() const noexcept { return spare_; }

  // A block of the class, from what the sequence reserved or else from the pool; null: out of memory.
  Block* take(Sequence& sequence, unsigned size_class, bool& from_reserve) noexcept {
    Array<Block*>& reserved = sequence.reserved[size_class];
    from_reserve = !reserved.empty();
    if (!from_reserve) return pool_.acquire(size_class);
    Block* block = reserved.back();
    reserved.erase(reserved.size() - 1, reserved.size());
    return block;
  }

  // Pages between base and coded_end(): the number of the first page in `coding`.
  std::size_t pages_before_coding(const LayerState& state) const noexcept {
    return (state.coded_end() - state.base) / rule_.page_tokens;
  }

  // Puts a block into the reserve, or the pool if that has no room for it.
  void give_back(Sequence& sequence, unsigned size_class, Block* block) noexcept {
    Array<Block*>& reserved = sequence.reserved[size_class];
    if (reserved.size() == reserved.capacity() || !reserved.push_back(block)) pool_.release(block);
  }

  // Lets go of a block of a layer: into the sequence's reserve as long as that has promises to keep.
  void recycle(Sequence& sequence, const LayerState& state, unsigned size_class, Block* block) noexcept {
    if (state.length < state.reserved_length && block->is_exclusive()) {
      give_back(sequence, size_class, block);
    } else {
      pool_.release(block);
    }
  }

  // Frees what is left of a reserve once all its tokens have come, and ends its promise: a later truncation has none to
  // keep blocks for.
  void settle_reserve(Sequence& sequence) noexcept {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      if (sequence.layers[l].length < sequence.layers[l].reserved_length) return;
    }
    end_reserve(sequence);
  }

  void end_reserve(Sequence& sequence) noexcept {
    for (std::size_t l = 0; l < layers_.size(); ++l) sequence.layers[l].reserved_length = 0;
    for (unsigned c = 0; c < pool_.class_count(); ++c) {
      while (!sequence.reserved[c].empty()) release_last(sequence.reserved[c]);
    }
  }

  // Frees whole pages that no query of the sequence, shortened by rollback_tokens, can see.
  void free_behind_window(const Layer& layer, LayerState& state) noexcept {
    if (layer.shape.window == 0) return;
    const std::size_t visible = saturating_subtract(state.length, rule_.rollback_tokens + layer.shape.window);
    std::size_t count = 0;
    while (count < state.entries.size() && state.entries[count].end() <= visible) {
      state.held_begin = state.entries[count].end();
      pool_.release(state.entries[count++].page);
    }
    state.entries.erase(0, count);
    state.dropped_entries += count;
  }

  // Brings the total of table bytes up to date after the sequence's tables may have grown.
  void account(Sequence& sequence) noexcept {
    std::size_t bytes = sizeof(Sequence);
    for (std::size_t l = 0; l < layers_.size(); ++l) bytes += sequence.layers[l].table_bytes();
    for (unsigned c = 0; c < pool_.class_count(); ++c) {
      bytes += sizeof(Array<Block*>) + sequence.reserved[c].capacity() * sizeof(Block*);
    }
    table_bytes_.fetch_add(bytes - sequence.accounted_bytes, std::memory_order_relaxed);
    sequence.accounted_bytes = bytes;
  }

  // The sequence for a call that changes it.
  Status mutable_sequence(SequenceId id, Sequence*& sequence) const noexcept {
    sequence = table_.find(id);
    if (sequence == nullptr) return {Status::unknown_sequence, "sequence"};
    if (sequence->is_planned()) return {Status::bad_shape, "pending plan"};
    return {};
  }

  static Status bad_shape(const char* field, std::size_t expected, std::size_t found) noexcept {
    return {Status::bad_shape, field, as_signed(expected), as_signed(found)};
  }
  static std::int64_t as_signed(std::size_t n) noexcept { return static_cast<std::int64_t>(n); }

 protected:
  RotationView rotation(std::size_t dim) {
    auto found = std::find_if(rotations_.begin(), rotations_.end(), [dim](const auto& r) { return r->dim() == dim; });
    if (found == rotations_.end()) {
      rotations_.push_back(Owned<Rotation>(new Rotation(config_.seed, dim)));
      found = rotations_.end() - 1;
    }
    return view_of(**found);
  }

  Sequence* make_sequence() noexcept {
    Owned<Sequence> sequence(new (std::nothrow) Sequence);
    if (!sequence) return nullptr;
    sequence->layers.reset(new (std::nothrow) LayerState[layers_.size()]);
    sequence->reserved.reset(new (std::nothrow) Array<Block*>[pool_.class_count()]);
    if (!sequence->layers || !sequence->reserved) return nullptr;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      LayerState& state = sequence->layers[l];
      state.first = state.base = state.tail_begin = state.held_begin = config_.first_tokens;
    }
    return sequence.release();
  }

  void destroy(Sequence* sequence) noexcept {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for_each_block(sequence->layers[l], [this](Block* block) { pool_.release(block); });
    }
    for (unsigned c = 0; c < pool_.class_count(); ++c) {
      for (Block* block : sequence->reserved[c]) pool_.release(block);
    }
    table_bytes_.fetch_sub(sequence->accounted_bytes, std::memory_order_relaxed);
    delete sequence;
  }

  template <class Visit>
  static void for_each_block(LayerState& state, Visit visit) {
    for (const Entry& entry : state.entries) visit(entry.page);
    for (Block* tile : state.first_tiles) visit(tile);
    for (Block* tile : state.tail) visit(tile);
    for (Block* page : state.coding) visit(page);
  }

  void release_last(Array<Block*>& blocks) noexcept {
    pool_.release(blocks.back());
    blocks.erase(blocks.size() - 1, blocks.size());
  }

  std::size_t shortest(const Sequence& sequence) const noexcept {
    std::size_t length = sequence.layers[0].length;
    for (std::size_t l = 1; l < layers_.size(); ++l) length = (std::min)(length, sequence.layers[l].length);
    return length;
  }

  // Shortens one layer. Exact where the raw rows that the shorter sequence needs are still there. Tokens from `changed`
  // on are not what they were: nothing coded of them may stay.
  void shorten(Sequence& sequence, std::size_t index, std::size_t length, std::size_t changed = npos) noexcept {
    LayerState& state = sequence.layers[index];
    if (length == state.length) return;
    const std::size_t codable = (std::min)(length, changed);
    const std::size_t coded = rule_.coded(state.base, length);
    state.length = length;
    keep_coding(sequence, index,
                saturating_subtract(rule_.pages_begun(state.base, codable), pages_before_coding(state)));
    if (length <= state.first) {
      cut_entries(sequence, index, 0, 0);
      state.first = state.base = state.tail_begin = state.held_begin = config_.first_tokens;
      state.dropped_entries = 0;
    } else if (length >= state.base && coded >= state.tail_begin) {
      cut_entries(sequence, index, coded, codable);
      if (changed != npos && state.held_begin > coded) {
        // Codes that the window let go of are those of other tokens now; their rows are raw still, to be coded anew.
        keep_coding(sequence, index, 0);
        state.dropped_entries -= (state.held_begin - coded) / rule_.page_tokens;
        state.held_begin = coded;
      }
    } else {
      state.base = (std::min)(length, state.tail_begin);
      cut_entries(sequence, index, state.base, codable);
      if (state.tail_begin > state.base) {
        cut_tiles(sequence, index, state.tail, 0);
        state.tail_begin = state.base;
      }
    }
    cut_tiles(sequence, index, state.tail, layout::tile_count(saturating_subtract(length, state.tail_begin)));
    cut_tiles(sequence, index, state.first_tiles, layout::tile_count((std::min)(length, state.first)));
  }

  // Drops what lies at or behind position `end`. Pages before `codable` go back among those coded ahead, to be read
  // when their time comes again.
  void cut_entries(Sequence& sequence, std::size_t index, std::size_t end, std::size_t codable) noexcept {
    LayerState& state = sequence.layers[index];
    while (!state.entries.empty() && state.entries.back().end() > end) {
      Entry& last = state.entries.back();
      if (last.begin < end) {
        last.count = static_cast<std::uint32_t>(end - last.begin);
        return;
      }
      const bool ahead = last.begin >= state.base && last.end() < codable;
      const bool alone = state.coding.empty();
      if (ahead && state.coding.push_front(last.page)) {
        if (alone) state.coding_work = layers_[index].page_work();
      } else {
        keep_coding(sequence, index, 0);  // no memory for the table: they will be coded again
        recycle(sequence, state, layers_[index].page_class, last.page);
      }
      state.entries.erase(state.entries.size() - 1, state.entries.size());
    }
  }

  // Lets go of all pages coded ahead but the first `count`.
  void keep_coding(Sequence& sequence, std::size_t index, std::size_t count) noexcept {
    LayerState& state = sequence.layers[index];
    while (state.coding.size() > count) {
      recycle(sequence, state, layers_[index].page_class, state.coding.back());
      state.coding.erase(state.coding.size() - 1, state.coding.size());
      state.coding_work = layers_[index].page_work();
    }
  }

  // Blocks that finish_pages needs: pages whose tokens are all there, without those that are begun.
  std::size_t pages_to_begin(const LayerState& state) const noexcept {
    const std::size_t finished = saturating_subtract(state.length, state.coded_end()) / rule_.page_tokens;
    return saturating_subtract(finished, state.coding.size());
  }

  // Codes every finished page to the end. Requires pages_to_begin() blocks, as much room in `coding`, and scratch.
  void finish_pages(LayerState& state, const Layer& layer, std::span<Block* const> fresh, std::byte* scratch) noexcept {
    std::size_t number = state.coding.size();
    for (Block* page : fresh) {
      layer.clear_padding(page->memory);
      (void)state.coding.push_back(page);
    }
    if (state.coding.empty()) return;
    std::size_t done = 0;
    if (number > 0) --number, done = state.coding_work;
    for (; number < state.coding.size(); ++number, done = 0) {
      const std::size_t begin = state.coded_end() + number * rule_.page_tokens;
      code_held(state, layer, state.coding[number]->memory, begin, rule_.page_tokens, done, scratch);
    }
    state.coding_work = layer.page_work();
  }

  // Codes a page of the tokens [begin, begin + count), of which `done` of the work is done, from raw rows of the tail.
  void code_held(const LayerState& state, const Layer& layer, std::byte* page, std::size_t begin, std::size_t count,
                 std::size_t done, std::byte* scratch) const noexcept {
    for (std::size_t unit = 0; unit < layer.units(); ++unit) {
      const Side side = Layer::side_of(unit);
      layer.encode(page, unit, count, layer.parts_begun(unit, done), layer.parts(side), scratch,
                   [&](std::size_t t, bfloat16* out) {
                     const std::size_t at = begin + t - state.tail_begin;
                     std::copy_n(layer.tile_row(state.tail[at / 16], side, unit / 2, at % 16), layer.dim(side), out);
                   });
    }
  }

  void cut_tiles(Sequence& sequence, std::size_t index, Array<Block*>& blocks, std::size_t count) noexcept {
    while (blocks.size() > count) {
      recycle(sequence, sequence.layers[index], layers_[index].tile_class, blocks.back());
      blocks.erase(blocks.size() - 1, blocks.size());
    }
  }

  CacheConfig config_;
  CodingRule rule_;
  PagePool pool_;
  SequenceTable table_;
  std::vector<Layer> layers_;
  std::vector<Owned<Rotation>> rotations_;
  std::atomic<std::size_t> table_bytes_{0};
  mutable Spare spare_;
};

}  // namespace turboquant::detail
