// What a call of attend may look like: batches, empty items, element types and strides; and every refusal.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "attention/scenario.hpp"
#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::AttentionParams;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::npos;
using turboquant::SequenceId;
using turboquant::Status;

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

// Some heads of a model have a sink and others none: a sink of minus infinity takes no part, bit for bit.
TEST(Attend, ASinkOfMinusInfinityIsNone) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  KVCache<turboquant::TQ4> cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(2, 150, 2, 64), gaussian_block(3, 150, 2, 64)));
  for (const std::size_t count : {1U, 70U}) {
    const Block queries = gaussian_block(1, count, 4, 64);
    CallOptions options;
    options.with_lse = false;
    const Outcome none = attend_only(cache, 0, id, queries, options);
    ASSERT_OK(none.status);
    const std::array<float, 4> nothing{kNothing, kNothing, kNothing, kNothing}, some{kNothing, 1, kNothing, 2};
    options.params.sink_logits = nothing;
    const Outcome with_nothing = attend_only(cache, 0, id, queries, options);
    ASSERT_OK(with_nothing.status);
    EXPECT_TRUE(same_bits(with_nothing.out, none.out));
    options.params.sink_logits = some;
    const Outcome with_some = attend_only(cache, 0, id, queries, options);
    ASSERT_OK(with_some.status);
    Outcome whole = attend_only(cache, 0, id, queries);
    turboquant::finish_partials(whole.out.rows(), whole.lse.data(), some);
    for (std::size_t t = 0; t < count; ++t)
      for (std::size_t h = 0; h < 4; ++h) {
        const std::vector<float> found(with_some.out.row(t, h), with_some.out.row(t, h) + 64);
        const std::vector<float> without(none.out.row(t, h), none.out.row(t, h) + 64);
        EXPECT_EQ(same_bits(found, without), some[h] == kNothing) << t << ' ' << h;
        for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(found[i], whole.out.row(t, h)[i], 1e-5);
      }
  }
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
TEST_F(Refusal, SinksThatAreNoNumbers) {
  for (const float bad : {kNaN, std::numeric_limits<float>::infinity()}) {
    const std::array<float, 4> sinks{1, bad, 3, -std::numeric_limits<float>::infinity()};
    AttentionParams params;
    params.sink_logits = sinks;
    EXPECT_STATUS(non_finite_input, call(0, params));
  }
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

}  // namespace
