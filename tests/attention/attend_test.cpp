// attend against the double-precision oracle: every parameter, every border, every refusal.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <turboquant/transform/rotation.hpp>
#include <vector>

#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::AttentionParams;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::npos;
using turboquant::SequenceId;
using turboquant::Status;

CacheConfig small_config(std::uint32_t kv_heads = 2, std::uint32_t head_dim = 64) {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = kv_heads, .head_dim = head_dim}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}

std::size_t value_dim_of(const LayerShape& shape) { return shape.value_dim != 0 ? shape.value_dim : shape.head_dim; }

/// One sequence of one cache with its mirror; tokens and queries come from fixed Gaussian streams.
template <class Cache>
class Scenario {
 public:
  Scenario(const CacheConfig& config, Codes codes, std::size_t query_heads = 4, std::uint64_t seed = 1,
           double key_offset = 0)
      : cache(config),
        id(new_sequence(cache)),
        mirror(config, 0, codes),
        query_heads_(query_heads),
        seed_(seed),
        key_offset_(key_offset) {}

  Block keys(std::size_t count) const {
    Block block = gaussian_block(seed_, count, shape().kv_heads, shape().head_dim, 1, mirror.length());
    for (std::size_t t = 0; t < count; ++t)
      for (std::size_t h = 0; h < block.heads; ++h)
        for (std::size_t i = 0; i < block.dim; ++i)
          block.row(t, h)[i] += static_cast<float>(key_offset_ * oracle::gaussian(seed_ + 77, h, i));
    return block;
  }
  Block values(std::size_t count) const {
    return gaussian_block(seed_ + 100, count, shape().kv_heads, value_dim_of(shape()), 1, mirror.length());
  }
  Block queries(std::size_t count, std::size_t first) const {
    return gaussian_block(seed_ + 200, count, query_heads_, shape().head_dim, 1, first);
  }

  /// Appends `count` tokens with the queries of the last `asking` of them and checks the outputs.
  void step(std::size_t count, std::size_t asking, const AttentionParams& params = {}, bool with_lse = true) {
    const Block new_keys = keys(count), new_values = values(count);
    const std::size_t first = mirror.length() + count - asking;
    const Block asked = queries(asking, first);
    CallOptions options;
    options.params = params;
    options.with_lse = with_lse;
    const Outcome outcome = attend_one(cache, 0, id, new_keys, new_values, asked, options);
    mirror.append(new_keys, new_values);
    mirror.learn(cache, id);
    mirror.check(asked, outcome, params, {.position = first}, with_lse);
  }

  const LayerShape& shape() const { return cache.config().layers[0]; }

  Cache cache;
  SequenceId id;
  Mirror mirror;

 private:
  std::size_t query_heads_;
  std::uint64_t seed_;
  double key_offset_;
};

TEST(Attend, EveryLengthOneTokenAtATime) {
  for (const std::size_t first_tokens : {std::size_t{0}, std::size_t{5}}) {
    CacheConfig config = small_config();
    config.first_tokens = first_tokens;
    Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
    for (int n = 0; n < 70 && !HasFailure(); ++n) run.step(1, 1);
    EXPECT_EQ(run.cache.length(run.id), 70U);
  }
}

TEST(Attend, PromptsAroundEveryBorder) {
  // Borders of tile (16), page (16 and 32), recent (16, 20) and their sums.
  for (const std::size_t page : {16U, 32U})
    for (const std::size_t recent : {0U, 16U, 20U})
      for (const std::size_t n :
           {1U, 15U, 16U, 17U, 31U, 32U, 33U, 35U, 36U, 37U, 47U, 48U, 49U, 63U, 64U, 65U, 100U}) {
        SCOPED_TRACE(testing::Message() << "page " << page << " recent " << recent << " tokens " << n);
        CacheConfig config = small_config();
        config.page_tokens = page;
        config.recent_tokens = recent;
        Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
        run.step(n, n);
        run.step(3, 2);
        run.step(40, 1);
        if (HasFailure()) return;
      }
}

