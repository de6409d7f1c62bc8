// Different sequences from different threads, sharing pages and the pool; one sequence read by many; little stack.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <turboquant/cache/stream.hpp>
#include <utility>
#include <vector>

#include "cache/audit.hpp"
#include "cache/block.hpp"
#include "cache/sanitized.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;
constexpr std::size_t kThreads = 4;

CacheConfig small_config() {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  config.first_tokens = 3;
  return config;
}
Block keys_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream, end - begin, 1, 32, 1, begin);
}
Block values_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 1000, end - begin, 1, 32, 1, begin);
}

/// Runs body(thread) on threads that start together.
template <class Body>
void run_together(const Body& body, std::size_t count = kThreads) {
  std::barrier start(static_cast<std::ptrdiff_t>(count));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  for (std::thread& thread : threads) thread.join();
}

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

// ---- the table of docs/engines.md: every pair of calls, on two sequences that share pages and tiles

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

  Record record;

 private:
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
    {"attend", &Side::attend}, {"attend only", &Side::look}, {"plan", &Side::plan},         {"create", &Side::create},
    {"fork", &Side::fork},     {"release", &Side::release},  {"truncate", &Side::truncate}, {"erase", &Side::erase},
    {"keep", &Side::keep},     {"seal", &Side::seal},        {"reserve", &Side::reserve},   {"read", &Side::read},
    {"logits", &Side::logits}, {"memory", &Side::memory},    {"save", &Side::save},         {"load", &Side::load},
};
/// Those that are const on their sequence.
constexpr bool is_const(const CallRow& call) {
  for (const char* name : {"attend only", "read", "logits", "memory", "save"})
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
    const auto& state = turboquant::CacheAccess::core(cache).find(second)->layers[0];
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

// ---- cases of public reports

// A writer appends 10,000 tokens (a tenth under sanitizers) while 8 readers attend on a fork of its first 100 tokens,
// on another sequence, and on forks of that fork. Reading the writer's own sequence meanwhile is what the documentation
// forbids.
TEST(Concurrency, C01_ReadersBesideAWriter) {
  Cache cache(small_config());
  const SequenceId writer = new_sequence(cache), other = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, writer, keys_of(1, 0, 100), values_of(1, 0, 100)));
  ASSERT_OK(append_only(cache, 0, other, keys_of(2, 0, 100), values_of(2, 0, 100)));
  SequenceId snapshot;
  ASSERT_OK(cache.fork(writer, 100, snapshot));
  const Block query = keys_of(9, 0, 2);
  const Outcome wanted_snapshot = attend_only(cache, 0, snapshot, query),
                wanted_other = attend_only(cache, 0, other, query);
  const std::size_t until = kSanitized ? 1100 : 10100;
  const Block keys = keys_of(1, 100, 200), values = values_of(1, 100, 200);
  std::atomic<bool> done{false};
  std::atomic<std::size_t> wrong{0}, looks{0};
  run_together(
      [&](std::size_t thread) {
        if (thread == 0) {
          for (std::size_t n = 100; n < until; ++n)
            if (!(append_only(cache, 0, writer, keys.slice(n % 100, n % 100 + 1), values.slice(n % 100, n % 100 + 1)) ==
                  Status::ok))
              ++wrong;
          done = true;
          return;
        }
        do {
          if (thread % 3 == 0) {
            if (!same_bits(attend_only(cache, 0, snapshot, query), wanted_snapshot)) ++wrong;
          } else if (thread % 3 == 1) {
            if (!same_bits(attend_only(cache, 0, other, query), wanted_other)) ++wrong;
          } else {
            Block read_keys, read_values;
            if (!(read_rows(cache, snapshot, 0, 0, 100, read_keys, read_values) == Status::ok)) ++wrong;
          }
          ++looks;
        } while (!done);
      },
      9);
  EXPECT_EQ(wrong.load(), 0U);
  EXPECT_GE(looks.load(), 8U);
  EXPECT_EQ(cache.length(writer), until);
  cache.release(snapshot);
  // What was written is what a lone writer writes.
  Cache alone(small_config());
  const SequenceId id = new_sequence(alone);
  ASSERT_OK(append_only(alone, 0, id, keys_of(1, 0, 100), values_of(1, 0, 100)));
  for (std::size_t n = 100; n < until; n += 100) ASSERT_OK(append_only(alone, 0, id, keys, values));
  EXPECT_TRUE(same_bits(attend_only(alone, 0, id, query), attend_only(cache, 0, writer, query)));
}

constexpr const char* kFirstUse = "Concurrency.FirstUse";

