// Offsets beyond 2^31, 2^32 and 2^33: rows of the caller, heads of a page, rows of a tile and blocks of the pool, in
// address space that is hardly touched.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/block.hpp"
#include "cache/sparse_memory.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::DType;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::PageCodec;
using turboquant::PageItem;
using turboquant::PageSpan;
using turboquant::Rows;
using turboquant::SequenceId;
using turboquant::Side;
using turboquant::TQ4;
using turboquant::TQ8;
using turboquant::detail::BlockUse;
using turboquant::detail::PagePool;

constexpr std::size_t kGiB = std::size_t{1} << 30;
constexpr std::size_t kTokens = 3, kHeads = 2, kDim = 32;

struct Strides {
  const char* name;
  std::int64_t token, head;  // in elements; the lowest 32 bits are small, so that what is cut off stays in the mapping
};
constexpr std::int64_t k31 = (std::int64_t{1} << 31) + 64, k32 = (std::int64_t{1} << 32) + 64,
                       k33 = (std::int64_t{1} << 33) + 64;
constexpr std::array<Strides, 5> kStrides{{{"tokens 2^31 apart", k31, 32},
                                           {"tokens 2^32 apart", k32, 32},
                                           {"tokens 2^33 apart", k33, 32},
                                           {"heads 2^33 apart", 32, k33},
                                           {"tokens 2^33 backwards", -k33, 32}}};

/// Several views of the same strides, a mebibyte apart.
class FarRows {
 public:
  FarRows(std::byte* memory, DType type, const Strides& strides) : type_(type), strides_(strides), first_(memory) {
    if (strides.token < 0)
      first_ -= strides.token * std::int64_t{kTokens - 1} * static_cast<std::int64_t>(turboquant::size_of(type));
  }
  /// From the first byte that any view of these strides has to the end of the last.
  static std::size_t bytes(DType type, const Strides& strides) {
    const std::int64_t far = std::abs(strides.token) * std::int64_t{kTokens - 1} + strides.head;
    return static_cast<std::size_t>(far) * turboquant::size_of(type) + (std::size_t{1} << 23);
  }

  Rows view(std::size_t number, std::size_t heads) const {
    return Rows(first_ + (number << 20), type_, kTokens, heads, kDim, static_cast<std::ptrdiff_t>(strides_.token),
                static_cast<std::ptrdiff_t>(strides_.head));
  }

 private:
  DType type_;
  Strides strides_;
  std::byte* first_;
};

std::byte* row_of(const Rows& rows, std::size_t token, std::size_t head) {
  const std::int64_t elements = static_cast<std::int64_t>(token) * std::int64_t{rows.token_stride} +
                                static_cast<std::int64_t>(head) * std::int64_t{rows.head_stride};
  return static_cast<std::byte*>(rows.data) + elements * static_cast<std::int64_t>(turboquant::size_of(rows.type));
}
void copy_rows(const Rows& from, const Rows& to) {
  for (std::size_t t = 0; t < to.tokens; ++t)
    for (std::size_t h = 0; h < to.heads; ++h)
      std::memcpy(row_of(to, t, h), row_of(from, t, h), kDim * turboquant::size_of(to.type));
}
bool same_rows(const Rows& a, const Rows& b) {
  for (std::size_t t = 0; t < a.tokens; ++t)
    for (std::size_t h = 0; h < a.heads; ++h)
      if (std::memcmp(row_of(a, t, h), row_of(b, t, h), kDim * turboquant::size_of(a.type)) != 0) return false;
  return true;
}

/// Rows of one type without gaps.
struct NearRows {
  std::vector<std::byte> bytes;
  Rows rows;

  NearRows(DType type, std::size_t heads)
      : bytes(kTokens * heads * kDim * turboquant::size_of(type)),
        rows(bytes.data(), type, kTokens, heads, kDim, static_cast<std::ptrdiff_t>(heads * kDim), kDim) {}
  NearRows(DType type, const Block& block) : NearRows(type, block.heads) {
    for (std::size_t t = 0; t < block.tokens; ++t)
      for (std::size_t h = 0; h < block.heads; ++h) turboquant::store_row(rows, t, h, block.row(t, h));
  }
};

