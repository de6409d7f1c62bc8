// What memory() says against every byte that the program holds.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "cache/block.hpp"
#include "cache/replaced_new.hpp"

namespace {

constexpr std::size_t kSlab = std::size_t{1} << 21;  // the smallest; nothing else here is half as large
constexpr std::size_t kHeader = 64;

std::atomic<std::size_t> small_bytes{0}, slab_bytes{0}, slabs{0};

std::atomic<std::size_t> taken{0};  // blocks, since the start

// In front of every block.
struct Note {
  std::size_t bytes;
  void* memory;
};

}  // namespace

void* tests::take_block(std::size_t bytes, std::size_t alignment) noexcept {
  const std::size_t front = alignment > kHeader ? alignment : kHeader;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(front, (front + bytes + front - 1) / front * front));
  if (memory == nullptr) return nullptr;
  *reinterpret_cast<Note*>(memory + front - sizeof(Note)) = {bytes, memory};
  (bytes >= kSlab ? slab_bytes : small_bytes) += bytes;
  if (bytes >= kSlab) ++slabs;
  ++taken;
  return memory + front;
}
void tests::give_block(void* memory) noexcept {
  if (memory == nullptr) return;
  const Note note = *reinterpret_cast<Note*>(static_cast<std::byte*>(memory) - sizeof(Note));
  (note.bytes >= kSlab ? slab_bytes : small_bytes) -= note.bytes;
  if (note.bytes >= kSlab) --slabs;
  std::free(note.memory);
}

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::MemoryUse;
using turboquant::SequenceId;

TEST(MemoryCount, R05_BytesAreThoseThatAreHeld) {
  constexpr std::size_t kPage = 64, kHeads = 4, kDim = 128, kSequences = 40;
  const Block keys = gaussian_block(1, 10 * kPage, kHeads, kDim), values = gaussian_block(2, 10 * kPage, kHeads, kDim);
  for (const std::size_t recent : {std::size_t{0}, std::size_t{64}}) {
    CacheConfig config;
    config.layers[0].kv_heads = kHeads;
    config.recent_tokens = recent;
    KVCache<turboquant::TQ4> cache(config);
    std::vector<SequenceId> ids(kSequences);
    const std::size_t small_before = small_bytes, tables_before = cache.memory().table_bytes;
    ASSERT_EQ(slab_bytes, 0U);
    for (SequenceId& id : ids) ASSERT_OK(cache.create_sequence(id));
    std::size_t done = 0;
    for (const std::size_t n : {std::size_t{1}, kPage - 1, kPage, kPage + 1, 10 * kPage}) {
      for (const SequenceId id : ids) ASSERT_OK(append_only(cache, 0, id, keys.slice(done, n), values.slice(done, n)));
      done = n;
      const MemoryUse use = cache.memory();
      const std::size_t live = use.page_bytes + use.tail_bytes;
      EXPECT_LE(live, slab_bytes);
      EXPECT_EQ(slab_bytes, use.slab_bytes);
      // Of pages and of tiles: one slab that is not full and one to spare. Slabs are less than a block larger than
      // kSlab.
      EXPECT_LE(slab_bytes, live + 2 * 2 * kSlab * 3 / 2) << n;
      // Besides the tables, the pool keeps a note of every block, none smaller than 32 KiB, and two arrays of each
      // sequence have their length in front.
      const std::size_t notes = slabs * (sizeof(turboquant::detail::Slab) + 64 * sizeof(turboquant::detail::Block)) +
                                2 * kSequences * sizeof(std::size_t),
                        counted = small_bytes - small_before, told = use.table_bytes + use.work_bytes - tables_before;
      EXPECT_LE(told, counted) << n;
      EXPECT_LE(counted, told + notes) << n;
      // Bits per number, of keys and values both.
      if (recent == 0 && n % kPage == 0) {
        const std::size_t numbers = 2 * kSequences * kHeads * kDim * n;
        const double bits = 8 * static_cast<double>(use.page_bytes) / static_cast<double>(numbers);
        EXPECT_NEAR(bits, use.bits_per_coordinate, 1e-9);
        EXPECT_NEAR(bits, 4.266, 0.01);
      }
    }
    for (const SequenceId id : ids) cache.release(id);
    EXPECT_EQ(cache.memory().page_bytes + cache.memory().tail_bytes, 0U);
    EXPECT_LE(slab_bytes, 2 * kSlab * 3 / 2);
    EXPECT_EQ(slab_bytes, cache.memory().slab_bytes);
  }
  EXPECT_EQ(slab_bytes, 0U);
}

