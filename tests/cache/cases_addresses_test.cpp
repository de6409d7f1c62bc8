// Layout faults from public bug reports that concern where rows of the caller lie: far apart, far along, at odd
// addresses, beside memory that must not be touched.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include "cache/fenced.hpp"
#endif

#include "cache/block.hpp"
#include "cache/coded_rows.hpp"
#include "cache/sparse_memory.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::DType;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::PolarQuant;
using turboquant::SequenceId;
using turboquant::Status;
using turboquant::TQ3;
using turboquant::TQ4;

// far_offsets_test has all kinds of rows, further apart.
TEST(LayoutCases, L16_OffsetsBeyond32Bits) {
  // Rows of the caller 2^31 elements apart, in address space that is never touched between them.
  constexpr std::size_t kStride = (std::size_t{1} << 31) + 16, kTokens = 3, kDim = 32;
  const std::size_t bytes = (kStride * (kTokens - 1) + kDim) * 2;
  const SparseMemory memory(bytes);
  if (!memory) GTEST_SKIP() << "no address space for 8 GiB";
  const Block keys = gaussian_block(1, kTokens, 1, kDim), values = gaussian_block(2, kTokens, 1, kDim);
  auto* far = reinterpret_cast<std::uint16_t*>(memory.data());
  for (std::size_t t = 0; t < kTokens; ++t)
    for (std::size_t i = 0; i < kDim; ++i)
      far[t * kStride + i] = oracle::bfloat16_bits(static_cast<double>(keys.row(t)[i]));
  KVCache<TQ4> cache(CacheConfig{.layers = {LayerShape{.kv_heads = 1, .head_dim = kDim}}});
  const SequenceId far_id = new_sequence(cache), near_id = new_sequence(cache);
  BatchItem item;
  item.sequence = far_id;
  item.keys = turboquant::ConstRows(memory.data(), DType::bf16, kTokens, 1, kDim);
  item.keys.token_stride = static_cast<std::ptrdiff_t>(kStride);
  item.values = values.rows();
  const Status status = turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1));
  ASSERT_OK(status);
  ASSERT_OK(append_only(cache, 0, near_id, keys, values));
  const Block query = gaussian_block(3, 1, 1, kDim);
  EXPECT_TRUE(same_bits(attend_only(cache, 0, far_id, query), attend_only(cache, 0, near_id, query)));
}

TEST(LayoutCases, L16_TheMillionthPositionIsFound) {
  CacheConfig config = coded_config(1, 32, 0, 0, 256);
  // Plain levels, which are quick to write.
  KVCache<turboquant::Format<PolarQuant<2>, PolarQuant<2>>> cache(config);
  const SequenceId id = new_sequence(cache);
  const std::vector<float> zero(32, 0.0F);
  constexpr std::size_t kTokens = std::size_t{1} << 20;
  BatchItem item;
  item.sequence = id;
  item.keys = item.values = turboquant::ConstRows(zero.data(), kTokens - 256, 1, 32);
  item.keys.token_stride = item.values.token_stride = 0;
  ASSERT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
  Block keys(256, 1, 32), values(256, 1, 32);
  keys.row(255)[0] = 32;
  values.row(255)[1] = 1;
  ASSERT_OK(append_only(cache, 0, id, keys, values));
  EXPECT_EQ(cache.length(id), kTokens);
  Block query(1, 1, 32);
  query.row(0)[0] = 1;
  std::vector<float> logits(kTokens);
  ASSERT_OK(turboquant::logits(cache, id, 0, query.rows(), logits.data()));
  EXPECT_NEAR(logits[kTokens - 1], 32, 0.2F);
  for (std::size_t t = 0; t < kTokens - 1; ++t) ASSERT_EQ(logits[t], 0.0F) << t;
  CallOptions options;
  options.params.scale = 1;
  const Outcome outcome = attend_only(cache, 0, id, query, options);
  ASSERT_OK(outcome.status);
  EXPECT_NEAR(outcome.out.row(0)[1], 1, 0.02F);  // e^32 against a million
}