template <class F>
void run_format(unsigned bits) {
  CacheConfig config = small_config(2, 128);
  config.page_tokens = 64;
  config.recent_tokens = 32;
  for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}}) {
    SCOPED_TRACE(testing::Message() << "bits " << bits << " center bits " << int{center_bits});
    config.layers[0].center_bits = center_bits;
    Scenario<KVCache<F>> run(config, codes_of(bits));
    run.step(150, 20);
    for (int i = 0; i < 30; ++i) run.step(1, 1);
    run.step(100, 3);
  }
}
TEST(Attend, Tq2) { run_format<turboquant::TQ2>(2); }
TEST(Attend, Tq3) { run_format<turboquant::TQ3>(3); }
TEST(Attend, Tq4) { run_format<turboquant::TQ4>(4); }
TEST(Attend, Tq8) { run_format<turboquant::TQ8>(8); }

TEST(Attend, DefaultConfiguration) {
  Scenario<KVCache<turboquant::TQ4>> run(CacheConfig{}, codes_of(4), 1);
  run.step(200, 50);
  run.step(1, 1);
  run.step(64, 64);
}

TEST(Attend, KeysWithALargeCommonOffset) {
  // The offset is 20 times the spread, the most that an 8-bit centre is made for.
  CacheConfig config = small_config(1, 128);
  config.recent_tokens = 0;
  for (const std::uint8_t center_bits : {std::uint8_t{8}, std::uint8_t{16}}) {
    config.layers[0].center_bits = center_bits;
    Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4), 2, 3, 20);
    AttentionParams params;
    params.scale = 0.02F;  // keeps the logits, which the offset makes large, in a range where many keys have weight
    run.step(96, 10, params);
    run.step(1, 1, params);
  }
}

TEST(Attend, HeadGroupsOfAnySize) {
  struct Heads {
    std::uint32_t kv;
    std::size_t query;
  };
  for (const Heads heads : {Heads{1, 1}, Heads{1, 2}, Heads{1, 3}, Heads{2, 12}, Heads{4, 28}, Heads{1, 5},
                            Heads{2, 16}, Heads{1, 17}, Heads{1, 48}}) {
    SCOPED_TRACE(testing::Message() << heads.query << " over " << heads.kv);
    Scenario<KVCache<turboquant::TQ3>> run(small_config(heads.kv, 32), codes_of(3), heads.query);
    run.step(60, 7);
    run.step(1, 1);
  }
}

TEST(Attend, HeadSizesOfEveryKind) {
  // One size per base matrix (orders 1, 12, 20, 28, 36) and keys wider and narrower than values.
  struct Dims {
    std::uint32_t key, value;
  };
  for (const Dims dims : {Dims{32, 0}, Dims{80, 0}, Dims{96, 0}, Dims{112, 0}, Dims{144, 0}, Dims{160, 0},
                          Dims{192, 128}, Dims{256, 64}, Dims{64, 256}, Dims{576, 512}, Dims{1024, 0}}) {
    SCOPED_TRACE(testing::Message() << dims.key << ' ' << dims.value);
    CacheConfig config = small_config(1, dims.key);
    config.layers[0].value_dim = dims.value;
    Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4), 2);
    run.step(45, 4);
    run.step(5, 5);
  }
}

TEST(Attend, Softcap) {
  AttentionParams params;
  params.softcap = 1.5F;
  params.scale = 0.5F;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params);
  run.step(1, 1, params);
}

TEST(Attend, Alibi) {
  const std::array<float, 4> slopes{0.5F, 0.25F, 0.0625F, 0.0F};
  AttentionParams params;
  params.alibi_slopes = slopes;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params);
  run.step(1, 1, params);
  params.causal = false;
  run.step(3, 2, params);
}

TEST(Attend, SinksWithAndWithoutLogSumExp) {
  const std::array<float, 4> sinks{3.0F, -1.0F, 0.5F, 20.0F};
  AttentionParams params;
  params.sink_logits = sinks;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params, false);
  run.step(1, 1, params, false);
  run.step(5, 5, params, true);  // a partial: sinks are left to the merge
}

