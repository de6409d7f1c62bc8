// Cases of public reports about threads: readers beside writers, first use, caches that come and go, prefixes, pending
// plans; and how little stack a call needs. C03 is in concurrency_test.
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
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cache/audit.hpp"
#include "cache/sanitized.hpp"
#include "cache/together.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;

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
        for (const auto& entry : turboquant::detail::CacheAccess::core(cache).find(id)->layers[0].entries)
          mix(reinterpret_cast<const unsigned char*>(entry.page->memory),
              turboquant::detail::CacheAccess::core(cache).layer(0).page.bytes);
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
    page = (turboquant::detail::CacheAccess::core(probe).layer(0).page.bytes + 63) / 64 * 64;
    tile = turboquant::detail::CacheAccess::core(probe).layer(0).tile_bytes();
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
