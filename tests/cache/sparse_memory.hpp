// Address space that takes memory only where it is touched, for offsets beyond 32 bits.
#pragma once

#include <cstddef>

#if defined(__linux__)
#include <sys/mman.h>
#define TURBOQUANT_HAS_SPARSE_MEMORY 1
#endif

namespace tests {

/// `bytes` zero bytes at an address that is a multiple of 4096; false where the system has or gives no such memory.
class SparseMemory {
 public:
  explicit SparseMemory([[maybe_unused]] std::size_t bytes) {
#ifdef TURBOQUANT_EMULATED
    if (bytes > std::size_t{9} << 30) return;  // an emulator keeps tables of all that is mapped
#endif
#ifdef TURBOQUANT_HAS_SPARSE_MEMORY
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    memory_ = static_cast<std::byte*>(memory);
    bytes_ = bytes;
#endif
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() {
#ifdef TURBOQUANT_HAS_SPARSE_MEMORY
    if (memory_ != nullptr) munmap(memory_, bytes_);
#endif
  }

  explicit operator bool() const { return memory_ != nullptr; }
  std::byte* data() const { return memory_; }

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace tests
