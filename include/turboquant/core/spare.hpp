// Memory that a call leaves behind for the next one.
#pragma once

#include <atomic>
#include <cstddef>

namespace turboquant::detail {

// What can be left behind.
struct Reusable {
  Reusable() = default;
  Reusable(const Reusable&) = delete;
  Reusable& operator=(const Reusable&) = delete;
  virtual ~Reusable() = default;
};

// Room for one object that nobody uses. Who takes it has it alone: any thread may.
class Spare {
 public:
  Spare() noexcept = default;
  ~Spare() { delete held_.load(std::memory_order_acquire); }
  Spare(const Spare&) = delete;
  Spare& operator=(const Spare&) = delete;

  // Null if there is none.
  [[nodiscard]] Reusable* take() noexcept {
    Reusable* taken = held_.exchange(nullptr, std::memory_order_acquire);
    if (taken != nullptr) bytes_.store(0, std::memory_order_relaxed);
    return taken;
  }
  // bytes: what it holds, itself included. Deletes what was there.
  void keep(Reusable* used, std::size_t bytes) noexcept {
    bytes_.store(bytes, std::memory_order_relaxed);
    delete held_.exchange(used, std::memory_order_acq_rel);
  }
  // That are held here, between calls.
  std::size_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<Reusable*> held_{nullptr};
  std::atomic<std::size_t> bytes_{0};
};

}  // namespace turboquant::detail