TEST(Attend, EverythingAtOnce) {
  const std::array<float, 4> slopes{0.5F, 0.25F, 0.0625F, 0.01F}, sinks{3.0F, -1.0F, 0.5F, 2.0F};
  AttentionParams params;
  params.scale = 0.2F;
  params.softcap = 2;
  params.alibi_slopes = slopes;
  params.sink_logits = sinks;
  CacheConfig config = small_config();
  config.layers[0].window = 60;
  config.rollback_tokens = 32;
  Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
  for (const std::size_t n : {30U, 20U, 1U, 17U, 25U, 1U, 1U, 30U}) run.step(n, n, params, n % 2 == 0);
}

TEST(Attend, NotCausal) {
  AttentionParams params;
  params.causal = false;
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(70, 9, params);
  run.step(20, 20, params);
  // Cross-attention: queries of another stream, at positions that mean nothing.
  const Block queries = run.queries(6, 1000);
  CallOptions options;
  options.params = params;
  options.position = 0;
  run.mirror.check(queries, attend_only(run.cache, 0, run.id, queries, options), params,
                   {.position = 0, .own_call = false});
}

TEST(Attend, ScaleZeroIsOneOverTheRootOfTheHeadSize) {
  CacheConfig config = small_config(1, 64);
  Scenario<KVCache<turboquant::TQ4>> a(config, codes_of(4)), b(config, codes_of(4));
  const Block keys = a.keys(50), values = a.values(50), queries = a.queries(3, 0);
  CallOptions explicit_scale;
  explicit_scale.params.scale = 0.125F;
  EXPECT_TRUE(same_bits(attend_one(a.cache, 0, a.id, keys, values, queries),
                        attend_one(b.cache, 0, b.id, keys, values, queries, explicit_scale)));
}

TEST(Attend, WindowsOfEverySize) {
  // The twin without a window tells what the codes are worth that the windowed layer has let go.
  for (const std::uint32_t window : {1U, 2U, 8U, 16U, 17U, 33U, 64U, 90U, 200U})
    for (const std::size_t recent : {0U, 16U, 40U}) {
      SCOPED_TRACE(testing::Message() << "window " << window << " recent " << recent);
      CacheConfig config = small_config(1, 64);
      config.recent_tokens = recent;
      CacheConfig twin_config = config;
      config.layers[0].window = window;
      KVCache<turboquant::TQ4> cache(config), twin(twin_config);
      const SequenceId id = new_sequence(cache), twin_id = new_sequence(twin);
      Mirror mirror(config, 0, codes_of(4)), twin_mirror(twin_config, 0, codes_of(4));
      for (const std::size_t n : {10U, 1U, 30U, 1U, 1U, 100U, 1U, 3U, 16U, 1U}) {
        const std::size_t first = mirror.length();
        const Block keys = gaussian_block(1, n, 1, 64, 1, first), values = gaussian_block(2, n, 1, 64, 1, first),
                    queries = gaussian_block(3, n, 2, 64, 1, first);
        const Outcome outcome = attend_one(cache, 0, id, keys, values, queries);
        ASSERT_OK(append_only(twin, 0, twin_id, keys, values));
        mirror.append(keys, values);
        twin_mirror.append(keys, values);
        twin_mirror.learn(twin, twin_id);
        mirror.learn_from(twin_mirror);
        mirror.check(queries, outcome, {}, {.position = first});
        if (HasFailure()) return;
      }
      EXPECT_EQ(cache.length(id), 164U);
    }
}

TEST(Attend, KeyRanges) {
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(90, 1);
  const Block queries = run.queries(2, 88);
  struct Range {
    std::size_t begin, end;
  };
  for (const Range range :
       {Range{0, 90}, Range{0, 0}, Range{0, 1}, Range{7, 7}, Range{5, 12}, Range{16, 32}, Range{15, 33}, Range{30, 80},
        Range{70, npos}, Range{89, npos}, Range{90, npos}, Range{0, 1000}}) {
    SCOPED_TRACE(testing::Message() << range.begin << " to " << range.end);
    CallOptions options;
    options.key_begin = range.begin;
    options.key_end = range.end;
    const Outcome outcome = attend_only(run.cache, 0, run.id, queries, options);
    run.mirror.check(queries, outcome, {},
                     {.position = 88, .own_call = false, .key_begin = range.begin, .key_end = range.end});
  }
}

