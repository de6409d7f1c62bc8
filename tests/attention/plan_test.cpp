// Engines with threads: executors and AttentionPlan give the serial results bit for bit, and a dropped plan is no plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <string_view>
#include <thread>
#include <vector>

#include "attention/thread_pool.hpp"
#include "cache/block.hpp"

namespace {

using namespace tests;
using turboquant::AttentionParams;
using turboquant::AttentionPlan;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

CacheConfig two_layers() {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 2, .head_dim = 64},
                   LayerShape{.kv_heads = 1, .head_dim = 96, .window = 1200}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}

/// Three sequences (a long one, whose context is split, a short one, a new one) and the items of one step over a layer.
class Step {
 public:
  static constexpr std::size_t kSequences = 3;
  static constexpr std::array<std::size_t, kSequences> kPresent{2300, 37, 0};

  explicit Step(KVCache<turboquant::TQ4>& cache) : cache_(cache) {
    for (std::size_t s = 0; s < kSequences; ++s) {
      ids_[s] = new_sequence(cache);
      for (std::size_t layer = 0; layer < 2; ++layer)
        EXPECT_OK(append_only(cache, layer, ids_[s], keys(s, layer, 0, kPresent[s]), values(s, layer, 0, kPresent[s])));
    }
  }

  /// Items that append `count` tokens to each sequence with all their queries.
  std::span<const BatchItem> items(std::size_t layer, std::size_t count) {
    for (std::size_t s = 0; s < kSequences; ++s) {
      const std::size_t begin = cache_length(s, layer);
      keys_[s] = keys(s, layer, begin, count);
      values_[s] = values(s, layer, begin, count);
      queries_[s] = gaussian_block(300 + s, count, 4, keys_[s].dim, 1, begin);
      outcomes_[s] = Outcome{{}, Block(count, 4, values_[s].dim, kNaN), std::vector<float>(count * 4, kNaN)};
      items_[s] = {};
      items_[s].sequence = ids_[s];
      items_[s].keys = keys_[s].rows();
      items_[s].values = values_[s].rows();
      items_[s].queries = queries_[s].rows();
      items_[s].out = outcomes_[s].out.rows();
      items_[s].lse = outcomes_[s].lse.data();
      lengths_[s][layer] += count;
    }
    return items_;
  }
  void undo(std::size_t layer, std::size_t count) {
    for (auto& length : lengths_) length[layer] -= count;
  }
  const std::array<Outcome, kSequences>& outcomes() const { return outcomes_; }
  SequenceId id(std::size_t s) const { return ids_[s]; }

 private:
  std::size_t cache_length(std::size_t s, std::size_t layer) const { return lengths_[s][layer]; }
  Block keys(std::size_t s, std::size_t layer, std::size_t begin, std::size_t count) const {
    const LayerShape& shape = cache_.config().layers[layer];
    return gaussian_block(100 + 10 * s + layer, count, shape.kv_heads, shape.head_dim, 1, begin);
  }
  Block values(std::size_t s, std::size_t layer, std::size_t begin, std::size_t count) const {
    const LayerShape& shape = cache_.config().layers[layer];
    return gaussian_block(200 + 10 * s + layer, count, shape.kv_heads, shape.head_dim, 1, begin);
  }

  KVCache<turboquant::TQ4>& cache_;
  std::array<SequenceId, kSequences> ids_;
  std::array<std::array<std::size_t, 2>, kSequences> lengths_{{{2300, 2300}, {37, 37}, {0, 0}}};
  std::array<Block, kSequences> keys_, values_, queries_;
  std::array<Outcome, kSequences> outcomes_;
  std::array<BatchItem, kSequences> items_;
};

