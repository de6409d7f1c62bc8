// Promises that outlive a call: what reserve() set aside, what a refused or dropped plan gives back, who may change a
// sequence while a plan is pending.
#include <gtest/gtest.h>

#include <turboquant/turboquant.hpp>
#include <vector>

#include "cache/block.hpp"
#include "oracle/random.hpp"

namespace {

using namespace turboquant;
using Cache = KVCache<TQ4>;

CacheConfig small_pages() {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 64}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}

struct Tokens {
  std::vector<float> keys, values;
  explicit Tokens(std::size_t count) : keys(count * 64), values(count * 64) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] = static_cast<float>(oracle::gaussian(1, 1, i));
      values[i] = static_cast<float>(oracle::gaussian(1, 2, i));
    }
  }
  BatchItem item(SequenceId id, std::size_t begin, std::size_t count) const {
    BatchItem step;
    step.sequence = id;
    step.keys = ConstRows(keys.data() + begin * 64, count, 1, 64);
    step.values = ConstRows(values.data() + begin * 64, count, 1, 64);
    return step;
  }
};

Status append(Cache& cache, const Tokens& tokens, SequenceId id, std::size_t begin, std::size_t count) {
  const BatchItem step = tokens.item(id, begin, count);
  return attend(cache, 0, std::span(&step, 1));
}

std::size_t live(const Cache& cache) { return cache.memory().page_bytes + cache.memory().tail_bytes; }

TEST(Reserve, ARefusedAppendGivesThePoolItsBlocksBack) {
  CacheConfig config = small_pages();
  const Tokens tokens(4000);
  SequenceId hungry, other;
  {
    Cache probe(config);
    ASSERT_EQ(probe.create_sequence(hungry), Status::ok);
    ASSERT_EQ(append(probe, tokens, hungry, 0, 64), Status::ok);
    config.max_bytes = 3 * live(probe);
  }
  Cache cache(config);
  ASSERT_EQ(cache.create_sequence(hungry), Status::ok);
  ASSERT_EQ(cache.create_sequence(other), Status::ok);
  ASSERT_EQ(cache.reserve(hungry, 16), Status::ok);
  ASSERT_EQ(append(cache, tokens, hungry, 0, 40), Status::ok);
  const std::size_t before = live(cache);
  EXPECT_EQ(append(cache, tokens, hungry, 40, 3000), Status::out_of_memory);
  EXPECT_EQ(live(cache), before) << "a refused call holds memory";
  EXPECT_EQ(append(cache, tokens, other, 0, 48), Status::ok) << "and so starves another sequence";
}

TEST(Reserve, WhatCannotBeHadTakesNoTables) {
  CacheConfig config = small_pages();
  config.max_bytes = 1 << 16;
  Cache cache(config);
  SequenceId id;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  const MemoryUse before = cache.memory();
  for (const std::size_t tokens : {std::size_t{10000}, std::size_t{1} << 26, kMostTokens}) {
    EXPECT_EQ(cache.reserve(id, tokens), Status::out_of_memory);
    EXPECT_EQ(cache.memory().table_bytes, before.table_bytes) << tokens;
    EXPECT_EQ(cache.memory().slab_bytes, before.slab_bytes) << tokens;
  }
  EXPECT_EQ(cache.reserve(id, 100), Status::ok);
}

TEST(Reserve, ADroppedPlanPutsReservedBlocksBack) {
  Cache cache(small_pages());
  const Tokens tokens(400);
  SequenceId id;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  ASSERT_EQ(cache.reserve(id, 100), Status::ok);
  const std::size_t before = live(cache);
  for (const std::size_t count : {10u, 100u, 300u}) {
    AttentionPlan step;
    const BatchItem item = tokens.item(id, 0, count);
    ASSERT_EQ(plan(cache, 0, std::span(&item, 1), {}, step), Status::ok);
  }
  EXPECT_EQ(live(cache), before);
  EXPECT_EQ(cache.length(id), 0u);
}

// One token at a time, drafts rolled back: with the pool shut, nothing of what was promised fails.
TEST(Reserve, HoldsThroughSingleTokensAndRollbacks) {
  const Tokens tokens(400);
  CacheConfig config = small_pages();
  struct Gate {
    bool shut = false;
  } gate;
  config.memory = {&gate,
                   [](void* context, std::size_t bytes, std::size_t) -> void* {
                     if (static_cast<Gate*>(context)->shut) return nullptr;
                     return ::operator new(bytes, std::align_val_t(64), std::nothrow);
                   },
                   [](void*, void* memory, std::size_t) { ::operator delete(memory, std::align_val_t(64)); }};
  Cache cache(config);
  SequenceId id, greedy;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  ASSERT_EQ(cache.create_sequence(greedy), Status::ok);
  ASSERT_EQ(append(cache, tokens, id, 0, 30), Status::ok);
  ASSERT_EQ(cache.reserve(id, 200), Status::ok);
  gate.shut = true;
  // Another sequence takes every free block that is left.
  std::size_t taken = 0;
  while (append(cache, tokens, greedy, taken % 300, 1) == Status::ok) ++taken;
  std::size_t length = 30;
  while (length < 230) {
    const std::size_t drafts = std::min<std::size_t>(8, 230 - length);
    ASSERT_EQ(append(cache, tokens, id, length, drafts), Status::ok) << "at length " << length;
    length += drafts;
    if (length < 230 && drafts > 3) {
      length -= 5;
      ASSERT_EQ(cache.truncate(id, length), Status::ok);
    }
  }
  EXPECT_EQ(cache.length(id), 230u);
}

