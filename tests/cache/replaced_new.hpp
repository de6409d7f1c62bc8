// Replaces operator new of a whole test program; include it in one source, which defines take_block and give_block.
#pragma once

#include <cstddef>
#include <new>

namespace tests {

/// `bytes` bytes, aligned, or null.
void* take_block(std::size_t bytes, std::size_t alignment) noexcept;
/// Takes back what take_block returned; null is nothing.
void give_block(void* memory) noexcept;

inline void* take_or_throw(std::size_t bytes, std::size_t alignment) {
  void* memory = take_block(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
inline constexpr std::size_t kNewAlignment = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace tests

// Not inlined: g++ would take the pair of an inlined new and a called delete for a mistake.
#define TESTS_NEW [[gnu::noinline]] void*
#define TESTS_DELETE [[gnu::noinline]] void
using TestsNoThrow = const std::nothrow_t&;
using TestsAlign = std::align_val_t;
// clang-format off
TESTS_NEW operator new(std::size_t n) { return tests::take_or_throw(n, tests::kNewAlignment); }
TESTS_NEW operator new[](std::size_t n) { return tests::take_or_throw(n, tests::kNewAlignment); }
TESTS_NEW operator new(std::size_t n, TestsNoThrow) noexcept { return tests::take_block(n, tests::kNewAlignment); }
TESTS_NEW operator new[](std::size_t n, TestsNoThrow) noexcept { return tests::take_block(n, tests::kNewAlignment); }
TESTS_NEW operator new(std::size_t n, TestsAlign a) { return tests::take_or_throw(n, std::size_t(a)); }
TESTS_NEW operator new[](std::size_t n, TestsAlign a) { return tests::take_or_throw(n, std::size_t(a)); }
TESTS_NEW operator new(std::size_t n, TestsAlign a, TestsNoThrow) noexcept {
  return tests::take_block(n, std::size_t(a));
}
TESTS_NEW operator new[](std::size_t n, TestsAlign a, TestsNoThrow) noexcept {
  return tests::take_block(n, std::size_t(a));
}
TESTS_DELETE operator delete(void* p) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete[](void* p) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete(void* p, std::size_t) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete[](void* p, std::size_t) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete(void* p, TestsNoThrow) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete[](void* p, TestsNoThrow) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete(void* p, TestsAlign) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete[](void* p, TestsAlign) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete(void* p, std::size_t, TestsAlign) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete[](void* p, std::size_t, TestsAlign) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete(void* p, TestsAlign, TestsNoThrow) noexcept { tests::give_block(p); }
TESTS_DELETE operator delete[](void* p, TestsAlign, TestsNoThrow) noexcept { tests::give_block(p); }
// clang-format on
