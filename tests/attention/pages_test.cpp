// Pages without the container: the same bytes and the same numbers as a cache, from memory that the caller owns.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "attention/thread_pool.hpp"
#include "cache/block.hpp"

namespace {

using namespace tests;
using turboquant::AttentionParams;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::PageCodec;
using turboquant::PageItem;
using turboquant::PageSpan;
using turboquant::SequenceId;
using turboquant::Status;
using turboquant::detail::CacheAccess;

/// Memory that an engine would cut its blocks from.
class Blocks {
 public:
  explicit Blocks(std::size_t bytes) : bytes_(bytes) {}
  std::byte* take() {
    std::vector<std::byte>& memory = all_.emplace_back(bytes_ + 64, std::byte{0xee});
    void* begin = memory.data();
    std::size_t space = memory.size();
    return static_cast<std::byte*>(std::align(64, bytes_, begin, space));
  }

 private:
  std::size_t bytes_;
  std::deque<std::vector<std::byte>> all_;
};

template <class F>
std::vector<PageSpan> encode_all(const PageCodec<F>& codec, Blocks& blocks, const Block& keys, const Block& values,
                                 std::size_t tokens) {
  std::vector<PageSpan> spans;
  Blocks scratch(codec.workspace_bytes());
  std::byte* workspace = scratch.take();
  for (std::size_t begin = 0; begin < tokens; begin += codec.page_tokens()) {
    const std::size_t end = std::min(begin + codec.page_tokens(), tokens);
    const Block k = keys.slice(begin, end), v = values.slice(begin, end);
    std::byte* page = blocks.take();
    EXPECT_OK(codec.encode_page(k.rows(), v.rows(), page, workspace));
    spans.push_back({page, 0, static_cast<std::uint32_t>(end - begin)});
  }
  return spans;
}

template <class F>
Outcome attend_pages_once(const PageCodec<F>& codec, const std::vector<PageSpan>& spans, const Block& keys,
                          const Block& values, const Block& queries, const CallOptions& options = {},
                          ThreadPool* pool = nullptr) {
  const std::size_t dim = codec.shape().value_dim;
  Outcome outcome{
      {}, Block(queries.tokens, queries.heads, dim, kNaN), std::vector<float>(queries.tokens * queries.heads)};
  PageItem item;
  item.pages = spans;
  item.keys = keys.rows();
  item.values = values.rows();
  item.queries = queries.rows();
  item.out = outcome.out.rows();
  if (options.with_lse) item.lse = outcome.lse.data();
  item.position = options.position;
  item.key_begin = options.key_begin;
  item.key_end = options.key_end;
  outcome.status = pool != nullptr
                       ? turboquant::attend_pages(codec, std::span<const PageItem>(&item, 1), options.params, *pool)
                       : turboquant::attend_pages(codec, std::span<const PageItem>(&item, 1), options.params);
  return outcome;
}

template <class F>
void expect_as_in_a_cache(const LayerShape& shape, std::size_t page_tokens, std::size_t tokens) {
  SCOPED_TRACE(testing::Message() << tokens << " tokens, page " << page_tokens);
  CacheConfig config;
  config.layers = {shape};
  config.page_tokens = page_tokens;
  config.seed = 7;
  KVCache<F> cache(config);
  const PageCodec<F> codec(shape, page_tokens, 7);
  const std::size_t value_dim = codec.shape().value_dim;
  const Block keys = gaussian_block(1, tokens, shape.kv_heads, shape.head_dim),
              values = gaussian_block(2, tokens, shape.kv_heads, value_dim),
              queries = gaussian_block(3, 3, 2 * shape.kv_heads, shape.head_dim);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, keys, values));
  const auto& core = CacheAccess::core(cache);
  const auto& entries = core.find(id)->layers[0].entries;  // those behind a window are gone
  const std::size_t coded = core.find(id)->layers[0].coded_end();
  Blocks blocks(codec.page_bytes());
  const std::vector<PageSpan> spans = encode_all(codec, blocks, keys, values, coded);
  ASSERT_EQ(codec.page_bytes(), core.layer(0).page.bytes);
  for (const auto& entry : entries) {
    const PageSpan& span = spans[entry.begin / page_tokens];
    EXPECT_EQ(std::memcmp(span.page, entry.page->memory, codec.page_bytes()), 0) << "page at " << entry.begin;
  }

  const Block raw_keys = keys.slice(coded, tokens), raw_values = values.slice(coded, tokens);
  const std::vector<float> slopes(2 * shape.kv_heads, -0.01F), sinks(2 * shape.kv_heads, 0.5F);
  std::vector<CallOptions> calls(5);
  calls[1].params.softcap = 5;
  calls[1].params.alibi_slopes = slopes;
  calls[2].params.sink_logits = sinks;
  calls[2].with_lse = false;
  calls[3].params.causal = false;
  calls[4].key_begin = tokens / 3;
  calls[4].key_end = tokens - tokens / 4;
  ThreadPool pool(3);
  for (const CallOptions& options : calls) {
    const Outcome expected = attend_only(cache, 0, id, queries, options);
    const Outcome found = attend_pages_once(codec, spans, raw_keys, raw_values, queries, options);
    ASSERT_OK(expected.status);
    ASSERT_OK(found.status);
    EXPECT_TRUE(same_bits(found.out, expected.out));
    EXPECT_TRUE(!options.with_lse || found.lse == expected.lse);
    EXPECT_TRUE(
        same_bits(attend_pages_once(codec, spans, raw_keys, raw_values, queries, options, &pool).out, expected.out));
  }
}