TEST(Reserve, SealLeavesItAlone) {
  const Tokens tokens(400);
  CacheConfig config = small_pages();
  Cache cache(config);
  SequenceId id;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  ASSERT_EQ(append(cache, tokens, id, 0, 20), Status::ok);
  ASSERT_EQ(cache.reserve(id, 64), Status::ok);
  const std::size_t pages = cache.memory().page_bytes;
  ASSERT_EQ(cache.seal(id), Status::ok);
  EXPECT_GT(cache.memory().page_bytes, pages) << "sealed pages come from the pool";
}

// What is left of a reserve goes back once its tokens have come.
TEST(Reserve, EndsWithItsTokens) {
  const Tokens tokens(400);
  Cache reserved(small_pages()), plain(small_pages());
  SequenceId a, b;
  ASSERT_EQ(reserved.create_sequence(a), Status::ok);
  ASSERT_EQ(plain.create_sequence(b), Status::ok);
  ASSERT_EQ(reserved.reserve(a, 100), Status::ok);
  for (std::size_t t = 0; t < 100; ++t) {
    ASSERT_EQ(append(reserved, tokens, a, t, 1), Status::ok);
    ASSERT_EQ(append(plain, tokens, b, t, 1), Status::ok);
  }
  EXPECT_EQ(live(reserved), live(plain));
  ASSERT_EQ(reserved.reserve(a, 0), Status::ok);
  EXPECT_EQ(live(reserved), live(plain));
}

// And with them its promise: a truncation after that gives blocks to the pool, not to a reserve for nothing.
TEST(Reserve, IsOverWhenItsTokensHaveCome) {
  const Tokens tokens(400);
  Cache reserved(small_pages()), plain(small_pages());
  SequenceId a, b;
  ASSERT_EQ(reserved.create_sequence(a), Status::ok);
  ASSERT_EQ(plain.create_sequence(b), Status::ok);
  ASSERT_EQ(reserved.reserve(a, 300), Status::ok);
  ASSERT_EQ(append(reserved, tokens, a, 0, 300), Status::ok);
  ASSERT_EQ(append(plain, tokens, b, 0, 300), Status::ok);
  for (const std::size_t length : {290u, 100u, 0u}) {
    ASSERT_EQ(reserved.truncate(a, length), Status::ok);
    ASSERT_EQ(plain.truncate(b, length), Status::ok);
    EXPECT_EQ(live(reserved), live(plain)) << length;
  }
}

// Whoever needs less than was promised gives back the rest by a reserve of nothing.
TEST(Reserve, OfNoTokensGivesBackWhatIsLeft) {
  const Tokens tokens(400);
  Cache reserved(small_pages()), plain(small_pages());
  SequenceId a, b;
  ASSERT_EQ(reserved.create_sequence(a), Status::ok);
  ASSERT_EQ(plain.create_sequence(b), Status::ok);
  ASSERT_EQ(reserved.reserve(a, 300), Status::ok);
  ASSERT_EQ(append(reserved, tokens, a, 0, 70), Status::ok);
  ASSERT_EQ(append(plain, tokens, b, 0, 70), Status::ok);
  EXPECT_GT(live(reserved), live(plain));
  ASSERT_EQ(reserved.reserve(a, 0), Status::ok);
  EXPECT_EQ(live(reserved), live(plain));
  // The promise is over, too: what is truncated goes to the pool.
  ASSERT_EQ(reserved.truncate(a, 30), Status::ok);
  ASSERT_EQ(plain.truncate(b, 30), Status::ok);
  EXPECT_EQ(live(reserved), live(plain));
}

