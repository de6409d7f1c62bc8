// Memory whose neighbours may not be touched.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <vector>

namespace tests {

/// `count` objects of T, zero at first, that end, or begin, at a page of memory that faults.
template <class T>
class Fenced {
 public:
  Fenced(std::size_t count, bool at_the_end)
      : bytes_(count * sizeof(T)), page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    inner_ = (bytes_ + page_ - 1) / page_ * page_;
    memory_ = static_cast<std::byte*>(mmap(nullptr, inner_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0));
    EXPECT_TRUE(inner_ == 0 || mprotect(memory_ + page_, inner_, PROT_READ | PROT_WRITE) == 0);
    data_ = reinterpret_cast<T*>(memory_ + page_ + (at_the_end ? inner_ - bytes_ : 0));
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  ~Fenced() { munmap(memory_, inner_ + 2 * page_); }

  T* data() { return data_; }
  T* fill(const std::vector<T>& from) {
    if (bytes_ != 0) std::memcpy(data_, from.data(), bytes_);
    return data_;
  }

 private:
  std::size_t bytes_, page_, inner_ = 0;
  std::byte* memory_ = nullptr;
  T* data_ = nullptr;
};

}  // namespace tests
