// The pool: blocks of several classes from slabs, reference counts, the limit, and memory going back to its source.
#include <turboquant/cache/page_pool.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <thread>
#include <vector>

namespace {

using turboquant::MemorySource;
using turboquant::detail::Block;
using turboquant::detail::BlockUse;
using turboquant::detail::PagePool;

// Counts what is out, and fails when `left` allocations are used up.
struct Source {
  std::size_t bytes = 0, blocks = 0, left = 1000;

  MemorySource source() {
    return {this,
            [](void* context, std::size_t size, std::size_t alignment) -> void* {
              auto* self = static_cast<Source*>(context);
              if (self->left == 0) return nullptr;
              --self->left;
              self->bytes += size;
              ++self->blocks;
              return std::aligned_alloc(alignment, size);
            },
            [](void* context, void* memory, std::size_t size) {
              auto* self = static_cast<Source*>(context);
              self->bytes -= size;
              --self->blocks;
              std::free(memory);
            }};
  }
};

TEST(PagePool, BlocksAreDisjointAlignedAndComeBack) {
  Source source;
  {
    PagePool pool(source.source(), 0);
    unsigned small = 0, large = 0, again = 0, tile = 0;
    ASSERT_TRUE(pool.add_class(1000, BlockUse::page, small));
    ASSERT_TRUE(pool.add_class(300000, BlockUse::page, large));
    ASSERT_TRUE(pool.add_class(1024, BlockUse::page, again));
    ASSERT_TRUE(pool.add_class(1024, BlockUse::tile, tile));
    EXPECT_EQ(small, again) << "both round up to 1024";
    EXPECT_NE(small, tile);
    std::vector<Block*> blocks;
    std::set<std::uintptr_t> starts;
    for (int i = 0; i < 5000; ++i) {
      Block* block = pool.acquire(i % 100 == 0 ? large : small);
      ASSERT_NE(block, nullptr);
      const auto at = reinterpret_cast<std::uintptr_t>(block->memory);
      EXPECT_EQ(at % 64, 0u);
      const auto [next, fresh] = starts.insert(at);
      ASSERT_TRUE(fresh);
      if (next != starts.begin()) {
        EXPECT_GE(at - *std::prev(next), 1024u);
      }
      blocks.push_back(block);
    }
    EXPECT_EQ(pool.live_bytes(BlockUse::page), 4950u * 1024 + 50u * 300032);
    EXPECT_EQ(pool.live_bytes(BlockUse::tile), 0u);
    // Every other one first, so that slabs empty in any order.
    for (std::size_t i = 0; i < blocks.size(); i += 2) pool.release(blocks[i]);
    for (std::size_t i = 1; i < blocks.size(); i += 2) pool.release(blocks[i]);
    EXPECT_EQ(pool.live_bytes(BlockUse::page), 0u);
    EXPECT_LE(source.blocks, 2u) << "at most one empty slab per class is kept";
  }
  EXPECT_EQ(source.blocks, 0u);
  EXPECT_EQ(source.bytes, 0u);
}

TEST(PagePool, AReferenceKeepsTheBlock) {
  PagePool pool({}, 0);
  unsigned page = 0;
  ASSERT_TRUE(pool.add_class(4096, BlockUse::page, page));
  Block* block = pool.acquire(page);
  EXPECT_TRUE(block->is_exclusive());
  block->retain();
  EXPECT_FALSE(block->is_exclusive());
  pool.release(block);
  EXPECT_TRUE(block->is_exclusive());
  EXPECT_EQ(pool.live_bytes(BlockUse::page), 4096u);
  pool.release(block);
  EXPECT_EQ(pool.live_bytes(BlockUse::page), 0u);
}

TEST(PagePool, LimitCountsAllClasses) {
  PagePool pool({}, 10 * 4096);
  unsigned page = 0, tile = 0;
  ASSERT_TRUE(pool.add_class(4096, BlockUse::page, page));
  ASSERT_TRUE(pool.add_class(8192, BlockUse::tile, tile));
  std::vector<Block*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(pool.acquire(page));
  for (Block* block : blocks) ASSERT_NE(block, nullptr);
  Block* last = pool.acquire(tile);
  ASSERT_NE(last, nullptr);
  EXPECT_EQ(pool.acquire(page), nullptr);
  EXPECT_EQ(pool.acquire(tile), nullptr);
  pool.release(blocks.back());
  EXPECT_EQ(pool.acquire(tile), nullptr) << "4096 bytes are left, a tile has 8192";
  blocks.back() = pool.acquire(page);
  EXPECT_NE(blocks.back(), nullptr);
  for (Block* block : blocks) pool.release(block);
  pool.release(last);
}

// When the source is exhausted, empty slabs of another class are given back and the call is tried again.
TEST(PagePool, EmptySlabsOfOtherClassesAreGivenUp) {
  struct Narrow {
    std::size_t out = 0;
  } narrow;
  const MemorySource source{&narrow,
                            [](void* context, std::size_t size, std::size_t alignment) -> void* {
                              auto* self = static_cast<Narrow*>(context);
                              if (self->out == 1) return nullptr;
                              ++self->out;
                              return std::aligned_alloc(alignment, size);
                            },
                            [](void* context, void* memory, std::size_t) {
                              --static_cast<Narrow*>(context)->out;
                              std::free(memory);
                            }};
  PagePool pool(source, 0);
  unsigned a = 0, b = 0;
  ASSERT_TRUE(pool.add_class(4096, BlockUse::page, a));
  ASSERT_TRUE(pool.add_class(8192, BlockUse::page, b));
  Block* first = pool.acquire(a);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(pool.acquire(b), nullptr);
  pool.release(first);
  Block* second = pool.acquire(b);
  EXPECT_NE(second, nullptr);
  pool.release(second);
}

TEST(PagePool, FailureOfTheSourceChangesNothing) {
  Source source;
  source.left = 1;
  PagePool pool(source.source(), 0);
  unsigned page = 0;
  ASSERT_TRUE(pool.add_class(std::size_t{1} << 20, BlockUse::page, page));
  Block* one = pool.acquire(page);
  Block* two = pool.acquire(page);
  ASSERT_NE(two, nullptr);
  EXPECT_EQ(pool.acquire(page), nullptr);
  EXPECT_EQ(pool.live_bytes(BlockUse::page), std::size_t{2} << 20);
  pool.release(one);
  Block* three = pool.acquire(page);
  EXPECT_NE(three, nullptr);
  pool.release(two);
  pool.release(three);
}

TEST(PagePool, ThreadsShareIt) {
  PagePool pool({}, 0);
  unsigned page = 0;
  ASSERT_TRUE(pool.add_class(64 * 1024, BlockUse::page, page));
  Block* shared = pool.acquire(page);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    shared->retain();
    threads.emplace_back([&pool, shared, page, t] {
      std::vector<Block*> mine;
      for (unsigned i = 0; i < 2000; ++i) {
        Block* block = pool.acquire(page);
        block->memory[0] = static_cast<std::byte>(t);
        mine.push_back(block);
        if (i % 3 != 0) {
          EXPECT_EQ(mine.back()->memory[0], static_cast<std::byte>(t));
          pool.release(mine.back());
          mine.pop_back();
        }
        if (mine.size() > 50) {
          for (Block* b : mine) pool.release(b);
          mine.clear();
        }
      }
      for (Block* b : mine) pool.release(b);
      pool.release(shared);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(shared->is_exclusive());
  EXPECT_EQ(pool.live_bytes(BlockUse::page), std::size_t{64} * 1024);
  pool.release(shared);
}

}  // namespace