/// Runs the same steps by `attend_step(cache, layer, items, params)` and serially, and compares every bit.
template <class AttendStep>
void expect_serial_results(const AttendStep& attend_step) {
  KVCache<turboquant::TQ4> serial_cache(two_layers()), other_cache(two_layers());
  Step serial(serial_cache), other(other_cache);
  for (const std::size_t count : {1U, 40U, 1U, 5U, 1U, 1U, 1U, 1U, 1U, 1U})
    for (std::size_t layer = 0; layer < 2; ++layer) {
      AttentionParams params;
      params.softcap = layer == 0 ? 0.0F : 5.0F;
      ASSERT_OK(turboquant::attend(serial_cache, layer, serial.items(layer, count), params));
      attend_step(other_cache, layer, other.items(layer, count), params);
      for (std::size_t s = 0; s < Step::kSequences; ++s) {
        EXPECT_TRUE(all_finite(serial.outcomes()[s].out));
        EXPECT_TRUE(same_bits(serial.outcomes()[s], other.outcomes()[s]))
            << "sequence " << s << " layer " << layer << " count " << count;
      }
    }
  for (std::size_t s = 0; s < Step::kSequences; ++s) {
    EXPECT_EQ(other_cache.length(other.id(s)), serial_cache.length(serial.id(s)));
    Block keys, values, other_keys, other_values;
    const std::size_t length = serial_cache.length(serial.id(s));
    ASSERT_OK(read_rows(serial_cache, serial.id(s), 0, 0, length, keys, values));
    ASSERT_OK(read_rows(other_cache, other.id(s), 0, 0, length, other_keys, other_values));
    EXPECT_TRUE(same_bits(keys, other_keys) && same_bits(values, other_values));
  }
}

TEST(Executor, AThreadPoolGivesTheSerialBits) {
  for (const std::size_t threads : {1U, 3U}) {
    ThreadPool pool(threads);
    expect_serial_results(
        [&](auto& cache, std::size_t layer, std::span<const BatchItem> items, const AttentionParams& params) {
          ASSERT_OK(turboquant::attend(cache, layer, items, params, pool));
        });
    EXPECT_GT(pool.tasks_run(), 0U);
  }
}

TEST(Executor, MayRunTasksBackwards) {
  expect_serial_results(
      [](auto& cache, std::size_t layer, std::span<const BatchItem> items, const AttentionParams& params) {
        ASSERT_OK(turboquant::attend(cache, layer, items, params, [](std::size_t tasks, auto&& body) {
          while (tasks-- > 0) body(tasks);
        }));
      });
}

// What a task leaves in its slot, the next one must not take for its own: here tasks that attend take turns with tasks
// that code.
TEST(Executor, MayRunTasksFromBothEnds) {
  expect_serial_results(
      [](auto& cache, std::size_t layer, std::span<const BatchItem> items, const AttentionParams& params) {
        ASSERT_OK(turboquant::attend(cache, layer, items, params, [](std::size_t tasks, auto&& body) {
          for (std::size_t i = 0; i < tasks; ++i) body(i % 2 == 0 ? i / 2 : tasks - 1 - i / 2);
        }));
      });
}

TEST(Plan, AnSpmdLoopGivesTheSerialBits) {
  for (const std::size_t threads : {1U, 2U, 4U}) {
    expect_serial_results(
        [&](auto& cache, std::size_t layer, std::span<const BatchItem> items, const AttentionParams& params) {
          AttentionPlan plan;
          ASSERT_OK(turboquant::plan(cache, layer, items, params, plan));
          EXPECT_GT(plan.phases(), 0U);
          EXPECT_TRUE(run_plan(plan, threads));
        });
  }
}

TEST(Plan, ReusedForTheNextStep) {
  AttentionPlan plan;
  expect_serial_results(
      [&](auto& cache, std::size_t layer, std::span<const BatchItem> items, const AttentionParams& params) {
        ASSERT_OK(turboquant::plan(cache, layer, items, params, plan));
        EXPECT_TRUE(run_plan(plan, 2));
      });
}

