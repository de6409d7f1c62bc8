// The pool: pages and raw tiles as reference-counted blocks, cut from slabs of at least 2 MiB, under one limit.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>

#include <turboquant/core/array.hpp>
#include <turboquant/core/memory.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant::detail {

struct Slab;

enum class BlockUse : std::uint8_t { page, tile };

// One page or tile. Whoever holds the only reference may write; otherwise the bytes never change.
struct Block {
  std::byte* memory = nullptr;
  Slab* slab = nullptr;
  Block* next = nullptr;  // free list of the slab
  std::atomic<std::uint32_t> references{0};

  void retain() noexcept { references.fetch_add(1, std::memory_order_relaxed); }
  // Acquire: what other holders read or wrote before they let go has happened before.
  bool is_exclusive() const noexcept { return references.load(std::memory_order_acquire) == 1; }
};

struct Slab {
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  std::size_t block_count = 0, used = 0;
  Block* blocks = nullptr;
  Block* free = nullptr;
  Slab* next = nullptr;  // list of the class, doubly linked
  Slab* previous = nullptr;
  unsigned size_class = 0;
};

// Thread-safe. Blocks of one size class are cut from slabs of their own, which they fill; a slab that empties goes back
// to the source, except one per class. `max_bytes` limits the live blocks, rounded up to 64 bytes each.
class PagePool {
 public:
  PagePool(const MemorySource& source, std::size_t max_bytes) noexcept
      : source_(source.allocate != nullptr ? source : default_memory_source()), max_bytes_(max_bytes) {}

  ~PagePool() {
    for (SizeClass& size : classes_) {
      while (size.slabs != nullptr) {
        Slab* slab = size.slabs;
        unlink(size, slab);
        drop_slab(slab);
      }
      if (size.spare != nullptr) drop_slab(size.spare);
    }
  }

  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // The class of blocks of `bytes` for this use; false if there was no memory for the table. Not thread-safe: for
  // construction.
  [[nodiscard]] bool add_class(std::size_t bytes, BlockUse use, unsigned& index) noexcept {
    bytes = layout::round_up(bytes, kCacheLine);
    for (index = 0; index < classes_.size(); ++index) {
      if (classes_[index].block_bytes == bytes && classes_[index].use == use) return true;
    }
    return classes_.push_back(SizeClass{bytes, 0, nullptr, nullptr, use});
  }

  unsigned class_count() const noexcept { return static_cast<unsigned>(classes_.size()); }

  std::size_t block_bytes(unsigned size_class) const noexcept { return classes_[size_class].block_bytes; }

  // Bytes that live blocks may still take, as far as the limit goes.
  std::size_t room() const noexcept {
    const std::lock_guard lock(mutex_);
    if (max_bytes_ == 0) return ~std::size_t{0};
    return max_bytes_ > live_bytes_ ? max_bytes_ - live_bytes_ : 0;
  }

  // A block with one reference and unspecified contents, or null: out of memory.
  [[nodiscard]] Block* acquire(unsigned size_class) noexcept {
    const std::lock_guard lock(mutex_);
    SizeClass& size = classes_[size_class];
    if (max_bytes_ != 0 && (size.block_bytes > max_bytes_ || live_bytes_ > max_bytes_ - size.block_bytes))
      return nullptr;
    if ((size.slabs == nullptr || size.slabs->free == nullptr) && !add_slab(size, size_class)) return nullptr;
    Slab* slab = size.slabs;
    Block* block = slab->free;
    slab->free = block->next;
    ++slab->used;
    ++size.live;
    live_bytes_ += size.block_bytes;
    if (slab->free == nullptr) move_to_back(size, slab);
    block->references.store(1, std::memory_order_relaxed);
    return block;
  }

  // Writes to every memory page of a fresh block: from here on the operating system cannot refuse it, nor take its
  // time.
  void touch(Block* block) const noexcept {
    constexpr std::size_t kMemoryPage = 4096;
    const std::size_t bytes = classes_[block->slab->size_class].block_bytes;
    for (std::size_t offset = 0; offset < bytes; offset += kMemoryPage) block->memory[offset] = std::byte{0};
  }