// Calls like the one before them ask for no memory, but for those that begin a page or a tile. What a large call needs
// does not stay.
TEST(MemoryCount, LikeCallsTakeNothing) {
  constexpr std::size_t kTokens = 300, kHeads = 2, kDim = 128;
  CacheConfig config;
  config.layers[0].kv_heads = kHeads;
  KVCache<turboquant::TQ4> cache(config);
  SequenceId id;
  ASSERT_OK(cache.create_sequence(id));
  const Block rows = gaussian_block(1, kTokens, kHeads, kDim), queries = gaussian_block(2, 4, 2 * kHeads, kDim);
  ASSERT_OK(append_only(cache, 0, id, rows, rows));
  ASSERT_GT(cache.memory().work_bytes, 0U);
  Block out(4, 2 * kHeads, kDim);
  std::vector<float> scores(4 * 2 * kHeads * kTokens);
  BatchItem item;
  item.sequence = id;
  item.queries = queries.rows();
  item.out = out.rows();
  const auto attend = [&] { return turboquant::attend(cache, 0, {&item, 1}); };
  const auto score = [&] { return turboquant::logits(cache, id, 0, queries.rows(), scores.data()); };
  ASSERT_OK(attend());
  ASSERT_OK(score());
  const std::size_t before = taken, kept = cache.memory().work_bytes;
  for (int call = 0; call < 3; ++call) {
    ASSERT_OK(attend());
    ASSERT_OK(score());
  }
  EXPECT_EQ(taken, before);
  EXPECT_EQ(cache.memory().work_bytes, kept);
  // One that fails leaves what there was.
  item.queries.heads = 3;
  EXPECT_FALSE(attend().code == turboquant::Status::ok);
  EXPECT_EQ(taken, before);
  EXPECT_EQ(cache.memory().work_bytes, kept);

  const Block many = gaussian_block(3, 64, 2 * kHeads, kDim);
  Block many_out(64, 2 * kHeads, kDim);
  item.queries = many.rows();
  item.out = many_out.rows();
  for (int call = 0; call < 2; ++call) {
    const std::size_t so_far = taken;
    ASSERT_OK(turboquant::attend(cache, 0, {&item, 1}, {}, [](std::size_t tasks, auto&& body) {
      for (std::size_t i = 0; i < tasks; ++i) body(i);
    }));
    EXPECT_GT(taken, so_far);
    EXPECT_LE(cache.memory().work_bytes, (std::size_t{1} << 20) + (std::size_t{1} << 16));
  }
}

// A page of 1.1 MiB leaves no room in a slab that none of its kind could use.
TEST(MemoryCount, SlabsAreMadeToMeasure) {
  CacheConfig config;
  config.layers[0].kv_heads = 128;
  config.recent_tokens = 0;
  config.rollback_tokens = 0;
  KVCache<turboquant::TQ4> cache(config);
  SequenceId id;
  ASSERT_OK(cache.create_sequence(id));
  const Block rows = gaussian_block(1, 64, 128, 128);
  for (int page = 0; page < 24; ++page) ASSERT_OK(append_only(cache, 0, id, rows, rows));
  const MemoryUse use = cache.memory();
  EXPECT_GT(use.page_bytes / 24, kSlab / 2);  // two of them are more than kSlab
  // Of pages and of tiles one slab that is not full, each smaller than two of the smallest.
  EXPECT_LE(use.slab_bytes, use.page_bytes + use.tail_bytes + 2 * kSlab * 2);
}

}  // namespace
