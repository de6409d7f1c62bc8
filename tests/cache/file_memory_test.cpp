// What loading may cost: a file of nothing takes no memory whatever it claims, and memory that gives out leaves no
// trace. Names like S03 are cases of public reports.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <turboquant/cache/stream.hpp>
#include <vector>

#include "cache/counting_source.hpp"
#include "cache/damaged_file.hpp"

// Every allocation of the program is counted; those of the library, which do not throw, can be made to fail. Not
// inlined: g++ would warn of a `free` for a `new`.
namespace {
std::atomic<std::size_t> allocated_bytes{0};
std::atomic<std::ptrdiff_t> allocations_left{PTRDIFF_MAX};

void* counted(std::size_t bytes, std::size_t alignment) noexcept {
  allocated_bytes += bytes;
  return std::aligned_alloc(alignment, turboquant::layout::round_up(bytes + 1, alignment));
}
void* counted_or_throw(std::size_t bytes, std::size_t alignment) {
  void* memory = counted(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* counted_or_refused(std::size_t bytes, std::size_t alignment) noexcept {
  return allocations_left.fetch_sub(1) <= 0 ? nullptr : counted(bytes, alignment);
}
}  // namespace

#define NOT_INLINED [[gnu::noinline]]
NOT_INLINED void* operator new(std::size_t bytes) { return counted_or_throw(bytes, 16); }
NOT_INLINED void* operator new[](std::size_t bytes) { return counted_or_throw(bytes, 16); }
NOT_INLINED void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted_or_throw(bytes, static_cast<std::size_t>(alignment));
}
NOT_INLINED void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return counted_or_refused(bytes, 16);
}
NOT_INLINED void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return counted_or_refused(bytes, 16);
}
NOT_INLINED void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return counted_or_refused(bytes, static_cast<std::size_t>(alignment));
}
NOT_INLINED void operator delete(void* memory) noexcept { std::free(memory); }
NOT_INLINED void operator delete[](void* memory) noexcept { std::free(memory); }
NOT_INLINED void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
NOT_INLINED void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
NOT_INLINED void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
NOT_INLINED void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

constexpr std::size_t kPatience = std::size_t{1} << 20;  // what a refusal may allocate beyond the true content

TEST(FileDamage, S03ClaimsAreNotBelieved) {
  Mixed file(mixed_config(), 70);
  const std::uint64_t claims[] = {std::uint64_t{1} << 63,
                                  (std::uint64_t{1} << 32) + 1,
                                  ~std::uint64_t{0},
                                  std::uint64_t{1} << 48,
                                  (std::uint64_t{1} << 48) + 1,
                                  0,
                                  7,
                                  71,
                                  69};
  std::vector<std::size_t> places;
  for (std::size_t at = offset::page_tokens; at < offset::header_end; at += 8) places.push_back(at);
  for (const Section& section : file.sections) {
    if (section.kind == SectionKind::shape || section.kind == SectionKind::layer)
      for (std::size_t at = 0; at < section.size; at += 8) places.push_back(section.begin + at);
  }
  // Nobody can say how many pages a window let go of, if it was enough: others may have been erased since.
  const auto is_plausible = [&](std::size_t at, std::uint64_t claim) {
    for (const Section& section : file.sections) {
      if (section.kind != SectionKind::layer || at != section.begin + offset::dropped) continue;
      const std::uint64_t gone = number_at(file.bytes, section.begin + offset::held_begin) - 3;
      return gone == 0 ? claim == 0 : claim <= turboquant::kMostTokens && claim * 16 >= gone;
    }
    return false;
  };
  for (const std::size_t at : places)
    for (const std::uint64_t claim : claims)
      for (const std::size_t padding : {std::size_t{0}, std::size_t{1} << 30})
        for (const bool sealed : {true, false}) {
          if (number_at(file.bytes, at) == claim || is_plausible(at, claim)) continue;
          Bytes bytes = file.bytes;
          set_number(bytes, at, claim);
          if (sealed) seal_sections(bytes, file.sections);
          const std::size_t before = allocated_bytes;
          MemoryStream stream(bytes);
          stream.padding = padding;
          SequenceId created;
          const Status status = load(file.to, stream.source(), created);
          ASSERT_TRUE(status == Status::corrupt_file || status == Status::format_mismatch) << at << ' ' << claim;
          ASSERT_STRNE(status.field, "");
          ASSERT_LT(allocated_bytes - before, 2 * bytes.size() + kPatience) << at << ' ' << claim;
          ASSERT_LT(stream.read, bytes.size() + kPatience);
          ASSERT_TRUE(created == SequenceId{});
        }
  // Span counts and spans of a page.
  const Section& spans = file.find(SectionKind::spans);
  for (const std::uint64_t claim : {0U, 2U, 16U, 17U, 0xffffffffU, 0x80000000U})
    for (const std::size_t at : {spans.begin, spans.begin + 4, spans.begin + 8}) {
      if (number_at(file.bytes, at, 4) == claim) continue;
      EXPECT_STATUS(corrupt_file, file.load_bytes(file.forged(at, claim, 4)));
    }
  EXPECT_STATUS(corrupt_file, file.load_bytes(Bytes(file.bytes.begin(), file.bytes.begin() + 100)));
  EXPECT_STATUS(format_mismatch, file.load_bytes(Bytes(100)));
  // A file that somebody padded is read to its end, and no further.
  MemoryStream padded(file.bytes);
  padded.padding = std::size_t{1} << 30;
  EXPECT_OK(file.load_stream(padded));
  EXPECT_EQ(padded.read, file.bytes.size());
}