/// Everything that a process sets up at first use, from 64 threads at once: a hash of the results, 0 if they differ.
std::uint64_t first_use() {
  constexpr std::size_t kMany = 64;
  std::vector<std::uint64_t> hashes(kMany, 0);
  const Block keys = keys_of(1, 0, 40), values = values_of(1, 0, 40), query = keys_of(2, 0, 1);
  run_together(
      [&](std::size_t thread) {
        CacheConfig config = small_config();
        config.recent_tokens = 0;
        KVCache<turboquant::TQ3> cache(config);
        SequenceId id;
        (void)cache.create_sequence(id);
        const Outcome outcome = attend_one(cache, 0, id, keys, values, query);
        std::uint64_t hash = outcome.status == Status::ok ? 14695981039346656037U : 0;
        const auto mix = [&hash](const unsigned char* bytes, std::size_t count) {
          for (std::size_t i = 0; i < count; ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
        };
        for (const auto& entry : turboquant::CacheAccess::core(cache).find(id)->layers[0].entries)
          mix(reinterpret_cast<const unsigned char*>(entry.page->memory),
              turboquant::CacheAccess::core(cache).layer(0).page.bytes);
        mix(reinterpret_cast<const unsigned char*>(outcome.out.row(0)), 32 * sizeof(float));
        hashes[thread] = hash;
      },
      kMany);
  for (const std::uint64_t hash : hashes)
    if (hash != hashes[0]) return 0;
  return hashes[0];
}

// C02 runs this in processes of its own.
TEST(Concurrency, FirstUse) {
  const std::uint64_t hash = first_use();
  EXPECT_NE(hash, 0U);
  if (GTEST_FLAG_GET(filter) == kFirstUse) std::printf("first use %llu\n", static_cast<unsigned long long>(hash));
}

// 64 threads behind a barrier do the first encode of their process. 20 processes here (3 under sanitizers); the
// report's 1,000 by --gtest_repeat=50.
TEST(Concurrency, C02_FirstUseFromManyThreads) {
  const std::uint64_t wanted = first_use();
  ASSERT_NE(wanted, 0U);
  std::array<char, 4096> path{};
  ASSERT_GT(readlink("/proc/self/exe", path.data(), path.size() - 1), 0);
  std::string command = "'";
  command.append(path.data()).append("' --gtest_filter=").append(kFirstUse).append(" 2>&1");
  for (int start = 0; start < (kSanitized ? 3 : 20); ++start) {
    FILE* process = popen(command.c_str(), "r");
    ASSERT_NE(process, nullptr);
    std::string output;
    std::array<char, 256> line;
    while (std::fgets(line.data(), line.size(), process) != nullptr) output += line.data();
    EXPECT_EQ(pclose(process), 0) << output;
    EXPECT_NE(output.find("first use " + std::to_string(wanted) + "\n"), std::string::npos) << output;
  }
}

// 16 threads with queries, heads, ranges and scales of their own on one cache that nobody changes.
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

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// 100,000 caches with seeds of their own come and go on 8 threads: nothing is registered anywhere. Under sanitizers
// 1,600, and no look at the resident set, which is the sanitizer's.
TEST(Concurrency, C04_CachesLeaveNothingBehind) {
  const auto build = [](std::size_t each) {
    std::atomic<std::size_t> wrong{0};
    run_together(
        [&](std::size_t thread) {
          for (std::size_t i = 0; i < each; ++i) {
            CacheConfig config = small_config();
            config.seed = thread * each + i;
            Cache cache(config);
            SequenceId id;
            if (!(cache.create_sequence(id) == Status::ok)) ++wrong;
          }
        },
        8);
    EXPECT_EQ(wrong.load(), 0U);
  };
  build(kSanitized ? 50 : 2000);  // what allocator and threads keep for good
  const std::size_t before = resident_bytes();
  build(kSanitized ? 150 : 12500);
  EXPECT_TRUE(kSanitized || resident_bytes() <= before + (1 << 20)) << before << " -> " << resident_bytes();
}

// A kept prefix is a sequence, and looking it up is a fork: there is no moment in which its pages belong to nobody. Two
// pages of four are the prefix; who comes late finds nothing, or is refused, and never reads what another wrote.
TEST(Concurrency, F07_APrefixIsHeldOrGone) {
  CacheConfig config = small_config();
  config.first_tokens = config.recent_tokens = config.rollback_tokens = 0;
  std::size_t page = 0, tile = 0;
  {
    Cache probe(config);
    page = (turboquant::CacheAccess::core(probe).layer(0).page.bytes + 63) / 64 * 64;
    tile = turboquant::CacheAccess::core(probe).layer(0).tile_bytes();
  }
  config.max_bytes = 4 * page + tile;
  const Block keys = keys_of(1, 0, 32), values = values_of(1, 0, 32), query = keys_of(9, 0, 1);
  std::size_t hits = 0, misses = 0, refused = 0;
  Block wanted_keys, wanted_values;
  for (int round = 0; round < (kSanitized ? 60 : 500); ++round) {
    Cache cache(config);
    const SequenceId prefix = new_sequence(cache), greedy = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, prefix, keys, values));
    if (round == 0) {
      ASSERT_OK(read_rows(cache, prefix, 0, 0, 32, wanted_keys, wanted_values));
    }
    SequenceId found;
    Status looked_up, greedy_status;
    run_together(
        [&](std::size_t thread) {
          if (thread == 0) {
            // The engine's own lock orders look-up and eviction; both orders are tried. The third party needs none.
            if (round % 2 == 0) looked_up = cache.fork(prefix, 32, found);
            cache.release(prefix);
            if (round % 2 == 1) looked_up = cache.fork(prefix, 32, found);
          } else {
            for (int step = 0; step < 4; ++step)
              greedy_status = append_only(cache, 0, greedy, keys_of(5, 0, 64), values_of(5, 0, 64));
          }
        },
        2);
    refused += greedy_status == Status::out_of_memory ? 1 : 0;
    if (looked_up == Status::ok) {
      ++hits;
      Block read_keys, read_values;
      ASSERT_OK(read_rows(cache, found, 0, 0, 32, read_keys, read_values));
      ASSERT_TRUE(same_bits(read_keys, wanted_keys) && same_bits(read_values, wanted_values));
      cache.release(greedy);
      ASSERT_OK(append_only(cache, 0, found, keys_of(6, 0, 32), values_of(6, 0, 32)));
      ASSERT_TRUE(is_balanced(cache, std::array{found}));
      cache.release(found);
    } else {
      ++misses;
      ASSERT_TRUE(looked_up == Status::unknown_sequence);
      ASSERT_TRUE(is_balanced(cache, std::array{greedy}));
      cache.release(greedy);
    }
    ASSERT_EQ(cache.memory().page_bytes + cache.memory().tail_bytes, 0U);
  }
  EXPECT_GT(hits, 0U);
  EXPECT_GT(misses, 0U);
  EXPECT_GT(refused, 0U);
}

