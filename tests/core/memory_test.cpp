// The default memory source and scratch: alignment, pairing of the operators, failure without exceptions.
#include <turboquant/core/memory.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

namespace tq = turboquant;

namespace {

// The aligned operators of this program note the alignment of each block, so that a release with another one is seen.
struct Note {
  void *memory, *block;
  std::size_t alignment;
};

bool refuse = false;
std::vector<Note> live;
long long mismatched = 0;

}  // namespace

void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  const std::size_t align = std::size_t(alignment);
  if (refuse) {
    return nullptr;
  }
  void* block = std::malloc(bytes + align);
  if (block == nullptr) {
    return nullptr;
  }
  void* memory = static_cast<std::byte*>(block) + (align - reinterpret_cast<std::uintptr_t>(block) % align) % align;
  live.push_back({memory, block, align});
  return memory;
}

void operator delete(void* memory, std::align_val_t alignment) noexcept {
  if (memory == nullptr) {
    return;
  }
  const auto note = std::find_if(live.begin(), live.end(), [memory](const Note& n) { return n.memory == memory; });
  if (note == live.end()) {
    std::abort();  // never allocated, or released twice
  }
  mismatched += note->alignment != std::size_t(alignment);
  std::free(note->block);
  live.erase(note);
}

namespace {

bool is_aligned(const void* memory, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(memory) % alignment == 0;
}

}  // namespace

TEST(Memory, BlocksAreAlignedAndWritable) {
  const tq::MemorySource source = tq::default_memory_source();
  const std::size_t two_mib = std::size_t(1) << 21;
  for (const std::size_t bytes : {std::size_t(1), std::size_t(32), std::size_t(63), std::size_t(64), std::size_t(4097),
                                  two_mib - 1, two_mib, two_mib + 1, 3 * two_mib - 64}) {
    void* memory = source.allocate(source.context, bytes, 64);
    ASSERT_NE(memory, nullptr) << bytes;
    EXPECT_TRUE(is_aligned(memory, 64)) << bytes;
    EXPECT_TRUE(bytes < two_mib || is_aligned(memory, two_mib)) << bytes;
    std::memset(memory, 0x5a, bytes);
    EXPECT_EQ(static_cast<unsigned char*>(memory)[bytes - 1], 0x5a);
    source.release(source.context, memory, bytes);
  }
  EXPECT_TRUE(live.empty());
  EXPECT_EQ(mismatched, 0) << "released with another alignment than allocated";
}

TEST(Memory, AlignmentThatReleaseCouldNotKnowIsRefused) {
  const tq::MemorySource source = tq::default_memory_source();
  const std::size_t two_mib = std::size_t(1) << 21;
  EXPECT_EQ(source.allocate(source.context, 4096, 128), nullptr);
  EXPECT_EQ(source.allocate(source.context, two_mib, 2 * two_mib), nullptr);
  void* memory = source.allocate(source.context, two_mib, two_mib);
  ASSERT_NE(memory, nullptr);
  source.release(source.context, memory, two_mib);
  EXPECT_TRUE(live.empty());
}

TEST(Memory, FailureIsANullPointer) {
  const tq::MemorySource source = tq::default_memory_source();
  refuse = true;
  void* small = source.allocate(source.context, 64, 64);
  void* large = source.allocate(source.context, std::size_t(1) << 22, 64);
  const tq::Scratch scratch(100);
  refuse = false;
  EXPECT_EQ(small, nullptr);
  EXPECT_EQ(large, nullptr);
  EXPECT_FALSE(scratch);
  EXPECT_EQ(scratch.get(), nullptr);
}

// T02: sizes that are no multiple of the alignment, many times over, allocated and freed by one family of functions.
TEST(Memory, T02OddSizesManyTimes) {
  const tq::MemorySource source = tq::default_memory_source();
  for (std::size_t i = 0; i < 100000; ++i) {
    const std::size_t bytes = 32 + i % 97;
    void* memory = source.allocate(source.context, bytes, 64);
    ASSERT_TRUE(memory != nullptr && is_aligned(memory, 64)) << bytes;
    static_cast<unsigned char*>(memory)[bytes - 1] = 1;
    source.release(source.context, memory, bytes);
  }
  EXPECT_TRUE(live.empty());
  EXPECT_EQ(mismatched, 0);
}

TEST(Memory, ScratchIsAlignedAndReleased) {
  EXPECT_FALSE(std::is_copy_constructible_v<tq::Scratch>);
  for (const std::size_t bytes : {std::size_t(0), std::size_t(1), std::size_t(1000)}) {
    const tq::Scratch scratch(bytes);
    ASSERT_TRUE(scratch);
    EXPECT_TRUE(is_aligned(scratch.get(), 64));
    if (bytes != 0) std::memset(scratch.get(), 1, bytes);
    EXPECT_EQ(live.size(), 1u);
  }
  EXPECT_TRUE(live.empty());
  EXPECT_EQ(mismatched, 0);
}

TEST(Memory, ScratchGrows) {
  {
    tq::Scratch scratch;
    EXPECT_FALSE(scratch);
    EXPECT_EQ(scratch.size(), 0u);
    ASSERT_TRUE(scratch.reserve(0));
    EXPECT_TRUE(scratch);
    ASSERT_TRUE(scratch.reserve(1000));
    EXPECT_EQ(scratch.size(), 1000u);
    std::memset(scratch.get(), 1, 1000);
    const std::byte* memory = scratch.get();
    ASSERT_TRUE(scratch.reserve(999));
    EXPECT_EQ(scratch.get(), memory);
    EXPECT_EQ(scratch.size(), 1000u);
    EXPECT_EQ(live.size(), 1u);
    refuse = true;
    const bool grew = scratch.reserve(1001);
    refuse = false;
    EXPECT_FALSE(grew);
    EXPECT_FALSE(scratch);
    EXPECT_EQ(scratch.size(), 0u);
    EXPECT_TRUE(live.empty());
    ASSERT_TRUE(scratch.reserve(10));
    scratch.release();
    EXPECT_FALSE(scratch);
    EXPECT_TRUE(live.empty());
    ASSERT_TRUE(scratch.reserve(10));
  }
  EXPECT_TRUE(live.empty());
  EXPECT_EQ(mismatched, 0);
}

TEST(Memory, NoSourceByDefault) {
  const tq::MemorySource source;
  EXPECT_EQ(source.context, nullptr);
  EXPECT_EQ(source.allocate, nullptr);
  EXPECT_EQ(source.release, nullptr);
}