TEST(Pages, GiveWhatACacheGives) {
  for (const std::size_t tokens : {70U, 131U, 300U, 2300U}) {  // the last three see the same codes
    expect_as_in_a_cache<turboquant::TQ4>({.kv_heads = 2, .head_dim = 64, .value_dim = 32}, 64, tokens);
    expect_as_in_a_cache<turboquant::TQ3>({.kv_heads = 1, .head_dim = 32, .center_bits = 16}, 48, tokens);
  }
  expect_as_in_a_cache<turboquant::TQ2>({.kv_heads = 1, .head_dim = 32, .window = 150}, 16, 500);
  expect_as_in_a_cache<turboquant::TQ8>({.kv_heads = 3, .head_dim = 80, .center_bits = 0}, 32, 333);
  using Scalar = turboquant::Format<turboquant::PolarQuant<3>, turboquant::ScalarQuant<4>>;
  expect_as_in_a_cache<Scalar>({.kv_heads = 2, .head_dim = 32}, 64, 200);
}

TEST(Pages, PartsOfPagesInAnyOrder) {
  // What a cache has after erasing from the middle, twice; entries share pages then.
  const LayerShape shape{.kv_heads = 1, .head_dim = 32};
  CacheConfig config;
  config.layers = {shape};
  config.recent_tokens = 0;
  config.seed = 42;
  KVCache<turboquant::TQ3> cache(config);
  const PageCodec<turboquant::TQ3> codec(shape);
  const Block keys = gaussian_block(1, 256, 1, 32), values = gaussian_block(2, 256, 1, 32),
              queries = gaussian_block(3, 2, 4, 32);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, keys, values));
  ASSERT_OK(cache.erase(id, 20, 35));
  ASSERT_OK(cache.erase(id, 100, 170));
  std::vector<PageSpan> spans;
  for (const auto& entry : CacheAccess::core(cache).find(id)->layers[0].entries)
    spans.push_back({entry.page->memory, entry.first, entry.count});
  const Outcome expected = attend_only(cache, 0, id, queries), found = attend_pages_once(codec, spans, {}, {}, queries);
  ASSERT_OK(expected.status);
  ASSERT_OK(found.status);
  EXPECT_TRUE(same_bits(found, expected));

  // Without positions the order of the tokens does not matter, up to rounding.
  CallOptions options;
  options.params.causal = false;
  const Outcome forward = attend_pages_once(codec, spans, {}, {}, queries, options);
  const Outcome backward = attend_pages_once(codec, {spans.rbegin(), spans.rend()}, {}, {}, queries, options);
  // 171 keys; weights are rounded to 14 bits of their page part's largest: 6 of sqrt(171) 2^-15 / sqrt(3), below 1e-3.
  for (std::size_t i = 0; i < forward.out.numbers.size(); ++i)
    EXPECT_NEAR(forward.out.numbers[i], backward.out.numbers[i], 1e-3F);
  EXPECT_NEAR(forward.lse[0], backward.lse[0], 1e-5F);
}

// A plan holds nothing: run again it reads the queries as they are then. The context is split into several tasks.
TEST(Pages, APlanRunsAgainWithOtherQueries) {
  constexpr std::size_t kTokens = 2304;
  const PageCodec<turboquant::TQ4> codec({.kv_heads = 1, .head_dim = 32});
  const Block keys = gaussian_block(1, kTokens, 1, 32), values = gaussian_block(2, kTokens, 1, 32);
  Blocks blocks(codec.page_bytes());
  const std::vector<PageSpan> spans = encode_all(codec, blocks, keys, values, kTokens);
  Block queries = gaussian_block(3, 1, 2, 32), out(1, 2, 32, kNaN);
  PageItem item;
  item.pages = spans;
  item.queries = queries.rows();
  item.out = out.rows();
  turboquant::AttentionPlan plan;
  ASSERT_OK(turboquant::plan_pages(codec, std::span<const PageItem>(&item, 1), {}, plan));
  for (const std::uint64_t seed : {3U, 4U, 5U}) {
    std::ranges::copy(gaussian_block(seed, 1, 2, 32).numbers, queries.row(0));
    EXPECT_TRUE(run_plan(plan, 1));
    EXPECT_TRUE(same_bits(out, attend_pages_once(codec, spans, {}, {}, queries).out)) << seed;
  }
}