// The first thread runs a plan that appends 64 tokens, the second releases the sequence half-way, the third allocates.
// As long as the plan is pending the release does nothing; afterwards it ends the sequence. Nobody writes into memory
// of the third.
TEST(Concurrency, F08_ReleaseOfASequenceWithAPendingPlan) {
  Cache cache(small_config());
  const SequenceId reference = new_sequence(cache), bystander = new_sequence(cache);
  const Block keys = keys_of(1, 0, 64), values = values_of(1, 0, 64), query = keys_of(2, 0, 1);
  const Outcome wanted = attend_one(cache, 0, reference, keys, values, query);
  const Outcome wanted_later = attend_only(cache, 0, reference, query);
  std::size_t ignored = 0, ended = 0;
  std::barrier round_begins(3), round_ends(3);
  SequenceId id, third;
  Block out(1, 1, 32);
  Outcome other;
  turboquant::AttentionPlan step;
  const auto prepare = [&] {
    ASSERT_OK(cache.create_sequence(id));
    out.numbers.assign(32, kNaN);
    turboquant::BatchItem item;
    item.sequence = id;
    item.keys = keys.rows();
    item.values = values.rows();
    item.queries = query.rows();
    item.out = out.rows();
    ASSERT_OK(turboquant::plan(cache, 0, std::span<const turboquant::BatchItem>(&item, 1), {}, step));
    cache.release(id);
    ASSERT_TRUE(cache.truncate(id, 0) == Status::bad_shape) << "the plan is pending, the sequence still there";
  };
  const auto check = [&] {
    EXPECT_TRUE(same_bits(out, wanted.out)) << "the plan's own result";
    EXPECT_TRUE(same_bits(other, wanted)) << "the third party's";
    const std::size_t length = cache.length(id);
    EXPECT_TRUE(length == 64 || length == 0);
    ++(length == 64 ? ignored : ended);
    EXPECT_TRUE(same_bits(attend_only(cache, 0, third, query), wanted_later));
    cache.release(id);
    EXPECT_EQ(cache.length(id), 0U);
    cache.release(third);
  };
  const int rounds = kSanitized ? 1000 : 10000;
  run_together(
      [&](std::size_t thread) {
        for (int round = 0; round < rounds; ++round) {
          if (thread == 0) prepare();
          round_begins.arrive_and_wait();
          if (thread == 0) {
            const turboquant::Scratch workspace(step.workspace_bytes());
            for (std::size_t phase = 0; phase < step.phases(); ++phase)
              for (std::size_t task = 0; task < step.tasks(phase); ++task) step.run(phase, task, workspace.get());
          } else if (thread == 1) {
            for (int i = 0; i < round % 64; ++i) std::this_thread::yield();  // early, in the middle, too late
            cache.release(id);
          } else if (cache.create_sequence(third) == Status::ok) {
            other = attend_one(cache, 0, third, keys, values, query);
          }
          round_ends.arrive_and_wait();
          if (thread == 0) check();
        }
      },
      3);
  EXPECT_GT(ignored, 0U);
  EXPECT_GT(ended, 0U);
  EXPECT_TRUE(is_balanced(cache, std::array{reference, bystander}));
}