  // Lets go of one reference.
  void release(Block* block) noexcept {
    if (block->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::lock_guard lock(mutex_);
    Slab* slab = block->slab;
    SizeClass& size = classes_[slab->size_class];
    const bool was_full = slab->free == nullptr;
    block->next = slab->free;
    slab->free = block;
    --slab->used;
    --size.live;
    live_bytes_ -= size.block_bytes;
    if (slab->used == 0) {
      unlink(size, slab);
      if (size.spare == nullptr) {
        size.spare = slab;
      } else {
        drop_slab(slab);
      }
    } else if (was_full && size.slabs != slab) {
      unlink(size, slab);
      push_front(size, slab);
    }
  }

  // Bytes of live blocks of one use.
  std::size_t live_bytes(BlockUse use) const noexcept {
    const std::lock_guard lock(mutex_);
    std::size_t total = 0;
    for (const SizeClass& size : classes_) total += size.use == use ? size.live * size.block_bytes : 0;
    return total;
  }

  // Bytes taken from the source.
  std::size_t slab_bytes() const noexcept {
    const std::lock_guard lock(mutex_);
    return slab_bytes_;
  }

 private:
  static constexpr std::size_t kSlabBytes = std::size_t{1} << 21;

  struct SizeClass {
    std::size_t block_bytes;
    std::size_t live;
    Slab* slabs;  // in use; those with room stand in front of full ones
    Slab* spare;  // one empty slab
    BlockUse use;
  };

  // Puts a slab with room in front.
  bool add_slab(SizeClass& size, unsigned size_class) noexcept {
    if (size.spare != nullptr) {
      push_front(size, size.spare);
      size.spare = nullptr;
      return true;
    }
    const std::size_t count = (kSlabBytes + size.block_bytes - 1) / size.block_bytes;
    const std::size_t bytes = count * size.block_bytes;
    Slab* slab = new (std::nothrow) Slab;
    Block* blocks = new (std::nothrow) Block[count];
    void* memory = slab != nullptr && blocks != nullptr ? allocate(bytes) : nullptr;
    if (memory == nullptr) {
      delete slab;
      delete[] blocks;
      return false;
    }
    slab->memory = static_cast<std::byte*>(memory);
    slab->bytes = bytes;
    slab->block_count = count;
    slab->blocks = blocks;
    slab->size_class = size_class;
    for (std::size_t i = count; i-- > 0;) {
      blocks[i].memory = slab->memory + i * size.block_bytes;
      blocks[i].slab = slab;
      blocks[i].next = slab->free;
      slab->free = &blocks[i];
    }
    slab_bytes_ += bytes;
    push_front(size, slab);
    return true;
  }

  // If the source has nothing left, empty slabs of other classes are given back first.
  void* allocate(std::size_t bytes) noexcept {
    void* memory = source_.allocate(source_.context, bytes, kCacheLine);
    if (memory != nullptr) return memory;
    bool dropped = false;
    for (SizeClass& size : classes_) {
      if (size.spare == nullptr) continue;
      drop_slab(size.spare);
      size.spare = nullptr;
      dropped = true;
    }
    return dropped ? source_.allocate(source_.context, bytes, kCacheLine) : nullptr;
  }

  void drop_slab(Slab* slab) noexcept {
    slab_bytes_ -= slab->bytes;
    if (source_.release != nullptr) source_.release(source_.context, slab->memory, slab->bytes);
    delete[] slab->blocks;
    delete slab;
  }

  static void push_front(SizeClass& size, Slab* slab) noexcept {
    slab->previous = nullptr;
    slab->next = size.slabs;
    if (size.slabs != nullptr) size.slabs->previous = slab;
    size.slabs = slab;
  }

  static void unlink(SizeClass& size, Slab* slab) noexcept {
    if (slab->previous != nullptr) slab->previous->next = slab->next;
    if (slab->next != nullptr) slab->next->previous = slab->previous;
    if (size.slabs == slab) size.slabs = slab->next;
    slab->previous = slab->next = nullptr;
  }

  // The front slab became full. It goes behind the next one if that has room; full slabs need no order among
  // themselves.
  static void move_to_back(SizeClass& size, Slab* slab) noexcept {
    Slab* second = slab->next;
    if (second == nullptr || second->free == nullptr) return;
    Slab* last = second;
    while (last->next != nullptr && last->next->free != nullptr) last = last->next;
    unlink(size, slab);
    slab->previous = last;
    slab->next = last->next;
    if (last->next != nullptr) last->next->previous = slab;
    last->next = slab;
  }

  MemorySource source_;
  std::size_t max_bytes_;
  mutable std::mutex mutex_;
  std::size_t live_bytes_ = 0, slab_bytes_ = 0;
  Array<SizeClass> classes_;
};

}  // namespace turboquant::detail
