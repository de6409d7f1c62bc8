// Different sequences from different threads, sharing pages and the pool; one sequence read by many.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <turboquant/cache/stream.hpp>
#include <utility>
#include <vector>

#include "cache/audit.hpp"
#include "cache/together.hpp"

namespace {

using namespace tests;
using turboquant::KVCache;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;

/// A life with a forked prefix: drafts, rollback, a child, its release; the outputs on the way.
std::vector<Outcome> live(Cache& cache, SequenceId id, std::uint64_t stream, std::size_t prefix) {
  std::vector<Outcome> outcomes;
  std::size_t n = prefix;
  for (int round = 0; round < 12; ++round) {
    outcomes.push_back(attend_one(cache, 0, id, keys_of(stream, n, n + 5), values_of(stream, n, n + 5),
                                  keys_of(stream + 7, n, n + 5)));
    n += 5;
    if (round % 3 == 1) {
      (void)append_only(cache, 0, id, keys_of(stream + 50, n, n + 6), values_of(stream + 50, n, n + 6));
      (void)cache.truncate(id, n);
    }
    if (round % 4 == 2) {
      SequenceId child;
      if (cache.fork(id, n, child) == Status::ok) {
        outcomes.push_back(attend_one(cache, 0, child, keys_of(stream + 90, n, n + 20),
                                      values_of(stream + 90, n, n + 20), keys_of(stream + 91, 0, 1)));
        cache.release(child);
      }
    }
  }
  return outcomes;
}

TEST(Concurrency, SequencesThatShareAPrefixLiveTheirOwnLives) {
  const std::size_t prefix = 75;
  std::array<std::vector<Outcome>, kThreads> alone, together;
  for (const bool concurrent : {false, true}) {
    Cache cache(small_config());
    const SequenceId base = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, base, keys_of(1, 0, prefix), values_of(1, 0, prefix)));
    std::array<SequenceId, kThreads> ids;
    for (SequenceId& id : ids) ASSERT_OK(cache.fork(base, prefix, id));
    cache.release(base);
    const auto body = [&](std::size_t i) {
      (concurrent ? together : alone)[i] = live(cache, ids[i], 100 * (i + 1), prefix);
      cache.release(ids[i]);
    };
    if (concurrent) {
      run_together(body);
    } else {
      for (std::size_t i = 0; i < kThreads; ++i) body(i);
    }
    EXPECT_EQ(cache.memory().page_bytes, 0U);
    EXPECT_EQ(cache.memory().tail_bytes, 0U);
  }
  for (std::size_t i = 0; i < kThreads; ++i) {
    ASSERT_EQ(alone[i].size(), together[i].size());
    for (std::size_t k = 0; k < alone[i].size(); ++k) {
      ASSERT_OK(alone[i][k].status);
      ASSERT_OK(together[i][k].status);
      EXPECT_TRUE(same_bits(alone[i][k], together[i][k])) << i << ' ' << k;
    }
  }
}

TEST(Concurrency, ManyReadersOfOneSequenceBesideAWriterOfItsFork) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, keys_of(1, 0, 100), values_of(1, 0, 100)));
  SequenceId fork;
  ASSERT_OK(cache.fork(id, 100, fork));
  const Block query = keys_of(9, 0, 2);
  const Outcome wanted = attend_only(cache, 0, id, query);
  Block wanted_keys, wanted_values;
  ASSERT_OK(read_rows(cache, id, 0, 0, 100, wanted_keys, wanted_values));
  std::atomic<std::size_t> wrong{0};
  run_together([&](std::size_t thread) {
    for (std::size_t round = 0; round < 40; ++round) {
      if (thread == 0) {
        const std::size_t n = 100 + 3 * round;
        if (!(append_only(cache, 0, fork, keys_of(2, n, n + 3), values_of(2, n, n + 3)) == Status::ok)) ++wrong;
        continue;
      }
      if (!same_bits(attend_only(cache, 0, id, query), wanted)) ++wrong;
      std::vector<float> logits(200);
      if (!(turboquant::logits(cache, id, 0, query.rows(), logits.data()) == Status::ok)) ++wrong;
      Block keys, values;
      if (!(read_rows(cache, id, 0, 0, 100, keys, values) == Status::ok) || !same_bits(keys, wanted_keys)) ++wrong;
      if (cache.length(id) != 100 || cache.memory().page_bytes == 0) ++wrong;
    }
  });
  EXPECT_EQ(wrong.load(), 0U);
  EXPECT_EQ(cache.length(fork), 220U);
}