TEST(Attend, LaterQueriesAtOldPositionsReadCodesWhereRawRowsAreGone) {
  CacheConfig config = small_config();
  config.rollback_tokens = 20;
  Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4));
  for (const std::size_t n : {40U, 30U, 1U, 1U, 9U, 20U}) {
    run.step(n, 1);
    for (std::size_t position = 0; position < run.mirror.length(); position += 3) {
      const Block query = run.queries(1, position);
      CallOptions options;
      options.position = position;
      run.mirror.check(query, attend_only(run.cache, 0, run.id, query, options), {},
                       {.position = position, .own_call = false});
    }
  }
}

TEST(Attend, PositionDefaultsToTheEnd) {
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(50, 1);
  const Block queries = run.queries(3, 47);
  CallOptions options;
  const Outcome by_default = attend_only(run.cache, 0, run.id, queries, options);
  options.position = 47;
  const Outcome by_number = attend_only(run.cache, 0, run.id, queries, options);
  EXPECT_TRUE(same_bits(by_default, by_number));
  run.mirror.check(queries, by_default, {}, {.position = 47, .own_call = false});
}

TEST(Attend, AppendsPrecedeReadsInABatch) {
  Scenario<KVCache<turboquant::TQ4>> run(small_config(), codes_of(4));
  run.step(40, 1);
  const Block keys = run.keys(10), values = run.values(10), queries = run.queries(2, 48);
  Outcome before{{}, Block(2, 4, 64, kNaN), {}}, after = before;
  std::array<BatchItem, 3> items;
  items[0].sequence = items[1].sequence = items[2].sequence = run.id;
  items[0].queries = queries.rows();
  items[0].out = before.out.rows();
  items[1].keys = keys.rows();
  items[1].values = values.rows();
  items[2].queries = queries.rows();
  items[2].out = after.out.rows();
  ASSERT_OK(turboquant::attend(run.cache, 0, items));
  run.mirror.append(keys, values);
  run.mirror.learn(run.cache, run.id);
  run.mirror.check(queries, after, {}, {.position = 48}, false);
  EXPECT_TRUE(same_bits(before, after));
}

TEST(Attend, MixedBatchEqualsSingleCalls) {
  const CacheConfig config = small_config();
  using Cache = KVCache<turboquant::TQ4>;
  Cache together(config), alone(config);
  // Prefill, decode, append only, attend only and an empty sequence side by side.
  const std::array<std::size_t, 5> present{0, 61, 33, 47, 0}, added{75, 1, 20, 0, 0}, asking{75, 1, 0, 2, 1};
  std::array<SequenceId, 5> ids, alone_ids;
  std::array<Block, 5> keys, values, queries;
  std::array<Outcome, 5> outcomes;
  std::array<BatchItem, 5> items;
  for (std::size_t s = 0; s < 5; ++s) {
    ids[s] = new_sequence(together);
    alone_ids[s] = new_sequence(alone);
    const Block old_keys = gaussian_block(10 + s, present[s], 2, 64),
                old_values = gaussian_block(20 + s, present[s], 2, 64);
    ASSERT_OK(append_only(together, 0, ids[s], old_keys, old_values));
    ASSERT_OK(append_only(alone, 0, alone_ids[s], old_keys, old_values));
    keys[s] = gaussian_block(10 + s, added[s], 2, 64, 1, present[s]);
    values[s] = gaussian_block(20 + s, added[s], 2, 64, 1, present[s]);
    queries[s] = gaussian_block(30 + s, asking[s], 4, 64);
    outcomes[s].out = Block(asking[s], 4, 64, kNaN);
    outcomes[s].lse.assign(asking[s] * 4, kNaN);
    items[s].sequence = ids[s];
    items[s].keys = keys[s].rows();
    items[s].values = values[s].rows();
    items[s].queries = queries[s].rows();
    items[s].out = outcomes[s].out.rows();
    items[s].lse = asking[s] != 0 ? outcomes[s].lse.data() : nullptr;
    if (s == 4) items[s].position = 0;
  }
  ASSERT_OK(turboquant::attend(together, 0, items));
  for (std::size_t s = 0; s < 5; ++s) {
    CallOptions options;
    if (s == 4) options.position = 0;
    const Outcome single = attend_one(alone, 0, alone_ids[s], keys[s], values[s], queries[s], options);
    ASSERT_OK(single.status);
    EXPECT_TRUE(same_bits(outcomes[s], single)) << "item " << s;
    EXPECT_EQ(together.length(ids[s]), present[s] + added[s]);
  }
}