BatchItem item_of(SequenceId id, const Rows& keys, const Rows& values, const Rows& queries, const Rows& out) {
  BatchItem item;
  item.sequence = id;
  item.keys = keys;
  item.values = values;
  item.queries = queries;
  item.out = out;
  return item;
}

TEST(FarOffsets, RowsOfTheCaller) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16})
    for (const Strides& strides : kStrides) {
      SCOPED_TRACE(std::string(strides.name) + ", type " + std::to_string(static_cast<int>(type)));
      const SparseMemory memory(FarRows::bytes(type, strides));
      if (!memory) GTEST_SKIP() << "no address space of " << (FarRows::bytes(type, strides) >> 30) << " GiB";
      const FarRows far(memory.data(), type, strides);
      const NearRows keys(type, gaussian_block(1, kTokens, kHeads, kDim)),
          values(type, gaussian_block(2, kTokens, kHeads, kDim)),
          queries(type, gaussian_block(3, kTokens, kHeads, kDim));
      copy_rows(keys.rows, far.view(0, kHeads));
      copy_rows(values.rows, far.view(1, kHeads));
      copy_rows(queries.rows, far.view(2, kHeads));
      ASSERT_FALSE(same_rows(keys.rows, values.rows));

      for (const std::size_t recent : {0U, 64U}) {
        KVCache<TQ4> cache(
            CacheConfig{.layers = {LayerShape{.kv_heads = kHeads, .head_dim = kDim}}, .recent_tokens = recent});
        const SequenceId near_id = new_sequence(cache), far_id = new_sequence(cache);
        const NearRows out(type, kHeads);
        const std::array<BatchItem, 2> batch{
            item_of(near_id, keys.rows, values.rows, queries.rows, out.rows),
            item_of(far_id, far.view(0, kHeads), far.view(1, kHeads), far.view(2, kHeads), far.view(3, kHeads))};
        ASSERT_OK(turboquant::attend(cache, 0, batch));
        EXPECT_TRUE(same_rows(out.rows, far.view(3, kHeads))) << "outputs";

        std::vector<float> near_logits(kTokens * kHeads * kTokens, kNaN), far_logits(near_logits);
        ASSERT_OK(turboquant::logits(cache, near_id, 0, queries.rows, near_logits.data()));
        ASSERT_OK(turboquant::logits(cache, near_id, 0, far.view(2, kHeads), far_logits.data()));
        EXPECT_TRUE(same_bits(near_logits, far_logits)) << "logits";

        ASSERT_OK(cache.seal(near_id));
        ASSERT_OK(cache.seal(far_id));
        const NearRows read_keys(type, kHeads), read_values(type, kHeads);
        ASSERT_OK(cache.read(near_id, 0, 0, read_keys.rows, read_values.rows));
        ASSERT_OK(cache.read(far_id, 0, 0, far.view(4, kHeads), far.view(5, kHeads)));
        EXPECT_TRUE(same_rows(read_keys.rows, far.view(4, kHeads))) << "keys that were read";
        EXPECT_TRUE(same_rows(read_values.rows, far.view(5, kHeads))) << "values that were read";
      }
    }
}