// ---- little stack

constexpr std::size_t kStack = 64 * 1024;

/// Runs body on a thread with a stack of kStack bytes behind a page that must not be touched; returns how much of it
/// was used, the C library's part included. Sanitizers need more than that for themselves: with them the thread has a
/// stack of the usual size, and only results are checked.
template <class Body>
std::size_t run_on_small_stack(Body body) {
  if (kSanitized) {
    std::thread([&] { body(); }).join();
    return 0;
  }
  const auto guard = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, guard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(memory, MAP_FAILED);
  EXPECT_EQ(mprotect(memory, guard, PROT_NONE), 0);
  auto* stack = static_cast<unsigned char*>(memory) + guard;
  std::memset(stack, 0xa5, kStack);
  pthread_attr_t attributes;
  EXPECT_EQ(pthread_attr_init(&attributes), 0);
  EXPECT_EQ(pthread_attr_setstack(&attributes, stack, kStack), 0);
  pthread_t thread{};
  const auto entry = [](void* context) -> void* {
    (*static_cast<Body*>(context))();
    return nullptr;
  };
  EXPECT_EQ(pthread_create(&thread, &attributes, entry, &body), 0);
  EXPECT_EQ(pthread_join(thread, nullptr), 0);
  EXPECT_EQ(pthread_attr_destroy(&attributes), 0);
  std::size_t untouched = 0;
  while (untouched < kStack && stack[untouched] == 0xa5) ++untouched;
  EXPECT_EQ(munmap(memory, guard + kStack), 0);
  return kStack - untouched;
}

template <class F>
std::size_t check_stack() {
  CacheConfig config;
  config.layers = {LayerShape{.head_dim = 1024}};
  config.page_tokens = 32;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  config.first_tokens = 3;
  KVCache<F> cache(config);
  const SequenceId id = new_sequence(cache);
  const Block keys = gaussian_block(1, 120, 1, 1024), values = gaussian_block(2, 120, 1, 1024),
              queries = gaussian_block(3, 3, 2, 1024), one_key = keys.slice(0, 1), one_value = values.slice(0, 1);
  Block out(3, 2, 1024), read_keys(100, 1, 1024), read_values(100, 1, 1024);
  std::vector<float> lse(6), logits(6 * 130);
  turboquant::BatchItem prompt, token;
  prompt.sequence = token.sequence = id;
  prompt.keys = keys.rows();
  prompt.values = values.rows();
  token.keys = one_key.rows();
  token.values = one_value.rows();
  prompt.queries = token.queries = queries.rows();
  prompt.out = token.out = out.rows();
  token.lse = lse.data();
  std::array<Status, 16> statuses;
  std::size_t count = 0;
  const std::size_t used = run_on_small_stack([&] {
    const auto note = [&](Status status) { statuses[count++] = status; };
    SequenceId child;
    note(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&prompt, 1)));
    for (int i = 0; i < 5; ++i) note(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&token, 1)));
    note(turboquant::logits(cache, id, 0, queries.rows(), logits.data()));
    note(cache.read(id, 0, 0, read_keys.rows(), read_values.rows()));
    note(cache.fork(id, 125, child));
    note(cache.erase(child, 20, 30));
    constexpr std::uint32_t kTokens[] = {1, 2};
    note(cache.keep(child, 111, kTokens));
    note(cache.truncate(child, 110));
    note(cache.reserve(child, 40));
    note(cache.seal(child));
    cache.release(child);
  });
  EXPECT_EQ(count, 14U);
  for (const Status& status : statuses) EXPECT_OK(status);
  EXPECT_LT(used, kStack);
  return used;
}

TEST(Concurrency, CallsFitIntoSmallStacks) {
  using turboquant::Format;
  using turboquant::PolarQuant;
  using turboquant::ScalarQuant;
  std::printf("bytes of stack at head_dim 1024: TQ2 %zu, TQ3 %zu, TQ4 %zu, TQ8 %zu, other pairs %zu, %zu\n",
              check_stack<turboquant::TQ2>(), check_stack<turboquant::TQ3>(), check_stack<turboquant::TQ4>(),
              check_stack<turboquant::TQ8>(), check_stack<Format<PolarQuant<3>, ScalarQuant<4>>>(),
              check_stack<Format<PolarQuant<1>, ScalarQuant<2>>>());
}

}  // namespace