TEST(Concurrency, SequencesComeAndGo) {
  Cache cache(small_config());
  const Block keys = keys_of(1, 0, 40), values = values_of(1, 0, 40), query = keys_of(2, 0, 1);
  const SequenceId reference = new_sequence(cache);
  const Outcome wanted = attend_one(cache, 0, reference, keys, values, query);
  std::atomic<std::size_t> wrong{0};
  run_together([&](std::size_t) {
    for (int round = 0; round < 100; ++round) {
      SequenceId id;
      if (!(cache.create_sequence(id) == Status::ok)) ++wrong;
      if (!same_bits(attend_one(cache, 0, id, keys, values, query), wanted)) ++wrong;
      cache.release(id);
      if (cache.length(id) != 0) ++wrong;
    }
  });
  EXPECT_EQ(wrong.load(), 0U);
  cache.release(reference);
  EXPECT_EQ(cache.memory().page_bytes + cache.memory().tail_bytes, 0U);
}

// ---- the table of docs/threads-and-memory.md: every pair of calls, on two sequences that share pages and tiles

/// What a side of a pair has seen.
struct Record {
  std::vector<float> numbers;
  std::size_t refused = 0;  // calls that failed, and other things that should not be

  void add(const Outcome& outcome) {
    check(outcome.status);
    add(outcome.out.numbers);
    add(outcome.lse);
  }
  void add(const std::vector<float>& more) { numbers.insert(numbers.end(), more.begin(), more.end()); }
  void check(Status status) { refused += status == Status::ok ? 0 : 1; }
  void check(bool right) { refused += right ? 0 : 1; }
};

constexpr std::size_t kPrefix = 75;
constexpr int kRounds = 10;

/// One side: a sequence of kPrefix tokens of its own, in whose pages another thread has a share.
class Side {
 public:
  Side(Cache& cache, SequenceId id, std::uint64_t stream) : cache_(cache), id_(id), stream_(stream) {}

  void append(std::size_t count) {
    record.check(append_only(cache_, 0, id_, keys_of(stream_, n_, n_ + count), values_of(stream_, n_, n_ + count)));
    n_ += count;
  }
  void look() { record.add(attend_only(cache_, 0, id_, keys_of(9, 0, 2))); }
  void look(SequenceId id) { record.add(attend_only(cache_, 0, id, keys_of(9, 0, 1))); }