TEST(FarOffsets, NonFiniteRowsAreFound) {
  const SparseMemory memory(FarRows::bytes(DType::f32, kStrides[2]));
  if (!memory) GTEST_SKIP() << "no address space of 64 GiB";
  const FarRows far(memory.data(), DType::f32, kStrides[2]);
  KVCache<TQ4> cache(CacheConfig{.layers = {LayerShape{.kv_heads = kHeads, .head_dim = kDim}}});
  const SequenceId id = new_sequence(cache);
  BatchItem item = item_of(id, far.view(0, kHeads), far.view(1, kHeads), {}, {});
  std::memcpy(row_of(far.view(1, kHeads), 2, 1) + 4 * (kDim - 1), &kNaN, sizeof kNaN);
  EXPECT_STATUS(non_finite_input, turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
}

// 65,536 heads of 128 coordinates and 256 tokens in 8 bits: a page of 4.1 GiB, in which three heads hold something.
TEST(FarOffsets, HeadsOfALargePage) {
  constexpr std::size_t kAll = 65536, kWide = 128, kPage = 256, kHeld = 16;
  const PageCodec<TQ8> codec({.kv_heads = kAll, .head_dim = kWide}, kPage),
      single({.kv_heads = 1, .head_dim = kWide}, kPage);
  const std::size_t header = 4 * kAll, center = kWide, scales = 2 * kPage, codes = kPage * kWide,
                    head_bytes = 2 * (center + scales + codes);
  ASSERT_EQ(codec.page_bytes(), header + kAll * head_bytes);
  ASSERT_GT(codec.page_bytes(), 4 * kGiB);
  const SparseMemory page(codec.page_bytes());
  if (!page) GTEST_SKIP() << "no address space of 4 GiB";

  const Block query = gaussian_block(3, 1, 1, kWide);
  std::map<std::size_t, Outcome> expected;
  std::map<std::size_t, Block> expected_values;
  std::vector<std::byte> workspace(single.workspace_bytes() + 64), small(single.page_bytes() + 64);
  const auto aligned = [](std::vector<std::byte>& bytes) {
    void* begin = bytes.data();
    std::size_t space = bytes.size();
    return static_cast<std::byte*>(std::align(64, bytes.size() - 64, begin, space));
  };
  std::byte* const one = aligned(small);
  for (const std::size_t head : {std::size_t{0}, kAll / 2 + 7, kAll - 1}) {
    const Block keys = gaussian_block(10 + head, kHeld, 1, kWide), values = gaussian_block(20 + head, kHeld, 1, kWide);
    ASSERT_OK(single.encode_page(keys.rows(), values.rows(), one, aligned(workspace)));
    std::memcpy(page.data() + header + head * head_bytes, one + single.page_bytes() - head_bytes, head_bytes);
    std::memcpy(page.data() + 4 * head, one, 4);  // scales of the centres: key, value
    Outcome& outcome = expected[head] = Outcome{{}, Block(1, 1, kWide, kNaN), {kNaN}};
    const PageSpan span{one, 0, kHeld};
    PageItem item{.pages = {&span, 1}, .queries = query.rows(), .out = outcome.out.rows(), .lse = outcome.lse.data()};
    ASSERT_OK(turboquant::attend_pages(single, std::span<const PageItem>(&item, 1)));
    Block read_keys(1, 1, kWide), &read_values = expected_values[head] = Block(1, 1, kWide);
    ASSERT_OK(single.read_page(one, kHeld - 1, read_keys.rows(), read_values.rows()));
  }

  Outcome all{{}, Block(1, kAll, kWide, kNaN), std::vector<float>(kAll, kNaN)};
  const PageSpan span{page.data(), 0, kHeld};
  PageItem item{.pages = {&span, 1}, .queries = query.rows(), .out = all.out.rows(), .lse = all.lse.data()};
  item.queries.heads = kAll;
  item.queries.head_stride = 0;
  ASSERT_OK(turboquant::attend_pages(codec, std::span<const PageItem>(&item, 1)));
  for (const auto& [head, outcome] : expected) {
    EXPECT_EQ(std::memcmp(all.out.row(0, head), outcome.out.row(0), 4 * kWide), 0) << head;
    EXPECT_EQ(all.lse[head], outcome.lse[0]) << head;
    EXPECT_NE(outcome.out.row(0)[0], 0.0F);
  }
  for (const std::size_t head : {std::size_t{1}, kAll - 2}) EXPECT_EQ(all.out.row(0, head)[0], 0.0F) << head;

  Block& values = all.out;
  ASSERT_OK(codec.read_page(page.data(), kHeld - 1, {}, values.rows()));
  for (const auto& [head, row] : expected_values)
    EXPECT_EQ(std::memcmp(values.row(0, head), row.row(0), 4 * kWide), 0) << head;
}

// The largest tile, 65,536 heads of 1,024 coordinates in keys and values: 4 GiB, whose last value is its last bytes.
TEST(FarOffsets, RowsOfALargeTile) {
  using turboquant::detail::Layer;
  const PageCodec<TQ4> codec({.kv_heads = 65536, .head_dim = 1024}, 16);
  const Layer& layer = turboquant::detail::CacheAccess::layer(codec);
  ASSERT_EQ(layer.tile_bytes(), 4 * kGiB);
  const SparseMemory memory(layer.tile_bytes());
  if (!memory) GTEST_SKIP() << "no address space of 4 GiB";
  turboquant::detail::Block block;
  block.memory = memory.data();
  const auto offset = [&](Side side, std::size_t head, std::size_t token) {
    return reinterpret_cast<std::byte*>(layer.tile_row(&block, side, head, token)) - memory.data();
  };
  EXPECT_EQ(offset(Side::key, 65535, 15), std::ptrdiff_t{2 * kGiB - 2048});
  EXPECT_EQ(offset(Side::value, 0, 0), std::ptrdiff_t{2 * kGiB});
  EXPECT_EQ(offset(Side::value, 65535, 15), std::ptrdiff_t{4 * kGiB - 2048});
}

/// Hands out sparse memory.
struct SparseSource {
  std::map<void*, std::unique_ptr<SparseMemory>> blocks;

  turboquant::MemorySource source() {
    return {
        this,
        [](void* context, std::size_t bytes, std::size_t) -> void* {
          auto memory = std::make_unique<SparseMemory>(bytes);
          void* const at = memory->data();
          if (at != nullptr) static_cast<SparseSource*>(context)->blocks[at] = std::move(memory);
          return at;
        },
        [](void* context, void* memory, std::size_t) { static_cast<SparseSource*>(context)->blocks.erase(memory); }};
  }
};

TEST(FarOffsets, BlocksOfThePool) {
  if (!SparseMemory(64 * kGiB)) GTEST_SKIP() << "no address space of 64 GiB";
  SparseSource source;
  constexpr std::size_t kBlock = 6 * kGiB + 64;
  {
    PagePool pool(source.source(), 5 * kBlock + 4096);
    unsigned page = 0, again = 0, small = 0, tile = 0;
    ASSERT_TRUE(pool.add_class(kBlock - 1, BlockUse::page, page));
    ASSERT_TRUE(pool.add_class(kBlock % (std::size_t{1} << 32), BlockUse::page, small));
    ASSERT_TRUE(pool.add_class(kBlock, BlockUse::page, again));
    ASSERT_TRUE(pool.add_class(kBlock, BlockUse::tile, tile));
    EXPECT_EQ(page, again);
    EXPECT_NE(page, small) << "the same but for what is beyond 32 bits";
    std::vector<turboquant::detail::Block*> blocks;
    for (std::size_t i = 0; i < 5; ++i) {
      blocks.push_back(pool.acquire(i == 4 ? tile : page));
      ASSERT_NE(blocks.back(), nullptr);
      blocks.back()->memory[kBlock - 1] = std::byte{static_cast<unsigned char>(i + 1)};
    }
    EXPECT_EQ(pool.live_bytes(BlockUse::page), 4 * kBlock);
    EXPECT_EQ(pool.live_bytes(BlockUse::tile), kBlock);
    EXPECT_EQ(pool.acquire(page), nullptr) << "beyond the limit";
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(blocks[i]->memory[kBlock - 1], std::byte(i + 1));
    for (turboquant::detail::Block* block : blocks) pool.release(block);
    EXPECT_EQ(pool.live_bytes(BlockUse::page), 0U);
  }
  EXPECT_TRUE(source.blocks.empty());
}

}  // namespace
