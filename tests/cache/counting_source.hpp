// A memory source that counts, fills, refuses and checks what it hands out.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <turboquant/turboquant.hpp>

namespace tests {

class CountingSource {
 public:
  explicit CountingSource(unsigned char fill = 0xff) : fill_(fill) {}
  CountingSource(const CountingSource&) = delete;
  CountingSource& operator=(const CountingSource&) = delete;
  ~CountingSource() { EXPECT_TRUE(blocks_.empty()) << blocks_.size() << " blocks were never released"; }

  turboquant::MemorySource source() { return {this, &allocate, &release}; }

  /// Refuse every allocation after the next `count`.
  void allow(std::size_t count) { allowed_ = count; }
  std::size_t bytes() const { return bytes_; }
  std::size_t blocks() const { return blocks_.size(); }
  std::size_t calls() const { return calls_; }
  std::size_t refusals() const { return refusals_; }

 private:
  struct Given {
    std::size_t bytes, alignment;
  };
  static constexpr std::size_t kGuard = 64;

  static void* allocate(void* context, std::size_t bytes, std::size_t alignment) {
    auto& self = *static_cast<CountingSource*>(context);
    const std::lock_guard lock(self.mutex_);
    ++self.calls_;
    if (self.allowed_ == 0) {
      ++self.refusals_;
      return nullptr;
    }
    --self.allowed_;
    auto* memory =
        static_cast<unsigned char*>(::operator new(bytes + kGuard, std::align_val_t(alignment), std::nothrow));
    if (memory == nullptr) return nullptr;
    std::memset(memory, self.fill_, bytes);
    std::memset(memory + bytes, 0xa5, kGuard);
    self.blocks_[memory] = {bytes, alignment};
    self.bytes_ += bytes;
    return memory;
  }
  static void release(void* context, void* memory, std::size_t bytes) {
    auto& self = *static_cast<CountingSource*>(context);
    const std::lock_guard lock(self.mutex_);
    const auto found = self.blocks_.find(memory);
    ASSERT_NE(found, self.blocks_.end()) << "released what was not handed out";
    EXPECT_EQ(found->second.bytes, bytes);
    const auto* guard = static_cast<const unsigned char*>(memory) + bytes;
    for (std::size_t i = 0; i < kGuard; ++i) EXPECT_EQ(guard[i], 0xa5) << "written behind the block";
    self.bytes_ -= bytes;
    const auto alignment = std::align_val_t(found->second.alignment);
    self.blocks_.erase(found);
    ::operator delete(memory, alignment);
  }

  std::mutex mutex_;
  std::map<void*, Given> blocks_;
  std::size_t bytes_ = 0, calls_ = 0, refusals_ = 0, allowed_ = static_cast<std::size_t>(-1);
  unsigned char fill_;
};

}  // namespace tests