TEST(Pages, ReadBackWhatTheyHold) {
  const LayerShape shape{.kv_heads = 2, .head_dim = 64, .value_dim = 32};
  const PageCodec<turboquant::TQ8> codec(shape, 32);
  const Block keys = gaussian_block(1, 20, 2, 64), values = gaussian_block(2, 20, 2, 32);
  Blocks blocks(codec.page_bytes());
  const std::vector<PageSpan> spans = encode_all(codec, blocks, keys, values, 20);
  Block k(15, 2, 64, kNaN), v(15, 2, 32, kNaN);
  ASSERT_OK(codec.read_page(spans[0].page, 5, k.rows(), v.rows()));
  // 8 bits: steps of max / 127 of a rotated row, at most 5 / 127 sigma, and bf16 scales.
  for (std::size_t t = 0; t < 15; ++t)
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t i = 0; i < 64; ++i) ASSERT_NEAR(k.row(t, h)[i], keys.row(t + 5, h)[i], 0.08F);
      for (std::size_t i = 0; i < 32; ++i) ASSERT_NEAR(v.row(t, h)[i], values.row(t + 5, h)[i], 0.08F);
    }
  Block none;
  EXPECT_OK(codec.read_page(spans[0].page, 40, none.rows(), none.rows()));
  EXPECT_STATUS(bad_shape, codec.read_page(spans[0].page, 18, k.rows(), none.rows()));
  EXPECT_STATUS(bad_shape, codec.read_page(nullptr, 0, k.rows(), none.rows()));
  EXPECT_STATUS(bad_shape, codec.read_page(spans[0].page, 0, v.rows(), none.rows()));
}

TEST(Pages, RefusalsLeaveThePageAlone) {
  const LayerShape shape{.kv_heads = 1, .head_dim = 32};
  const PageCodec<turboquant::TQ4> codec(shape, 16);
  Blocks blocks(codec.page_bytes()), scratch(codec.workspace_bytes());
  std::byte *page = blocks.take(), *workspace = scratch.take();
  const Block keys = gaussian_block(1, 16, 1, 32), many = gaussian_block(1, 17, 1, 32),
              wide = gaussian_block(1, 16, 1, 64), pairs = gaussian_block(1, 16, 2, 32);
  Block broken = keys;
  broken.row(7)[3] = kNaN;
  EXPECT_STATUS(bad_shape, codec.encode_page({}, {}, page, workspace));
  EXPECT_STATUS(bad_shape, codec.encode_page(keys.rows(), many.rows(), page, workspace));
  EXPECT_STATUS(bad_shape, codec.encode_page(many.rows(), many.rows(), page, workspace));
  EXPECT_STATUS(bad_shape, codec.encode_page(wide.rows(), keys.rows(), page, workspace));
  EXPECT_STATUS(bad_shape, codec.encode_page(keys.rows(), wide.rows(), page, workspace));
  EXPECT_STATUS(bad_shape, codec.encode_page(pairs.rows(), keys.rows(), page, workspace));
  EXPECT_STATUS(bad_shape, codec.encode_page(keys.rows(), keys.rows(), nullptr, workspace));
  EXPECT_STATUS(non_finite_input, codec.encode_page(keys.rows(), broken.rows(), page, workspace));
  for (std::size_t i = 0; i < codec.page_bytes(); ++i) ASSERT_EQ(page[i], std::byte{0xee});
  ASSERT_OK(codec.encode_page(keys.rows(), keys.rows(), page, workspace));

  const Block query = gaussian_block(3, 1, 2, 32), odd = gaussian_block(3, 1, 2, 64);
  const auto refused = [&](const PageSpan& span, const Block& raw_keys, const Block& raw_values, const Block& q) {
    return attend_pages_once(codec, {span}, raw_keys, raw_values, q).status;
  };
  EXPECT_OK(refused({page, 0, 16}, {}, {}, query));
  EXPECT_STATUS(bad_shape, refused({nullptr, 0, 16}, {}, {}, query));
  EXPECT_STATUS(bad_shape, refused({page, 16, 1}, {}, {}, query));
  EXPECT_STATUS(bad_shape, refused({page, 1, 16}, {}, {}, query));
  EXPECT_STATUS(bad_shape, refused({page, 0, 0}, {}, {}, query));
  EXPECT_STATUS(bad_shape, refused({page, 0, 16}, keys, {}, query));
  EXPECT_STATUS(bad_shape, refused({page, 0, 16}, wide, keys, query));
  EXPECT_STATUS(non_finite_input, refused({page, 0, 16}, keys, broken, query));
  EXPECT_STATUS(bad_shape, refused({page, 0, 16}, {}, {}, odd));
  EXPECT_THROW((PageCodec<turboquant::TQ4>(LayerShape{.head_dim = 100})), std::invalid_argument);
  EXPECT_THROW((PageCodec<turboquant::TQ4>(shape, 24)), std::invalid_argument);
}

TEST(Pages, NoTokensGiveZeros) {
  const PageCodec<turboquant::TQ4> codec({.kv_heads = 1, .head_dim = 32});
  CallOptions options;
  options.position = 0;
  const Outcome outcome = attend_pages_once(codec, {}, {}, {}, gaussian_block(3, 1, 2, 32), options);
  ASSERT_OK(outcome.status);
  for (const float x : outcome.out.numbers) EXPECT_EQ(x, 0.0F);
  EXPECT_TRUE(std::isinf(outcome.lse[0]) && outcome.lse[0] < 0);
}

}  // namespace