// A plan that only reads keeps its sequence from changing, too; reading beside it is allowed.
TEST(PendingPlan, AReadingPlanRefusesChanges) {
  Cache cache(small_pages());
  const Tokens tokens(400);
  SequenceId id;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  ASSERT_EQ(append(cache, tokens, id, 0, 100), Status::ok);
  std::vector<float> q(64, 0.1f), out(64), other(64);
  BatchItem reads;
  reads.sequence = id;
  reads.queries = ConstRows(q.data(), 1, 1, 64);
  reads.out = Rows(out.data(), 1, 1, 64);
  AttentionPlan step;
  ASSERT_EQ(plan(cache, 0, std::span(&reads, 1), {}, step), Status::ok);
  EXPECT_EQ(cache.truncate(id, 10), Status::bad_shape);
  EXPECT_EQ(cache.seal(id), Status::bad_shape);
  EXPECT_EQ(append(cache, tokens, id, 100, 1), Status::bad_shape);
  cache.release(id);
  EXPECT_EQ(cache.length(id), 100u);
  BatchItem beside = reads;
  beside.out = Rows(other.data(), 1, 1, 64);
  EXPECT_EQ(attend(cache, 0, std::span(&beside, 1)), Status::ok);
  const Scratch workspace(step.workspace_bytes());
  for (std::size_t phase = 0; phase < step.phases(); ++phase) {
    for (std::size_t task = 0; task < step.tasks(phase); ++task) step.run(phase, task, workspace.get());
  }
  EXPECT_EQ(out, other);
  EXPECT_EQ(cache.truncate(id, 98), Status::ok) << "the plan has run";
}

// A query at an old position: the same numbers in the call that appends behind it and in the next one.
TEST(PendingPlan, AnOldPositionReadsTheSameBesideAnAppendAndAfterIt) {
  const Tokens tokens(400);
  std::vector<std::vector<float>> results;
  for (const bool together : {true, false}) {
    Cache cache(small_pages());
    SequenceId id;
    ASSERT_EQ(cache.create_sequence(id), Status::ok);
    ASSERT_EQ(append(cache, tokens, id, 0, 100), Status::ok);
    std::vector<float> q(64, 0.3f), out(64);
    BatchItem items[2] = {tokens.item(id, 100, 32), {}};
    items[1].sequence = id;
    items[1].queries = ConstRows(q.data(), 1, 1, 64);
    items[1].out = Rows(out.data(), 1, 1, 64);
    items[1].position = 99;
    if (together) {
      ASSERT_EQ(attend(cache, 0, items), Status::ok);
    } else {
      ASSERT_EQ(attend(cache, 0, std::span(items, 1)), Status::ok);
      ASSERT_EQ(attend(cache, 0, std::span(items + 1, 1)), Status::ok);
    }
    results.push_back(out);
  }
  EXPECT_EQ(results[0], results[1]);
}

// The workspace of a decode step stops growing with the context.
TEST(PendingPlan, WorkspaceIsBounded) {
  CacheConfig config = small_pages();
  config.page_tokens = 256;
  Cache cache(config);
  const Tokens tokens(2048);
  SequenceId id;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  std::vector<float> q(64, 0.1f), out(64);
  BatchItem reads;
  reads.sequence = id;
  reads.queries = ConstRows(q.data(), 1, 1, 64);
  reads.out = Rows(out.data(), 1, 1, 64);
  std::size_t at_64k = 0;
  for (std::size_t length = 2048; length <= 131072; length += 2048) {
    ASSERT_EQ(append(cache, tokens, id, 0, 2048), Status::ok);
    AttentionPlan step;
    ASSERT_EQ(plan(cache, 0, std::span(&reads, 1), {}, step), Status::ok);
    if (length == 65536) at_64k = step.workspace_bytes();
    if (length == 131072) {
      EXPECT_LE(step.workspace_bytes(), at_64k + at_64k / 20);
    }
  }
}

TEST(Bias, SteepAlibiIsNoNaN) {
  CacheConfig config = small_pages();
  config.recent_tokens = 1000;
  Cache cache(config);
  const Tokens tokens(100);
  SequenceId id;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  std::vector<float> q(64, 0.1f), out(64);
  BatchItem step = tokens.item(id, 0, 100);
  step.queries = ConstRows(q.data(), 1, 1, 64);
  step.out = Rows(out.data(), 1, 1, 64);
  const float slope = 1e37f;  // times a distance of 99 it is infinite
  AttentionParams params;
  params.alibi_slopes = std::span(&slope, 1);
  ASSERT_EQ(attend(cache, 0, std::span(&step, 1), params), Status::ok);
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], to_float(to_bfloat16(tokens.values[99 * 64 + i])));
}

TEST(Merge, ASinkOfNothingOverNoKeysStaysNothing) {
  std::vector<float> out(64, 0.0f);
  const float nothing = -std::numeric_limits<float>::infinity();
  float lse = nothing;
  finish_partials(Rows(out.data(), 1, 1, 64), &lse, std::span(&nothing, 1));
  EXPECT_EQ(lse, nothing);
  for (const float x : out) EXPECT_EQ(x, 0.0f);
}

TEST(Refusal, AnElementTypeThatIsNone) {
  Cache cache(small_pages());
  const Tokens tokens(1);
  SequenceId id;
  ASSERT_EQ(cache.create_sequence(id), Status::ok);
  BatchItem step = tokens.item(id, 0, 1);
  step.keys.type = static_cast<DType>(7);
  EXPECT_EQ(attend(cache, 0, std::span(&step, 1)), Status::bad_shape);
  EXPECT_EQ(cache.length(id), 0u);
}

}  // namespace