TEST(Attend, EmptyBatchAndEmptyItemsDoNothing) {
  KVCache<turboquant::TQ4> cache(small_config());
  const SequenceId id = new_sequence(cache);
  EXPECT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>()));
  BatchItem nothing;
  nothing.sequence = id;
  EXPECT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&nothing, 1)));
  EXPECT_EQ(cache.length(id), 0U);
}

TEST(Attend, NoKeysGiveZerosAndMinusInfinity) {
  KVCache<turboquant::TQ4> cache(small_config());
  const SequenceId id = new_sequence(cache);
  const Block queries = gaussian_block(1, 3, 4, 64);
  CallOptions options;
  options.position = 0;
  const auto expect_nothing = [](const Outcome& outcome) {
    ASSERT_OK(outcome.status);
    for (const float x : outcome.out.numbers) EXPECT_EQ(x, 0.0F);
    for (const float x : outcome.lse) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
  };
  expect_nothing(attend_only(cache, 0, id, queries, options));
  const std::array<float, 4> sinks{1, 2, 3, 4};
  options.params.sink_logits = sinks;
  options.with_lse = false;
  const Outcome with_sinks = attend_only(cache, 0, id, queries, options);
  ASSERT_OK(with_sinks.status);
  for (const float x : with_sinks.out.numbers) EXPECT_EQ(x, 0.0F);

  ASSERT_OK(append_only(cache, 0, id, gaussian_block(2, 50, 2, 64), gaussian_block(3, 50, 2, 64)));
  options = {};
  options.key_begin = options.key_end = 20;
  expect_nothing(attend_only(cache, 0, id, queries, options));
  options = {};
  options.position = 4;
  options.key_begin = 10;  // all in the future of the queries 4, 5 and 6
  expect_nothing(attend_only(cache, 0, id, queries, options));
}

