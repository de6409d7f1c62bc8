// Where pages, tails and work space come from: the caller's memory source, its default, and aligned scratch.
#pragma once

#include <cstddef>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace turboquant {

/// Two functions that hand out and take back memory; both null: the library uses default_memory_source(). They are
/// called one at a time, from any thread, under a lock of the cache: they must not call the cache.
struct MemorySource {
  void* context = nullptr;  ///< first argument of both functions
  /// `bytes` bytes at an address that is a multiple of `alignment` (a power of two), or nullptr; must not throw.
  void* (*allocate)(void* context, std::size_t bytes, std::size_t alignment) = nullptr;
  /// Takes back what `allocate` returned for the same number of bytes; must not throw.
  void (*release)(void* context, void* memory, std::size_t bytes) = nullptr;
};

namespace detail {

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kHugePage = std::size_t(1) << 21;

/// The alignment of a block of the default source. It follows from the size alone, because `release` learns only the
/// size and the language wants the same alignment at operator delete as at operator new.
[[nodiscard]] constexpr std::size_t block_alignment(std::size_t bytes) noexcept {
  return bytes >= kHugePage ? kHugePage : kCacheLine;
}

inline void* allocate_block(void*, std::size_t bytes, std::size_t alignment) noexcept {
  if (alignment > block_alignment(bytes)) return nullptr;
  void* memory = ::operator new(bytes, std::align_val_t(block_alignment(bytes)), std::nothrow);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // Only advice: where the system has no huge pages the call fails and nothing is lost.
  if (memory != nullptr && bytes >= kHugePage) (void)::madvise(memory, bytes & ~(kHugePage - 1), MADV_HUGEPAGE);
#endif
  return memory;
}

inline void release_block(void*, void* memory, std::size_t bytes) noexcept {
  ::operator delete(memory, std::align_val_t(block_alignment(bytes)));
}

}  // namespace detail

/// Aligned operator new without exceptions. Blocks of at least 2 MiB are aligned to 2 MiB and advised for huge pages
/// where the system has them. Alignments above 64 bytes (2 MiB for such blocks) are refused with nullptr.
[[nodiscard]] inline MemorySource default_memory_source() noexcept {
  return MemorySource{nullptr, &detail::allocate_block, &detail::release_block};
}

/// Owns `bytes` bytes of uninitialised memory, aligned to 64 bytes. False if there was no memory.
class Scratch {
 public:
  /// No memory.
  Scratch() noexcept = default;
  /// Allocates; see operator bool.
  explicit Scratch(std::size_t bytes) noexcept : memory_(allocate(bytes)), bytes_(memory_ != nullptr ? bytes : 0) {}
  ~Scratch() { ::operator delete(memory_, std::align_val_t(detail::kCacheLine)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// Makes it at least `bytes` long. What it held may be gone; without memory for that, it holds none.
  [[nodiscard]] bool reserve(std::size_t bytes) noexcept {
    if (memory_ == nullptr || bytes > bytes_) {
      release();
      memory_ = allocate(bytes);
      bytes_ = memory_ != nullptr ? bytes : 0;
    }
    return memory_ != nullptr;
  }

  /// Frees it.
  void release() noexcept {
    ::operator delete(memory_, std::align_val_t(detail::kCacheLine));
    memory_ = nullptr;
    bytes_ = 0;
  }

  /// Bytes that there are.
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }
  /// The first byte; null if there was no memory.
  [[nodiscard]] std::byte* get() const noexcept { return memory_; }
  /// True if there was memory.
  [[nodiscard]] explicit operator bool() const noexcept { return memory_ != nullptr; }

 private:
  static std::byte* allocate(std::size_t bytes) noexcept {
    return static_cast<std::byte*>(::operator new(bytes, std::align_val_t(detail::kCacheLine), std::nothrow));
  }

  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace turboquant
