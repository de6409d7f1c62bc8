// Scratch for tasks that run on any number of threads: a few slots, claimed for the time of a task.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace turboquant::detail {

// At most 64 tasks at once; more threads than that sleep until a slot is free. A serial executor always gets the same
// one.
class Slots {
 public:
  static constexpr std::size_t kMost = 64;

  void reset(std::size_t count) noexcept {
    free_.store(count >= kMost ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1, std::memory_order_relaxed);
  }

  std::size_t claim() noexcept {
    for (;;) {
      std::uint64_t free = free_.load(std::memory_order_relaxed);
      while (free != 0) {
        if (free_.compare_exchange_weak(free, free & (free - 1), std::memory_order_acquire,
                                        std::memory_order_relaxed)) {
          return static_cast<std::size_t>(std::countr_zero(free));
        }
      }
      free_.wait(0, std::memory_order_relaxed);
    }
  }

  void release(std::size_t slot) noexcept {
    // Who sleeps has seen none free.
    if (free_.fetch_or(std::uint64_t{1} << slot, std::memory_order_release) == 0) free_.notify_all();
  }

 private:
  std::atomic<std::uint64_t> free_{0};
};

}  // namespace turboquant::detail
