// Scratch for tasks that run on any number of threads: a few slots, claimed for the time of a task.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <turboquant/core/memory.hpp>

namespace turboquant::detail {

// At most 64 tasks at once; more threads than that sleep until a slot is free. A thread gets the same one again, with
// what it has of it in its caches, unless another thread is there.
class Slots {
 public:
  static constexpr std::size_t kMost = 64;

  // Slots 0, 1, ..., count - 1, all of them free. Nobody may hold one.
  void reset(std::size_t count) noexcept { count_ = count; }

  // Requires that there are slots.
  std::size_t claim() noexcept {
    const std::size_t first = thread_number() % count_;
    std::size_t slot = find(first);
    if (slot != kMost) return slot;
    // Who gives one back after this sees that somebody waits, or did so before the search.
    waiting_.fetch_add(1);
    for (;;) {
      const std::uint32_t seen = returns_.load();
      slot = find(first);
      if (slot != kMost) break;
      returns_.wait(seen);
    }
    waiting_.fetch_sub(1);
    return slot;
  }

  void release(std::size_t slot) noexcept {
    flags_[slot].taken.store(false);
    if (waiting_.load() == 0) return;
    returns_.fetch_add(1);
    returns_.notify_all();
  }

 private:
  struct alignas(kCacheLine) Flag {
    std::atomic<bool> taken{false};
  };

  // The first free slot from `first` on, around, taken; kMost if there is none.
  std::size_t find(std::size_t first) noexcept {
    for (std::size_t k = 0; k < count_; ++k) {
      const std::size_t slot = first + k < count_ ? first + k : first + k - count_;
      std::atomic<bool>& taken = flags_[slot].taken;
      if (!taken.load() && !taken.exchange(true)) return slot;
    }
    return kMost;
  }

  // Threads are numbered as they come.
  static std::size_t thread_number() noexcept {
    static std::atomic<std::size_t> threads{0};
    static thread_local std::size_t number = 0;  // counted from 1
    if (number == 0) number = threads.fetch_add(1, std::memory_order_relaxed) + 1;
    return number - 1;
  }

  std::size_t count_ = 1;
  std::atomic<std::uint32_t> waiting_{0}, returns_{0};
  Flag flags_[kMost];
};

}  // namespace turboquant::detail