TEST(Plan, ChangesNoLengthBeforeItsLastTask) {
  KVCache<turboquant::TQ4> cache(two_layers());
  Step step(cache);
  AttentionPlan plan;
  const auto items = step.items(0, 20);
  ASSERT_OK(turboquant::plan(cache, 0, items, {}, plan));
  const auto items_of_layer_1 = [&] { EXPECT_OK(turboquant::attend(cache, 1, step.items(1, 20))); };
  const Workspace workspace(plan.workspace_bytes());
  std::size_t left = 0;
  for (std::size_t phase = 0; phase < plan.phases(); ++phase) left += plan.tasks(phase);
  for (std::size_t phase = 0; phase < plan.phases(); ++phase)
    for (std::size_t task = 0; task < plan.tasks(phase); ++task) {
      Block keys, values;  // the layer's own length shows in what can be read
      EXPECT_FALSE(read_rows(cache, step.id(0), 0, 2300, 2301, keys, values) == Status::ok);
      plan.run(phase, task, workspace.get());
      --left;
    }
  EXPECT_EQ(left, 0U);
  Block keys, values;
  EXPECT_OK(read_rows(cache, step.id(0), 0, 2300, 2301, keys, values));
  items_of_layer_1();
  EXPECT_EQ(cache.length(step.id(0)), 2320U);
}

TEST(Plan, DroppedEarlierChangesNothing) {
  for (const bool run_some : {false, true}) {
    KVCache<turboquant::TQ4> cache(two_layers()), other_cache(two_layers());
    Step step(cache), other(other_cache);
    const turboquant::MemoryUse before = cache.memory();
    {
      AttentionPlan plan;
      ASSERT_OK(turboquant::plan(cache, 0, step.items(0, 45), {}, plan));
      if (run_some) {  // all but the last task, which would commit
        const Workspace workspace(plan.workspace_bytes());
        for (std::size_t phase = 0; phase < plan.phases(); ++phase)
          for (std::size_t task = 0; task + (phase + 1 == plan.phases() ? 1 : 0) < plan.tasks(phase); ++task)
            plan.run(phase, task, workspace.get());
      }
      step.undo(0, 45);
    }
    const turboquant::MemoryUse after = cache.memory();
    EXPECT_EQ(after.page_bytes, before.page_bytes);
    EXPECT_EQ(after.tail_bytes, before.tail_bytes);
    EXPECT_EQ(cache.length(step.id(0)), 2300U);
    for (const std::size_t count : {1U, 30U}) {
      ASSERT_OK(turboquant::attend(cache, 0, step.items(0, count)));
      ASSERT_OK(turboquant::attend(other_cache, 0, other.items(0, count)));
      for (std::size_t s = 0; s < Step::kSequences; ++s)
        EXPECT_TRUE(same_bits(step.outcomes()[s], other.outcomes()[s]));
    }
    ASSERT_OK(cache.truncate(step.id(0), 2300));  // the sequence accepts calls again
  }
}

TEST(Plan, RefusesWhatAttendRefuses) {
  KVCache<turboquant::TQ4> cache(two_layers());
  Step step(cache);
  const auto items = step.items(0, 3);
  std::array<BatchItem, 3> bad{items[0], items[1], items[2]};
  AttentionPlan plan;
  bad[1].keys.dim = 32;
  EXPECT_STATUS(bad_shape, turboquant::plan(cache, 0, bad, {}, plan));
  bad[1] = items[1];
  bad[2].sequence = SequenceId{};
  EXPECT_STATUS(unknown_sequence, turboquant::plan(cache, 0, bad, {}, plan));
  EXPECT_STATUS(bad_layer, turboquant::plan(cache, 2, items, {}, plan));
  Block queries = gaussian_block(1, 3, 4, 64);
  queries.row(2, 3)[63] = kNaN;
  bad[2] = items[2];
  bad[2].queries = queries.rows();
  EXPECT_STATUS(non_finite_input, turboquant::plan(cache, 0, bad, {}, plan));
  bad[2] = items[2];
  bad[2].position = (std::size_t{1} << 48) + 1;
  EXPECT_STREQ(turboquant::plan(cache, 0, bad, {}, plan).field, "position");
  bad[2] = items[2];
  bad[2].key_begin = 3, bad[2].key_end = 2;
  EXPECT_STREQ(turboquant::plan(cache, 0, bad, {}, plan).field, "key_begin");
  ASSERT_OK(turboquant::plan(cache, 0, items, {}, plan));
  EXPECT_TRUE(run_plan(plan, 1));
}