  void attend() {
    record.add(attend_one(cache_, 0, id_, keys_of(stream_, n_, n_ + 3), values_of(stream_, n_, n_ + 3),
                          keys_of(stream_ + 7, 0, 3)));
    n_ += 3;
  }
  void plan() {
    const Block keys = keys_of(stream_, n_, n_ + 20), values = values_of(stream_, n_, n_ + 20),
                queries = keys_of(8, 0, 2);
    Block out(2, 1, 32);
    turboquant::BatchItem item;
    item.sequence = id_;
    item.keys = keys.rows();
    item.values = values.rows();
    item.queries = queries.rows();
    item.out = out.rows();
    for (const bool drop : {true, false}) {
      turboquant::AttentionPlan step;
      record.check(turboquant::plan(cache_, 0, std::span(&item, 1), {}, step));
      const turboquant::Scratch workspace(step.workspace_bytes());
      for (std::size_t phase = 0; phase + (drop ? 1 : 0) < step.phases(); ++phase)
        for (std::size_t task = 0; task < step.tasks(phase); ++task) step.run(phase, task, workspace.get());
    }
    n_ += 20;
    record.add(out.numbers);
  }
  void create() {
    SequenceId fresh;
    record.check(cache_.create_sequence(fresh));
    record.add(attend_one(cache_, 0, fresh, keys_of(3, 0, 40), values_of(3, 0, 40), keys_of(9, 0, 1)));
    cache_.release(fresh);
    record.check(cache_.length(fresh) == 0);
  }
  void fork() {
    append(1);
    for (const std::size_t length : {n_, n_ - 1, n_ / 2}) {
      SequenceId child;
      record.check(cache_.fork(id_, length, child));
      record.check(append_only(cache_, 0, child, keys_of(4, 0, 5), values_of(4, 0, 5)));
      look(child);
      cache_.release(child);
    }
  }
  void release() {
    std::array<SequenceId, 4> children;
    for (SequenceId& child : children) record.check(cache_.fork(id_, n_, child));
    for (const SequenceId child : children) {
      cache_.release(child);
      record.check(cache_.length(child) == 0);
    }
    look();
  }
  void truncate() {
    append(8);
    n_ -= 6;
    record.check(cache_.truncate(id_, n_));
    look();
  }
  void erase() {
    append(12);
    record.check(cache_.erase(id_, 2, 4));            // first tokens
    record.check(cache_.erase(id_, 20, 23));          // codes
    record.check(cache_.erase(id_, n_ - 8, n_ - 6));  // raw rows
    n_ -= 7;
    look();
  }
  void keep() {
    append(7);
    constexpr std::uint32_t kTokens[] = {0, 3, 4};
    record.check(cache_.keep(id_, n_ - 7, kTokens));
    n_ -= 4;
    look();
  }
  void seal() {
    append(5);
    record.check(cache_.seal(id_));
    look();
  }
  void reserve() {
    record.check(cache_.reserve(id_, 30));
    append(9);
    look();
  }
  void read() {
    Block keys, values;
    record.check(read_rows(cache_, id_, 0, 0, n_, keys, values));
    record.add(keys.numbers);
    record.add(values.numbers);
    record.check(cache_.length(id_) == n_);
  }
  void logits() {
    std::vector<float> out(2 * n_, kNaN);
    record.check(turboquant::logits(cache_, id_, 0, std::as_const(query_).rows(), out.data()));
    record.add(out);
  }
  void memory() {
    const turboquant::MemoryUse use = cache_.memory();
    record.check(use.page_bytes > 0 && use.tail_bytes > 0 && use.table_bytes > 0);
  }
  void save() {
    std::ostringstream file;
    record.check(turboquant::save(cache_, id_, file));
    add_bytes(file.str());
  }
  void load() {
    append(1);
    std::stringstream file;
    record.check(turboquant::save(cache_, id_, file));
    SequenceId loaded;
    record.check(turboquant::load(cache_, file, loaded));
    look(loaded);
    cache_.release(loaded);
  }
  void save_page() { (void)save_first_page(); }
  void load_page() {
    append(1);
    record.check(cache_.seal(id_));  // a page goes behind codes only
    std::istringstream file(save_first_page());
    record.check(turboquant::load_page(cache_, id_, 0, turboquant::source_from(file)));
    n_ += 16;
    record.check(cache_.length(id_) == n_);
    look();
  }

  Record record;

 private:
  std::string save_first_page() {
    std::ostringstream file;
    std::size_t tokens = 0;
    record.check(turboquant::save_page(cache_, id_, 0, 3, turboquant::sink_to(file), &tokens));
    record.check(tokens == 16);
    add_bytes(file.str());
    return file.str();
  }
  void add_bytes(const std::string& bytes) {
    record.add(std::vector<float>{static_cast<float>(bytes.size()),
                                  static_cast<float>(std::hash<std::string>()(bytes) % 1000003)});
  }

  Cache& cache_;
  SequenceId id_;
  std::uint64_t stream_;
  std::size_t n_ = kPrefix;
  Block query_ = keys_of(9, 0, 2);
};

