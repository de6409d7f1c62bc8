// A sequence, per layer a table of entries (page, first, count) and raw tiles; and the table of all sequences.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>

#include <turboquant/cache/coding_rule.hpp>
#include <turboquant/cache/page_pool.hpp>
#include <turboquant/core/array.hpp>
#include <turboquant/core/owned.hpp>

namespace turboquant {

/// Names a sequence. The generation makes a released id stale for good.
struct SequenceId {
  std::uint32_t index = ~0u;     ///< place in the table; ~0: no sequence
  std::uint32_t generation = 0;  ///< counts the sequences that had this place
  /// True for the same sequence.
  friend bool operator==(const SequenceId&, const SequenceId&) = default;
};

namespace detail {

// `count` tokens of a page from its token `first` on, at positions [begin, begin + count) of the sequence.
struct Entry {
  Block* page;
  std::size_t begin;
  std::uint32_t first, count;

  std::size_t end() const { return begin + count; }
};

// One layer of a sequence. Positions: [0, first) raw in `first_tiles`; [held_begin, coded_end()) in entries, those
// before held_begin were freed behind the window; [tail_begin, length) raw in `tail`, whose tiles start at tail_begin +
// 16 k. Raw and coded ranges overlap by what rollback may need, raw rows and the pages in `coding` by what is coded
// ahead. Page borders lie at base + page_tokens k; coded_end() and tail_begin are such borders.
struct LayerState {
  std::size_t length = 0;
  std::size_t first = 0;  // so many first tokens are raw for ever: first_tokens, less what was erased of them
  std::size_t base = 0;   // where page counting starts: first, or the tokens coded at the last seal, erase or cut
  std::size_t tail_begin = 0;
  std::size_t held_begin = 0;       // first, until pages are freed behind a window
  std::size_t reserved_length = 0;  // up to this length reserve() has promised memory
  std::size_t dropped_entries = 0;  // freed in front: entry i keeps the number dropped_entries + i for ever
  std::size_t coding_work = 0;      // work done on the last page in `coding`; those before it are complete
  Array<Entry> entries;
  Array<Block*> first_tiles;
  Array<Block*> tail;
  Array<Block*> coding;  // pages from coded_end() on that are being coded or wait for their time

  std::size_t coded_end() const { return entries.empty() ? held_begin : entries.back().end(); }
  std::size_t table_bytes() const {
    return sizeof(LayerState) + entries.capacity() * sizeof(Entry) +
           (first_tiles.capacity() + tail.capacity() + coding.capacity()) * sizeof(Block*);
  }
};

struct Sequence {
  Owned<LayerState[]> layers;
  Owned<Array<Block*>[]> reserved;            // per size class: blocks set aside by reserve()
  std::atomic<const void*> pending{nullptr};  // the plan that appends to this sequence
  std::size_t pending_item = 0;               // its item there
  std::atomic<std::uint32_t> readers{0};      // plans that read this sequence and have not ended
  std::size_t accounted_bytes = 0;            // what the cache's total of table bytes holds for this sequence

  // May be asked while another thread runs the plan: it ends with the store that this load acquires.
  bool is_planned() const {
    return pending.load(std::memory_order_acquire) != nullptr || readers.load(std::memory_order_acquire) != 0;
  }
};

// Sequences by id. Look-up takes no lock; slots never move.
class SequenceTable {
 public:
  SequenceTable() noexcept = default;
  SequenceTable(const SequenceTable&) = delete;
  SequenceTable& operator=(const SequenceTable&) = delete;
  ~SequenceTable() {
    for (auto& chunk : chunks_) delete[] chunk.load(std::memory_order_relaxed);
  }

  // The live sequence of this id, or null.
  Sequence* find(SequenceId id) const noexcept {
    const Slot* slot = slot_at(id.index);
    if (slot == nullptr) return nullptr;
    Sequence* sequence = slot->sequence.load(std::memory_order_acquire);
    return sequence != nullptr && slot->generation.load(std::memory_order_acquire) == id.generation ? sequence
                                                                                                    : nullptr;
  }

  // Takes over the sequence and names it; false if there was no memory.
  [[nodiscard]] bool insert(Sequence* sequence, SequenceId& id) noexcept {
    const std::lock_guard lock(mutex_);
    std::uint32_t index = 0;
    if (!free_.empty()) {
      index = free_.back();
      free_.erase(free_.size() - 1, free_.size());
    } else {
      index = count_;
      const auto [chunk, offset] = place(index);
      if (chunk >= kChunks) return false;
      if (chunks_[chunk].load(std::memory_order_relaxed) == nullptr) {
        Slot* slots = new (std::nothrow) Slot[kFirstChunk << chunk];
        if (slots == nullptr) return false;
        chunks_[chunk].store(slots, std::memory_order_release);
      }
      // Room on the free list now, so that release() cannot fail.
      if (free_.capacity() <= count_ && !free_.reserve(2 * (std::size_t{count_} + 1))) return false;
      ++count_;
    }
    Slot* slot = slot_at(index);
    id = SequenceId{index, slot->generation.load(std::memory_order_relaxed)};
    slot->sequence.store(sequence, std::memory_order_release);
    return true;
  }

  // Forgets the id and returns its sequence, which the caller frees.
  Sequence* remove(SequenceId id) noexcept {
    const std::lock_guard lock(mutex_);
    Sequence* sequence = find(id);
    if (sequence == nullptr) return nullptr;
    Slot* slot = slot_at(id.index);
    slot->sequence.store(nullptr, std::memory_order_release);
    slot->generation.fetch_add(1, std::memory_order_release);
    (void)free_.push_back(id.index);  // room was made by insert
    return sequence;
  }

  // Calls visit(sequence) for all live ones; for the destructor of the cache.
  template <class Visit>
  void for_each(Visit visit) const {
    for (std::uint32_t i = 0; i < count_; ++i) {
      Sequence* sequence = slot_at(i)->sequence.load(std::memory_order_acquire);
      if (sequence != nullptr) visit(sequence);
    }
  }

  std::size_t bytes() const noexcept {
    const std::lock_guard lock(mutex_);
    std::size_t total = free_.capacity() * sizeof(std::uint32_t);
    for (std::size_t c = 0; c < kChunks; ++c) {
      if (chunks_[c].load(std::memory_order_relaxed) != nullptr) total += (kFirstChunk << c) * sizeof(Slot);
    }
    return total;
  }

 private:
  struct Slot {
    std::atomic<Sequence*> sequence{nullptr};
    std::atomic<std::uint32_t> generation{1};
  };
  struct Place {
    std::size_t chunk, offset;
  };
  // Chunk c holds kFirstChunk << c slots.
  static constexpr std::size_t kFirstChunk = 16, kChunks = 26;

  static Place place(std::uint32_t index) noexcept {
    std::size_t chunk = 0, begin = 0;
    while (index - begin >= (kFirstChunk << chunk)) begin += kFirstChunk << chunk++;
    return {chunk, index - begin};
  }

  Slot* slot_at(std::uint32_t index) const noexcept {
    if (index == ~0u) return nullptr;
    const auto [chunk, offset] = place(index);
    if (chunk >= kChunks) return nullptr;
    Slot* slots = chunks_[chunk].load(std::memory_order_acquire);
    return slots != nullptr ? slots + offset : nullptr;
  }

  std::atomic<Slot*> chunks_[kChunks] = {};
  mutable std::mutex mutex_;
  Array<std::uint32_t> free_;
  std::uint32_t count_ = 0;
};

}  // namespace detail
}  // namespace turboquant