TEST(Attend, ElementTypesAndStrides) {
  using turboquant::DType;
  const std::size_t tokens = 60, heads = 2, dim = 64;
  Block keys = gaussian_block(1, tokens, heads, dim), values = gaussian_block(2, tokens, heads, dim),
        queries = gaussian_block(3, 5, 4, dim);
  // Numbers that every type holds exactly: then every type must give the same bits.
  for (Block* block : {&keys, &values, &queries})
    for (float& x : block->numbers)
      x = static_cast<float>(
          oracle::round_half(oracle::round_bfloat16(std::nearbyint(static_cast<double>(x) * 16) / 16)));
  const CacheConfig config = small_config();
  KVCache<turboquant::TQ4> plain_cache(config);
  const Outcome plain = attend_one(plain_cache, 0, new_sequence(plain_cache), keys, values, queries);
  ASSERT_OK(plain.status);

  for (const DType type : {DType::f32, DType::f16, DType::bf16})
    for (const bool backwards : {false, true}) {
      SCOPED_TRACE(testing::Message() << "type " << static_cast<int>(type) << (backwards ? " backwards" : ""));
      const std::size_t size = turboquant::size_of(type);
      // Rows lie apart, heads outermost, at an odd address; in the second round tokens run downwards.
      std::vector<std::vector<std::byte>> stores;
      const auto spread = [&](const Block& block, bool fill) {
        const std::size_t row = block.dim + 3, head = row * block.tokens + 5;
        stores.emplace_back((head * block.heads + 1) * size + 1, std::byte{0xff});
        turboquant::Rows rows(static_cast<void*>(stores.back().data() + 1), type, block.tokens, block.heads, block.dim);
        rows.token_stride = static_cast<std::ptrdiff_t>(row);
        rows.head_stride = static_cast<std::ptrdiff_t>(head);
        if (backwards) {
          rows.data = static_cast<std::byte*>(rows.data) + (block.tokens - 1) * row * size;
          rows.token_stride = -rows.token_stride;
        }
        for (std::size_t t = 0; fill && t < block.tokens; ++t)
          for (std::size_t h = 0; h < block.heads; ++h)
            for (std::size_t i = 0; i < block.dim; ++i) {
              const float x = block.row(t, h)[i];
              const std::uint16_t small = type == DType::f16 ? oracle::half_bits(static_cast<double>(x))
                                                             : oracle::bfloat16_bits(static_cast<double>(x));
              auto* at = static_cast<std::byte*>(rows.data) +
                         (static_cast<std::ptrdiff_t>(t) * rows.token_stride +
                          static_cast<std::ptrdiff_t>(h) * rows.head_stride + static_cast<std::ptrdiff_t>(i)) *
                             static_cast<std::ptrdiff_t>(size);
              std::memcpy(at, type == DType::f32 ? static_cast<const void*>(&x) : &small, size);
            }
        return rows;
      };
      const turboquant::Rows strided_keys = spread(keys, true), strided_values = spread(values, true),
                             strided_queries = spread(queries, true), out = spread(plain.out, false);
      KVCache<turboquant::TQ4> cache(config);
      BatchItem item;
      item.sequence = new_sequence(cache);
      item.keys = strided_keys;
      item.values = strided_values;
      item.queries = strided_queries;
      item.out = out;
      std::vector<float> lse(20);
      item.lse = lse.data();
      ASSERT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
      EXPECT_TRUE(same_bits(lse, plain.lse));
      for (std::size_t t = 0; t < 5; ++t)
        for (std::size_t h = 0; h < 4; ++h) {
          const auto* at =
              static_cast<const std::byte*>(out.data) +
              (static_cast<std::ptrdiff_t>(t) * out.token_stride + static_cast<std::ptrdiff_t>(h) * out.head_stride) *
                  static_cast<std::ptrdiff_t>(size);
          for (std::size_t i = 0; i < dim; ++i) {
            const float wanted = plain.out.row(t, h)[i];
            if (type == DType::f32) {
              float found = 0;
              std::memcpy(&found, at + i * size, size);
              ASSERT_EQ(found, wanted);
            } else {
              std::uint16_t found = 0;
              std::memcpy(&found, at + i * size, size);
              ASSERT_EQ(found, type == DType::f16 ? oracle::half_bits(static_cast<double>(wanted))
                                                  : oracle::bfloat16_bits(static_cast<double>(wanted)));
            }
          }
          // What lies between the rows is the caller's.
          for (std::size_t i = dim * size; i < (dim + 3) * size; ++i) ASSERT_EQ(at[i], std::byte{0xff});
        }
    }
}

/// A call that must be refused: nothing may have been written and nothing appended.
class Refusal : public testing::Test {
 protected:
  Refusal()
      : cache_(small_config()),
        id_(new_sequence(cache_)),
        keys_(gaussian_block(1, 5, 2, 64)),
        values_(gaussian_block(2, 5, 2, 64)),
        queries_(gaussian_block(3, 5, 4, 64)),
        out_(5, 4, 64, 7.0F),
        lse_(20, 7.0F) {
    EXPECT_OK(append_only(cache_, 0, id_, gaussian_block(4, 40, 2, 64), gaussian_block(5, 40, 2, 64)));
    item_.sequence = id_;
    item_.keys = keys_.rows();
    item_.values = values_.rows();
    item_.queries = queries_.rows();
    item_.out = out_.rows();
    item_.lse = lse_.data();
  }

  Status call(std::size_t layer = 0, const AttentionParams& params = {}) {
    return turboquant::attend(cache_, layer, std::span<const BatchItem>(&item_, 1), params);
  }
  void expect_untouched() const {
    EXPECT_EQ(cache_.length(id_), 40U);
    for (const float x : out_.numbers) ASSERT_EQ(x, 7.0F);
    for (const float x : lse_) ASSERT_EQ(x, 7.0F);
  }

  KVCache<turboquant::TQ4> cache_;
  SequenceId id_;
  Block keys_, values_, queries_, out_;
  std::vector<float> lse_;
  BatchItem item_;
};