struct CallRow {
  const char* name;
  void (Side::*run)();
};
constexpr CallRow kCalls[] = {
    {"attend", &Side::attend},     {"attend only", &Side::look},    {"plan", &Side::plan},
    {"create", &Side::create},     {"fork", &Side::fork},           {"release", &Side::release},
    {"truncate", &Side::truncate}, {"erase", &Side::erase},         {"keep", &Side::keep},
    {"seal", &Side::seal},         {"reserve", &Side::reserve},     {"read", &Side::read},
    {"logits", &Side::logits},     {"memory", &Side::memory},       {"save", &Side::save},
    {"load", &Side::load},         {"save_page", &Side::save_page}, {"load_page", &Side::load_page},
};
/// Those that are const on their sequence.
constexpr bool is_const(const CallRow& call) {
  for (const char* name : {"attend only", "read", "logits", "memory", "save", "save_page"})
    if (std::string_view(call.name) == name) return true;
  return false;
}

/// Both sides in one cache, on two threads each with its own sequence, or one after the other.
std::array<Record, 2> run_pair(const CallRow& left, const CallRow& right, bool concurrent) {
  Cache cache(small_config());
  const SequenceId base = new_sequence(cache);
  EXPECT_OK(append_only(cache, 0, base, keys_of(1, 0, kPrefix), values_of(1, 0, kPrefix)));
  std::array<SequenceId, 2> ids;
  for (SequenceId& id : ids) EXPECT_OK(cache.fork(base, kPrefix, id));
  cache.release(base);  // so that the last two holders let go of shared tiles at the same time
  std::array<Side, 2> sides{Side(cache, ids[0], 100), Side(cache, ids[1], 200)};
  const auto body = [&](std::size_t i) {
    for (int round = 0; round < kRounds; ++round) (sides[i].*(i == 0 ? left : right).run)();
  };
  if (concurrent) {
    run_together(body, 2);
  } else {
    body(0);
    body(1);
  }
  EXPECT_TRUE(is_balanced(cache, ids));
  return {sides[0].record, sides[1].record};
}

void expect_same(const Record& found, const Record& wanted, const char* side) {
  EXPECT_EQ(wanted.refused, 0U) << side << " alone";
  EXPECT_EQ(found.refused, 0U) << side;
  EXPECT_TRUE(same_bits(found.numbers, wanted.numbers)) << side << " has other results";
}

TEST(Concurrency, AllPairsOfCallsOnSequencesThatShare) {
  for (const CallRow& left : kCalls)
    for (const CallRow& right : kCalls) {
      SCOPED_TRACE(testing::Message() << left.name << " beside " << right.name);
      const std::array<Record, 2> wanted = run_pair(left, right, false), found = run_pair(left, right, true);
      expect_same(found[0], wanted[0], left.name);
      expect_same(found[1], wanted[1], right.name);
    }
}

// One of two holders of a tile copies its rows and lets go; the other one, alone from then on, writes over some of
// them. Nothing but the reference count tells it that the copy is done.
TEST(Concurrency, TheLastHolderOfATileWritesAfterTheOtherHasRead) {
  const Block key = keys_of(2, 0, 1), value = values_of(2, 0, 1);
  for (int round = 0; round < 50; ++round) {
    Cache cache(small_config());
    const SequenceId first = new_sequence(cache), alone = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, first, keys_of(1, 0, kPrefix), values_of(1, 0, kPrefix)));
    ASSERT_OK(append_only(cache, 0, alone, keys_of(1, 0, kPrefix), values_of(1, 0, kPrefix)));
    SequenceId second;
    ASSERT_OK(cache.fork(first, kPrefix, second));
    const auto& state = turboquant::detail::CacheAccess::core(cache).find(second)->layers[0];
    const turboquant::detail::Block* tile = state.tail[state.tail.size() - 1];
    ASSERT_EQ(tile->references.load(), 2U);
    std::atomic<std::size_t> wrong{0};
    const auto shorten_and_append = [&](SequenceId id) {
      if (!(cache.truncate(id, kPrefix - 3) == Status::ok)) ++wrong;
      if (!(append_only(cache, 0, id, key, value) == Status::ok)) ++wrong;
    };
    run_together(
        [&](std::size_t thread) {
          if (thread == 0) {
            if (!(append_only(cache, 0, first, key, value) == Status::ok)) ++wrong;
          } else {
            // Relaxed: the test must not order what the library has to order.
            while (tile->references.load(std::memory_order_relaxed) != 1) std::this_thread::yield();
            shorten_and_append(second);
          }
        },
        2);
    EXPECT_EQ(state.tail[state.tail.size() - 1], tile) << "it was written in place";
    shorten_and_append(alone);
    EXPECT_TRUE(same_bits(attend_only(cache, 0, alone, key), attend_only(cache, 0, second, key)));
    ASSERT_OK(cache.truncate(first, kPrefix - 3));
    ASSERT_OK(append_only(cache, 0, first, key, value));
    EXPECT_TRUE(same_bits(attend_only(cache, 0, alone, key), attend_only(cache, 0, first, key)));
    EXPECT_EQ(wrong.load(), 0U);
  }
}