// A thread that lags behind, or an engine that takes no notice of a refusal, calls a plan that has ended.
TEST(Plan, DoesNothingOnceItHasEnded) {
  KVCache<turboquant::TQ4> cache(two_layers());
  Step step(cache);
  AttentionPlan plan;
  ASSERT_OK(turboquant::plan(cache, 0, step.items(0, 45), {}, plan));
  EXPECT_TRUE(run_plan(plan, 1));
  const auto outcomes = step.outcomes();
  const turboquant::MemoryUse use = cache.memory();
  EXPECT_TRUE(run_plan(plan, 1));
  for (std::size_t s = 0; s < Step::kSequences; ++s) EXPECT_TRUE(same_bits(step.outcomes()[s], outcomes[s]));
  EXPECT_EQ(cache.memory().page_bytes, use.page_bytes);
  EXPECT_EQ(cache.memory().tail_bytes, use.tail_bytes);
  Block keys, values;
  EXPECT_OK(read_rows(cache, step.id(0), 0, 2300, 2345, keys, values));
  EXPECT_STATUS(bad_shape, read_rows(cache, step.id(0), 0, 2300, 2346, keys, values));
}

TEST(Plan, IsDroppedByHand) {
  KVCache<turboquant::TQ4> cache(two_layers());
  Step step(cache);
  AttentionPlan plan;
  plan.drop();  // nothing yet
  const turboquant::MemoryUse before = cache.memory();
  ASSERT_OK(turboquant::plan(cache, 0, step.items(0, 45), {}, plan));
  EXPECT_STATUS(bad_shape, cache.truncate(step.id(0), 2300));
  plan.drop();
  EXPECT_EQ(plan.phases(), 0U);
  EXPECT_EQ(cache.memory().tail_bytes, before.tail_bytes);
  EXPECT_OK(cache.truncate(step.id(0), 2300));
}

TEST(Plan, NamesTheItemThatItRefuses) {
  KVCache<turboquant::TQ4> cache(two_layers());
  Step step(cache);
  const auto items = step.items(0, 3);
  const auto refused = [&](std::size_t index, auto&& spoil, Status::Code code, std::string_view field) {
    std::array<BatchItem, 3> bad{items[0], items[1], items[2]};
    spoil(bad[index]);
    AttentionPlan plan;
    const Status status = turboquant::plan(cache, 0, bad, {}, plan);
    EXPECT_EQ(status.code, code) << field;
    EXPECT_EQ(status.field, field);
    EXPECT_EQ(status.item, static_cast<std::int64_t>(index)) << field;
  };
  Block keys = gaussian_block(1, 3, 2, 64), queries = gaussian_block(1, 3, 4, 64);
  keys.row(1, 1)[5] = queries.row(2, 3)[63] = kNaN;
  const auto unknown = static_cast<turboquant::DType>(9);
  refused(
      1, [&](BatchItem& item) { item.keys = keys.rows(); }, Status::non_finite_input, "keys");
  refused(
      2, [&](BatchItem& item) { item.queries = queries.rows(); }, Status::non_finite_input, "queries");
  refused(
      0, [&](BatchItem& item) { item.keys.type = unknown; }, Status::bad_shape, "keys.type");
  refused(
      0, [&](BatchItem& item) { item.out.type = unknown; }, Status::bad_shape, "out.type");
  refused(
      2, [&](BatchItem& item) { item.values.data = nullptr; }, Status::bad_shape, "values.data");
  refused(
      1, [&](BatchItem& item) { item.key_begin = 3, item.key_end = 2; }, Status::bad_shape, "key_begin");
  refused(
      1, [&](BatchItem& item) { item.sequence = {}; }, Status::unknown_sequence, "sequence");
  AttentionPlan plan;
  EXPECT_EQ(turboquant::plan(cache, 5, items, {}, plan).item, -1);
}