TEST_F(Refusal, TheCallItselfIsGood) {
  EXPECT_OK(call());
  EXPECT_EQ(cache_.length(id_), 45U);
}
TEST_F(Refusal, BadLayer) {
  EXPECT_STATUS(bad_layer, call(1));
  EXPECT_STATUS(bad_layer, call(npos));
  expect_untouched();
}
TEST_F(Refusal, UnknownSequence) {
  item_.sequence = SequenceId{};
  EXPECT_STATUS(unknown_sequence, call());
  item_.sequence = SequenceId{id_.index, id_.generation + 1};
  EXPECT_STATUS(unknown_sequence, call());
  expect_untouched();
}
TEST_F(Refusal, KeyShapes) {
  item_.keys.tokens = 4;
  EXPECT_STATUS(bad_shape, call());
  item_.keys = keys_.rows();
  item_.keys.heads = 1;
  EXPECT_STATUS(bad_shape, call());
  item_.keys = keys_.rows();
  item_.keys.dim = 32;
  EXPECT_STATUS(bad_shape, call());
  item_.keys = {};
  EXPECT_STATUS(bad_shape, call());
  item_.keys = keys_.rows();
  item_.values.dim = 128;
  EXPECT_STATUS(bad_shape, call());
  item_.values = values_.rows();
  item_.values.heads = 3;
  EXPECT_STATUS(bad_shape, call());
  item_.values = {};
  EXPECT_STATUS(bad_shape, call());
  expect_untouched();
}
TEST_F(Refusal, QueryShapes) {
  for (const std::size_t heads : {0U, 1U, 3U}) {
    item_.queries.heads = item_.out.heads = heads;
    EXPECT_STATUS(bad_shape, call());
  }
  item_.queries = queries_.rows();
  item_.out = out_.rows();
  item_.queries.dim = 32;
  EXPECT_STATUS(bad_shape, call());
  item_.queries = queries_.rows();
  item_.out.dim = 32;
  EXPECT_STATUS(bad_shape, call());
  item_.out = out_.rows();
  item_.out.tokens = 4;
  EXPECT_STATUS(bad_shape, call());
  item_.out = out_.rows();
  item_.out.heads = 2;
  EXPECT_STATUS(bad_shape, call());
  item_.out = {};
  EXPECT_STATUS(bad_shape, call());
  item_.out = out_.rows();
  item_.queries = {};
  EXPECT_STATUS(bad_shape, call());
  expect_untouched();
}
TEST_F(Refusal, MoreQueriesThanTokens) {
  const Block queries = gaussian_block(1, 41, 4, 64);
  Block out(41, 4, 64, 7.0F);
  item_ = {};
  item_.sequence = id_;
  item_.queries = queries.rows();
  item_.out = out.rows();
  EXPECT_STATUS(bad_shape, call());  // the first query would be at position -1
  for (const float x : out.numbers) ASSERT_EQ(x, 7.0F);
  expect_untouched();
}
TEST_F(Refusal, ParameterShapes) {
  const std::array<float, 3> three{1, 2, 3};
  AttentionParams params;
  params.alibi_slopes = three;
  EXPECT_STATUS(bad_shape, call(0, params));
  params = {};
  params.sink_logits = three;
  EXPECT_STATUS(bad_shape, call(0, params));
  expect_untouched();
}
TEST_F(Refusal, NonFiniteInput) {
  for (const float bad : {kNaN, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()})
    for (Block* block : {&keys_, &values_, &queries_}) {
      float& victim = block->row(4, block->heads - 1)[63];
      const float good = victim;
      victim = bad;
      EXPECT_STATUS(non_finite_input, call());
      victim = good;
    }
  keys_.row(0)[0] = 8e28F;  // above 2^96
  EXPECT_STATUS(non_finite_input, call());
  expect_untouched();
}
TEST_F(Refusal, OneBadItemRefusesTheBatch) {
  const SequenceId other = new_sequence(cache_);
  Block bad_keys = keys_;
  bad_keys.row(2)[3] = kNaN;
  std::array<BatchItem, 2> items{item_, item_};
  items[1].sequence = other;
  items[1].keys = bad_keys.rows();
  Block other_out(5, 4, 64, 7.0F);
  items[1].out = other_out.rows();
  items[1].lse = nullptr;
  EXPECT_STATUS(non_finite_input, turboquant::attend(cache_, 0, items));
  EXPECT_EQ(cache_.length(other), 0U);
  expect_untouched();
}
TEST_F(Refusal, TwoAppendsToOneSequence) {
  std::array<BatchItem, 2> items{item_, item_};
  items[1].queries = {};
  items[1].out = {};
  items[1].lse = nullptr;
  EXPECT_FALSE(turboquant::attend(cache_, 0, items) == Status::ok);
  expect_untouched();
}
TEST_F(Refusal, LeavesTheNextCallAsIfItHadNotBeen) {
  KVCache<turboquant::TQ4> other(small_config());
  const SequenceId id = new_sequence(other);
  ASSERT_OK(append_only(other, 0, id, gaussian_block(4, 40, 2, 64), gaussian_block(5, 40, 2, 64)));
  Block bad = values_;
  bad.row(4)[0] = kNaN;
  item_.values = bad.rows();
  EXPECT_STATUS(non_finite_input, call());
  EXPECT_TRUE(same_bits(attend_one(cache_, 0, id_, keys_, values_, queries_),
                        attend_one(other, 0, id, keys_, values_, queries_)));
}