TEST(Concurrency, PairsOfConstCallsOnOneSequence) {
  for (const CallRow& left : kCalls)
    for (const CallRow& right : kCalls) {
      if (!is_const(left) || !is_const(right)) continue;
      SCOPED_TRACE(testing::Message() << left.name << " beside " << right.name);
      Cache cache(small_config());
      const SequenceId id = new_sequence(cache);
      ASSERT_OK(append_only(cache, 0, id, keys_of(1, 0, kPrefix), values_of(1, 0, kPrefix)));
      std::array<Side, 2> alone{Side(cache, id, 1), Side(cache, id, 1)}, together = alone;
      const auto run = [&](std::array<Side, 2>& sides, std::size_t i) {
        for (int round = 0; round < 4 * kRounds; ++round) (sides[i].*(i == 0 ? left : right).run)();
      };
      run(alone, 0);
      run(alone, 1);
      run_together([&](std::size_t i) { run(together, i); }, 2);
      for (std::size_t i = 0; i < 2; ++i) expect_same(together[i].record, alone[i].record, i == 0 ? "left" : "right");
    }
}

// C03, a case of public reports: 16 threads with queries, heads, ranges and scales of their own on one cache that
// nobody changes.
TEST(Concurrency, C03_SettingsOfACallAreItsOwn) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, keys_of(1, 0, 200), values_of(1, 0, 200)));
  const Cache& unchanging = cache;
  const auto run = [&](std::size_t thread, int round) {
    CallOptions options;
    options.params.scale = 0.05F * static_cast<float>(thread + 1);
    options.params.softcap = thread % 3 == 0 ? 5.0F : 0.0F;
    options.key_begin = thread;
    options.key_end = 200 - 3 * thread;
    const std::size_t heads = 1 + thread % 4;
    std::vector<float> slopes(heads, 0.01F * static_cast<float>(thread)), out(2 * heads * 200, kNaN);
    if (thread % 2 == 0) options.params.alibi_slopes = slopes;
    const Block queries = gaussian_block(300 + 20 * thread + static_cast<std::size_t>(round), 2, heads, 32);
    Record record;
    record.add(attend_only(cache, 0, id, queries, options));
    record.check(turboquant::logits(unchanging, id, 0, queries.rows(), out.data()));
    record.add(out);
    return record;
  };
  constexpr std::size_t kMany = 16;
  constexpr int kTimes = 10;
  std::array<std::vector<Record>, kMany> alone, together;
  for (std::size_t i = 0; i < kMany; ++i)
    for (int round = 0; round < kTimes; ++round) alone[i].push_back(run(i, round));
  run_together(
      [&](std::size_t i) {
        for (int round = 0; round < kTimes; ++round) together[i].push_back(run(i, round));
      },
      kMany);
  for (std::size_t i = 0; i < kMany; ++i)
    for (std::size_t round = 0; round < kTimes; ++round) expect_same(together[i][round], alone[i][round], "thread");
  EXPECT_FALSE(same_bits(alone[0][0].numbers, alone[4][0].numbers));
}

}  // namespace