// A query that may see nothing, as its range begins behind it, says nothing of those after it.
TEST(Plan, RefusesAnyQueryBehindTheWindow) {
  CacheConfig config = two_layers();
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 64, .window = 64}};
  KVCache<turboquant::TQ4> cache(config);
  const SequenceId id = new_sequence(cache);
  const Block keys = gaussian_block(1, 600, 1, 64), values = gaussian_block(2, 600, 1, 64);
  ASSERT_OK(append_only(cache, 0, id, keys, values));
  const Block queries = gaussian_block(3, 10, 1, 64);
  for (const std::size_t key_begin : {0U, 5U, 9U, 10U, 500U}) {
    Block out(10, 1, 64, kNaN);
    BatchItem item;
    item.sequence = id;
    item.queries = queries.rows();
    item.out = out.rows();
    item.position = 0;
    item.key_begin = key_begin;
    const Status status = turboquant::attend(cache, 0, {&item, 1});
    EXPECT_EQ(status.code, key_begin < 10 ? Status::behind_window : Status::ok) << key_begin;
    EXPECT_EQ(status.found, key_begin < 10 ? static_cast<std::int64_t>(key_begin) : 0);
  }
}

// Codes are read by position, so branches that have been coded cannot be told apart.
TEST(Plan, RefusesATreeThatWasSealed) {
  KVCache<turboquant::TQ8> cache(two_layers());
  const SequenceId id = new_sequence(cache);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    const LayerShape& shape = cache.config().layers[layer];
    const Block rows = gaussian_block(1 + layer, 104, shape.kv_heads, shape.head_dim);
    ASSERT_OK(append_only(cache, layer, id, rows, rows));
  }
  const std::array<std::uint64_t, 4> tree{1, 3, 5, 13};
  const Block queries = gaussian_block(3, 4, 2, 64);
  Block out(4, 2, 64, kNaN);
  BatchItem item;
  item.sequence = id;
  item.queries = queries.rows();
  item.out = out.rows();
  item.tree = tree.data();
  ASSERT_OK(turboquant::attend(cache, 0, {&item, 1}));
  ASSERT_OK(cache.seal(id));
  const Status status = turboquant::attend(cache, 0, {&item, 1});
  EXPECT_STATUS(bad_shape, status);
  EXPECT_STREQ(status.field, "tree");
}

TEST(Slots, MoreThreadsThanSlotsWait) {
  turboquant::detail::Slots slots;
  slots.reset(2);
  std::atomic<int> held{0}, most{0}, done{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        const std::size_t slot = slots.claim();
        const int now = ++held;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        if (round % 16 == 0) std::this_thread::yield();
        --held;
        slots.release(slot);
        ++done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, 16 * 200);
  EXPECT_LE(most, 2);
}

TEST(Slots, AThreadGetsItsOwnAgain) {
  turboquant::detail::Slots slots;
  slots.reset(3);
  const std::size_t mine = slots.claim();
  std::size_t others[2];
  std::thread([&] {
    for (std::size_t& other : others) other = slots.claim();
  }).join();
  EXPECT_EQ(mine + others[0] + others[1], 3U);
  EXPECT_EQ((std::max)({mine, others[0], others[1]}), 2U);
  for (const std::size_t other : others) slots.release(other);
  for (int round = 0; round < 3; ++round) {
    slots.release(mine);
    ASSERT_EQ(slots.claim(), mine);
  }
}

TEST(Plan, OfNothing) {
  KVCache<turboquant::TQ4> cache(two_layers());
  AttentionPlan plan;
  ASSERT_OK(turboquant::plan(cache, 0, std::span<const BatchItem>(), {}, plan));
  EXPECT_TRUE(run_plan(plan, 2));
}

}  // namespace