/// y = H diag(signs) x / sqrt(d) for d a power of two (Sylvester), in double precision.
std::vector<double> rotate(std::vector<double> x, const float* signs) {
  const std::size_t d = x.size();
  for (std::size_t i = 0; i < d; ++i) x[i] *= static_cast<double>(signs[i]);
  for (std::size_t step = 1; step < d; step *= 2)
    for (std::size_t i = 0; i < d; ++i)
      if ((i & step) == 0) {
        const double a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  for (double& y : x) y /= std::sqrt(static_cast<double>(d));
  return x;
}

TEST(Attend, ExactAgainstThePublishedQueryRounding) {
  // Without centring the logit of a code is the dot product of the decoded key with the rotated query rounded to
  // multiples of max / 127. Recomputed here in double, what is left is fp32 rounding and the 14-bit weights.
  CacheConfig config = small_config(1, 128);
  config.layers[0].center_bits = 0;
  config.recent_tokens = 0;
  Scenario<KVCache<turboquant::TQ4>> run(config, codes_of(4), 1);
  run.step(160, 1);
  const turboquant::Rotation rotation(config.seed, 128);
  for (std::size_t trial = 0; trial < 20; ++trial) {
    const Block query = run.queries(1, 500 + trial);
    std::vector<double> rotated = rotate(query.exact().numbers, rotation.signs());
    double largest = 0;
    for (const double x : rotated) largest = std::max(largest, std::fabs(x));
    const double step = largest / 127;
    double nearest_tie = 1;
    for (double& x : rotated) {
      nearest_tie = std::min(nearest_tie, std::fabs(std::fabs(x / step - std::floor(x / step)) - 0.5));
      x = std::nearbyint(x / step) * step;
    }
    if (nearest_tie < 1e-4) continue;  // fp32 may round the other way
    // The keys are in the original domain: rotate them instead of the query back.
    oracle::Tensor rounded(1, 1, 128), keys(160, 1, 128);
    rounded.numbers = rotated;
    for (std::size_t j = 0; j < 160; ++j) {
      const double* key = run.mirror.decoded_keys().row(j, 0);
      const std::vector<double> turned = rotate(std::vector<double>(key, key + 128), rotation.signs());
      std::copy(turned.begin(), turned.end(), keys.row(j, 0));
    }
    std::vector<double> lse;
    const oracle::Tensor truth = oracle::attend(keys, run.mirror.decoded_values(), rounded, 159, {}, &lse);
    const Outcome outcome = attend_only(run.cache, 0, run.id, query);
    ASSERT_OK(outcome.status);
    // 160 weights, each off by at most 2^-15 of its page's largest (here about 10 times the average).
    EXPECT_LE(oracle::distance(outcome.out.exact().row(0, 0), truth.row(0, 0), 128),
              3e-4 * oracle::norm(truth.row(0, 0), 128));
    EXPECT_NEAR(static_cast<double>(outcome.lse[0]), lse[0], 2e-5);
  }
}

}  // namespace