TEST(LayoutCases, L17_OddAddresses) {
  const Block keys = gaussian_block(1, 20, 2, 80), values = gaussian_block(2, 20, 2, 80),
              queries = gaussian_block(3, 20, 4, 80);
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    const std::size_t size = turboquant::size_of(type);
    std::vector<std::vector<unsigned char>> results;
    for (const std::size_t shift : {0U, 1U, 3U}) {
      const auto packed = [&](const Block& block) {
        std::vector<unsigned char> bytes(block.numbers.size() * size + 64);
        for (std::size_t i = 0; i < block.numbers.size(); ++i) {
          const std::uint16_t small = type == DType::f16 ? oracle::half_bits(static_cast<double>(block.numbers[i]))
                                                         : oracle::bfloat16_bits(static_cast<double>(block.numbers[i]));
          std::memcpy(bytes.data() + shift + i * size,
                      type == DType::f32 ? static_cast<const void*>(&block.numbers[i]) : &small, size);
        }
        return bytes;
      };
      const std::vector<unsigned char> k = packed(keys), v = packed(values), q = packed(queries);
      std::vector<unsigned char> out(queries.numbers.size() * size + 64, 0xcc);
      KVCache<TQ3> cache(coded_config(2, 80));
      BatchItem item;
      item.sequence = new_sequence(cache);
      item.keys = turboquant::ConstRows(static_cast<const void*>(k.data() + shift), type, 20, 2, 80);
      item.values = turboquant::ConstRows(static_cast<const void*>(v.data() + shift), type, 20, 2, 80);
      item.queries = turboquant::ConstRows(static_cast<const void*>(q.data() + shift), type, 20, 4, 80);
      item.out = turboquant::Rows(static_cast<void*>(out.data() + shift), type, 20, 4, 80);
      ASSERT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
      for (std::size_t i = 0; i < shift; ++i) EXPECT_EQ(out[i], 0xcc);
      for (std::size_t i = shift + queries.numbers.size() * size; i < out.size(); ++i) EXPECT_EQ(out[i], 0xcc);
      results.emplace_back(out.begin() + static_cast<std::ptrdiff_t>(shift),
                           out.begin() + static_cast<std::ptrdiff_t>(shift + queries.numbers.size() * size));
      EXPECT_EQ(results.front(), results.back()) << "shift " << shift;
    }
  }
}

#if defined(__unix__) || defined(__APPLE__)
TEST(LayoutCases, L18_NothingBeyondTheBuffersIsTouched) {
  for (const std::size_t dim : {32U, 48U, 80U, 96U, 112U, 144U})
    for (const bool at_the_end : {true, false})
      for (const std::size_t tokens : {0U, 1U, 17U, 33U}) {
        const Block keys = gaussian_block(1, tokens, 1, dim), values = gaussian_block(2, tokens, 1, dim),
                    queries = gaussian_block(3, tokens, 3, dim);
        Fenced<float> k(keys.numbers.size(), at_the_end), v(values.numbers.size(), at_the_end),
            q(queries.numbers.size(), at_the_end), out(queries.numbers.size(), at_the_end), lse(tokens * 3, at_the_end),
            logits(tokens * 3 * tokens, at_the_end);
        CacheConfig config = coded_config(1, dim);
        config.recent_tokens = 5;
        KVCache<TQ4> cache(config);
        BatchItem item;
        item.sequence = new_sequence(cache);
        item.keys = turboquant::ConstRows(k.fill(keys.numbers), tokens, 1, dim);
        item.values = turboquant::ConstRows(v.fill(values.numbers), tokens, 1, dim);
        item.queries = turboquant::ConstRows(q.fill(queries.numbers), tokens, 3, dim);
        item.out = turboquant::Rows(out.data(), tokens, 3, dim);
        item.lse = lse.data();
        ASSERT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
        ASSERT_OK(turboquant::logits(cache, item.sequence, 0, item.queries, logits.data()));
        ASSERT_OK(cache.read(item.sequence, 0, 0, turboquant::Rows(k.data(), tokens, 1, dim),
                             turboquant::Rows(v.data(), tokens, 1, dim)));
        KVCache<TQ4> plain_cache(config);
        const Outcome plain = attend_one(plain_cache, 0, new_sequence(plain_cache), keys, values, queries);
        ASSERT_OK(plain.status);
        EXPECT_TRUE(tokens == 0 ||
                    std::memcmp(out.data(), plain.out.numbers.data(), plain.out.numbers.size() * sizeof(float)) == 0);
      }
}
#endif

TEST(LayoutCases, L20_OutputsAtAnyAddress) {
  const Block keys = gaussian_block(1, 40, 2, 48), values = gaussian_block(2, 40, 2, 48),
              queries = gaussian_block(3, 2, 4, 48);
  std::vector<float> reference;
  for (std::size_t shift = 0; shift < 16; ++shift) {
    KVCache<TQ4> cache(coded_config(2, 48));
    BatchItem item;
    item.sequence = new_sequence(cache);
    item.keys = keys.rows();
    item.values = values.rows();
    item.queries = queries.rows();
    alignas(64) std::array<float, 2 * 4 * 48 + 32> out;
    out.fill(7);
    alignas(64) std::array<float, 8 + 32> lse;
    lse.fill(7);
    item.out = turboquant::Rows(out.data() + shift, 2, 4, 48);
    item.lse = lse.data() + shift;
    ASSERT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
    const std::vector<float> found(out.data() + shift, out.data() + shift + 2 * 4 * 48);
    if (shift == 0) reference = found;
    EXPECT_TRUE(same_bits(found, reference)) << shift;
    for (std::size_t i = 0; i < shift; ++i) EXPECT_TRUE(out[i] == 7 && lse[i] == 7);
    for (std::size_t i = shift + 2 * 4 * 48; i < out.size(); ++i) EXPECT_EQ(out[i], 7.0F);
    for (std::size_t i = shift + 8; i < lse.size(); ++i) EXPECT_EQ(lse[i], 7.0F);
  }
}

}  // namespace