TEST(FileDamage, HeaderClaimsOfAHugeCacheCostNothing) {
  // The cache itself is configured for 2^40 raw rows; a short file that announces them gets no memory for them.
  CacheConfig config = small_config();
  config.recent_tokens = std::size_t{1} << 40;
  Small file(config, 20);
  for (const std::uint64_t length : {std::uint64_t{1} << 39, std::uint64_t{1} << 32, std::uint64_t{1} << 20}) {
    const Bytes bytes = file.forged(offset::length, length);
    const std::size_t before = allocated_bytes;
    MemoryStream stream(bytes);
    stream.padding = std::size_t{1} << 40;
    SequenceId created;
    EXPECT_STATUS(corrupt_file, load(file.to, stream.source(), created));
    EXPECT_LT(allocated_bytes - before, kPatience);
  }
}

TEST(FileDamage, MemoryThatGivesOutAnywhere) {
  CountingSource memory;
  CacheConfig config = mixed_config();
  Mixed file(config, 70);
  config.memory = memory.source();
  // The slabs of the pool.
  for (std::size_t allowed = 0;; ++allowed) {
    MixedCache cache(config);
    memory.allow(allowed);
    MemoryStream stream(file.bytes);
    SequenceId created;
    const Status status = load(cache, stream.source(), created);
    memory.allow(static_cast<std::size_t>(-1));
    EXPECT_EQ(status == Status::ok, !(created == SequenceId{}));
    if (status == Status::ok) {
      EXPECT_GT(allowed, 5U);
      break;
    }
    ASSERT_TRUE(status == Status::out_of_memory);
    EXPECT_EQ(cache.memory().page_bytes + cache.memory().tail_bytes, 0U);
  }
  // Everything else the library allocates.
  for (std::ptrdiff_t allowed = 0;; ++allowed) {
    const turboquant::MemoryUse before = file.to.memory();
    MemoryStream stream(file.bytes);
    SequenceId created;
    allocations_left = allowed;
    const Status status = load(file.to, stream.source(), created);
    allocations_left = PTRDIFF_MAX;
    if (status == Status::ok) {
      EXPECT_GT(allowed, 20);
      break;
    }
    ASSERT_TRUE(status == Status::out_of_memory);
    ASSERT_TRUE(created == SequenceId{});
    ASSERT_EQ(file.to.memory().page_bytes, before.page_bytes);
    ASSERT_EQ(file.to.memory().tail_bytes, before.tail_bytes);
  }
  for (std::ptrdiff_t allowed = 0;; ++allowed) {
    MemorySink sink;
    allocations_left = allowed;
    const Status status = save(file.from, file.id, sink.sink());
    allocations_left = PTRDIFF_MAX;
    if (status == Status::ok) {
      EXPECT_EQ(sink.bytes, file.bytes);
      EXPECT_GT(allowed, 0);
      break;
    }
    ASSERT_TRUE(status == Status::out_of_memory);
  }
}

TEST(FileDamage, LoadingTakesTheMemoryOfItsContent) {
  // 4,000 tokens in 2 MB: the sequence's blocks, one section and the tables, and not the file once more.
  CacheConfig config = small_config();
  config.layers = {LayerShape{.kv_heads = 4, .head_dim = 128}};
  config.page_tokens = 64;
  Small file(config, 4000);
  KVCache<turboquant::TQ4> other(config);
  const std::size_t before = allocated_bytes;
  MemoryStream stream(file.bytes);
  SequenceId created;
  ASSERT_OK(load(other, stream.source(), created));
  EXPECT_LT(allocated_bytes - before, file.bytes.size() + 2 * (std::size_t{1} << 21) + kPatience);
}

}  // namespace
