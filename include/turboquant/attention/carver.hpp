// Scratch in pieces.
#pragma once

#include <cstddef>

#include <turboquant/core/memory.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant::detail {

// Hands out aligned pieces of a task's scratch; with a null base it only measures.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::size_t count) {
    T* piece = base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += layout::round_up(count * sizeof(T), kCacheLine);
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace turboquant::detail
