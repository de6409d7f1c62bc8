// Cases of public reports about containers that no other test has; every test's name begins with the id of its case.
//
// Elsewhere, by id: F01 F02 F05 F13 in sequence_edits_test, F04 F15 F16 A03 A04 in kv_cache_test, A02 in config_test,
// F03 in attention/invariance_test, F07 F08 C01 C02 C04 in concurrency_cases_test, C03 in concurrency_test, F09 in
// transactions_test. What cannot apply:
//
// F06: nothing is ever compacted, because blocks never move and holes are filled block by block; the test holds that.
//
// F10: an allocation of 2^46 bytes is asked of reserve, because a cache takes no page memory when it is constructed.
//
// F12: a shift is never done to stored keys, so there is no call that could forget it; the engine turns the query
// instead: attention/shift_test.
//
// F19: there is no copy on write of coded pages, nor a compaction, that could decode; the rounds of forks are here,
// those of saving and loading in file_test.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "cache/audit.hpp"
#include "cache/counting_source.hpp"
#include "cache/sanitized.hpp"
#include "cache/small_cache.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::MemoryUse;
using turboquant::npos;
using turboquant::SequenceId;
using turboquant::Status;
using turboquant::detail::CacheAccess;

using Cache = KVCache<turboquant::TQ4>;

/// Addresses and bytes of the pages of layer 0.
struct Pages {
  std::vector<const std::byte*> addresses;
  std::vector<std::vector<std::byte>> bytes;
};
template <class AnyCache>
Pages pages_of(AnyCache& cache, SequenceId id) {
  const auto& core = CacheAccess::core(cache);
  Pages pages;
  for (const auto& entry : core.find(id)->layers[0].entries) {
    const std::byte* memory = entry.page->memory;
    pages.addresses.push_back(memory);
    pages.bytes.emplace_back(memory, memory + core.layer(0).page.bytes);
  }
  return pages;
}

TEST(ContainerCases, F06_HolesAreFilledAndNothingMoves) {
  Cache cache(small_config());
  std::array<SequenceId, 3> ids;
  for (SequenceId& id : ids) id = new_sequence(cache);
  for (std::size_t n = 0; n < 128; n += 16)  // interleaved by page
    for (std::size_t i = 0; i < 3; ++i) ASSERT_OK(feed(cache, ids[i], i, n, n + 16));
  const std::array<Snapshot, 2> before{snapshot(cache, ids[0]), snapshot(cache, ids[2])};
  const std::array<Pages, 2> pages{pages_of(cache, ids[0]), pages_of(cache, ids[2])};
  const Pages freed = pages_of(cache, ids[1]);
  cache.release(ids[1]);
  // The holes are used again before anything else is.
  const SequenceId late = new_sequence(cache);
  ASSERT_OK(feed(cache, late, 9, 0, 96));
  std::size_t reused = 0;
  for (const std::byte* address : pages_of(cache, late).addresses)
    reused += std::find(freed.addresses.begin(), freed.addresses.end(), address) != freed.addresses.end() ? 1 : 0;
  EXPECT_EQ(reused, pages_of(cache, late).addresses.size());
  for (std::size_t i = 0; i < 2; ++i) {
    const SequenceId id = ids[2 * i];
    EXPECT_TRUE(same_bits(snapshot(cache, id), before[i]));
    EXPECT_EQ(pages_of(cache, id).addresses, pages[i].addresses);
    EXPECT_EQ(pages_of(cache, id).bytes, pages[i].bytes);
    ASSERT_OK(feed(cache, id, 2 * i, 128, 170));
    Cache fresh(small_config());
    const SequenceId alone = new_sequence(fresh);
    ASSERT_OK(feed(fresh, alone, 2 * i, 0, 170));
    EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(fresh, alone)));
  }
  EXPECT_TRUE(is_balanced(cache, std::array{ids[0], ids[2], late}));
}

/// Lowers the limit of the process's address space to what it has now and `more` bytes.
void limit_memory(std::size_t more) {
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages;
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(90);
  limit.rlim_cur = pages * 4096 + more;
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(91);
}

/// In a process of its own: 2^46 bytes at once, then growth until the system refuses. The exit status says what failed.
[[noreturn]] void exhaust_memory() {
  limit_memory(std::size_t{64} << 20);
  {
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 65536, .head_dim = 1024}};
    config.page_tokens = 256;  // a page of a little more than 2^35 bytes
    KVCache<turboquant::TQ8> cache(config);
    SequenceId id;
    if (!(cache.create_sequence(id) == Status::ok)) std::_Exit(1);
    if (!(cache.reserve(id, 2048 * 256 + 100) == Status::out_of_memory)) std::_Exit(2);
    if (cache.length(id) != 0 || cache.memory().page_bytes != 0) std::_Exit(3);
    cache.release(id);
  }
  {
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 2, .head_dim = 128}};
    KVCache<turboquant::TQ8> cache(config);
    SequenceId small, large;
    if (!(cache.create_sequence(small) == Status::ok && cache.create_sequence(large) == Status::ok)) std::_Exit(4);
    const Block keys = gaussian_block(1, 512, 2, 128), values = gaussian_block(2, 512, 2, 128),
                query = gaussian_block(3, 1, 2, 128);
    if (!(append_only(cache, 0, small, keys, values) == Status::ok)) std::_Exit(5);
    const Outcome before = attend_only(cache, 0, small, query);
    std::size_t length = 0;
    Status status;
    while (status == Status::ok && length < 1000000) {
      status = append_only(cache, 0, large, keys, values);
      if (status == Status::ok) length += 512;
    }
    if (!(status == Status::out_of_memory)) std::_Exit(6);
    if (cache.length(large) != length || length < 1024) std::_Exit(7);
    if (!tests::same_bits(attend_only(cache, 0, small, query), before)) std::_Exit(8);
    cache.release(large);
    if (!(append_only(cache, 0, small, keys, values) == Status::ok)) std::_Exit(9);
  }
  try {
    CacheConfig config;
    config.layers.resize(1000000);
    const KVCache<turboquant::TQ8> cache(std::move(config));
    std::_Exit(10);
  } catch (const std::bad_alloc&) {
    // as documented
  } catch (...) {
    std::_Exit(11);
  }
  std::_Exit(0);
}

// Sanitizers reserve terabytes of addresses, and stop the process where an allocation is too large: with them the
// limits of a memory source (transactions_test) must do.
TEST(ContainerCases, F10_ExhaustedMemoryIsAStatus) {
  if (kSanitized) return;
  EXPECT_EXIT(exhaust_memory(), testing::ExitedWithCode(0), "");
}

TEST(ContainerCases, F11_RemovalOfAllOfTheEndAndOfTheMiddle) {
  Cache cache(small_config()), straight(small_config());
  const SequenceId id = new_sequence(cache), twin = new_sequence(straight);
  ASSERT_OK(feed(cache, id, 1, 0, 500));
  // All: empty, and the next token stands at 0.
  ASSERT_OK(cache.erase(id, 0, 500));
  EXPECT_EQ(cache.length(id), 0U);
  ASSERT_OK(feed(cache, id, 1, 0, 500));
  ASSERT_OK(feed(straight, twin, 1, 0, 500));
  EXPECT_TRUE(same_bits(snapshot(cache, id), snapshot(straight, twin)));
  // From 400 to the end: the next position is 400, said or unsaid.
  ASSERT_OK(cache.erase(id, 400, 500));
  EXPECT_EQ(cache.length(id), 400U);
  ASSERT_OK(straight.truncate(twin, 400));
  const Block query = queries_of(5, 0, 1);
  CallOptions said;
  said.position = 400;
  const Outcome unsaid = attend_one(cache, 0, id, keys_of(2, 0, 1), values_of(2, 0, 1), query),
                told = attend_one(straight, 0, twin, keys_of(2, 0, 1), values_of(2, 0, 1), query, said);
  ASSERT_OK(unsaid.status);
  EXPECT_TRUE(tests::same_bits(unsaid, told));
  EXPECT_EQ(cache.length(id), 401U);
  Block before_keys, before_values, keys, values;
  ASSERT_OK(read_rows(cache, id, 0, 0, 401, before_keys, before_values));
  // The middle: what was behind it moves down, and the next position is the length.
  ASSERT_OK(cache.erase(id, 5, 9));
  EXPECT_EQ(cache.length(id), 397U);
  ASSERT_OK(read_rows(cache, id, 0, 0, 397, keys, values));
  before_keys.numbers.erase(before_keys.numbers.begin() + 5 * 64, before_keys.numbers.begin() + 9 * 64);
  before_values.numbers.erase(before_values.numbers.begin() + 5 * 64, before_values.numbers.begin() + 9 * 64);
  EXPECT_TRUE(tests::same_bits(keys.numbers, before_keys.numbers));
  EXPECT_TRUE(tests::same_bits(values.numbers, before_values.numbers));
  ASSERT_OK(feed(cache, id, 3, 397, 398));
  EXPECT_EQ(cache.length(id), 398U);
  ASSERT_OK(read_rows(cache, id, 0, 397, 398, keys, values));
  EXPECT_EQ(keys.exact().numbers, keys_of(3, 397, 398).bfloat16_rounded().numbers);
  // Nothing that is not there.
  EXPECT_STATUS(bad_shape, cache.erase(id, 0, npos));
  EXPECT_STATUS(bad_shape, cache.erase(id, 9, 5));
  EXPECT_STATUS(unknown_sequence, cache.erase(SequenceId{}, 0, 0));
  EXPECT_EQ(cache.length(id), 398U);
}

TEST(ContainerCases, F14_PagesStayWhereTheyAre) {
  Cache cache(small_config());
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 40));
  const auto& core = CacheAccess::core(cache);
  const std::byte* first = core.find(id)->layers[0].entries[0].page->memory;
  const std::vector<std::byte> copy(first, first + core.layer(0).page.bytes);
  const Block keys = keys_of(1, 0, 100), values = values_of(1, 0, 100);
  for (std::size_t n = 0; n < 10000; n += 100) {
    ASSERT_OK(append_only(cache, 0, id, keys, values));
    if (n % 1000 != 0) continue;
    SequenceId child;
    ASSERT_OK(cache.fork(id, 40 + n / 2, child));
    ASSERT_OK(cache.truncate(child, 20));
    if (n % 3000 == 0) cache.release(child);
    ASSERT_EQ(std::memcmp(first, copy.data(), copy.size()), 0) << n;
    EXPECT_EQ(core.find(id)->layers[0].entries[0].page->memory, first);
  }
}

// Protected positions belong to a sequence: an outlier at 0 in one, at 7 in the other.
TEST(ContainerCases, F17_OutliersOfOneSequenceDoNotReachTheOther) {
  CacheConfig config = small_config();
  config.first_tokens = 4;
  config.recent_tokens = 0;
  const auto with_outlier = [](std::size_t at) {
    Block keys = keys_of(1, 0, 60);
    for (std::size_t i = 0; i < 64; ++i) keys.row(at)[i] *= 50;
    return keys;
  };
  const std::array<Block, 2> keys{with_outlier(0), with_outlier(7)};
  const Block values = values_of(1, 0, 60);
  Cache together(config);
  std::array<SequenceId, 2> ids;
  std::array<BatchItem, 2> items;
  for (std::size_t i = 0; i < 2; ++i) {
    ids[i] = new_sequence(together);
    items[i].sequence = ids[i];
    items[i].keys = keys[i].rows();
    items[i].values = values.rows();
  }
  ASSERT_OK(turboquant::attend(together, 0, items));
  for (std::size_t i = 0; i < 2; ++i) {
    Cache alone(config);
    const SequenceId id = new_sequence(alone);
    ASSERT_OK(append_only(alone, 0, id, keys[i], values));
    EXPECT_EQ(pages_of(together, ids[i]).bytes, pages_of(alone, id).bytes);
    EXPECT_TRUE(same_bits(snapshot(together, ids[i]), snapshot(alone, id)));
    // The first four are exact in both, outlier or not.
    Block first_keys, first_values;
    ASSERT_OK(read_rows(together, ids[i], 0, 0, 4, first_keys, first_values));
    EXPECT_EQ(first_keys.exact().numbers, keys[i].slice(0, 4).bfloat16_rounded().numbers);
  }
  EXPECT_NE(pages_of(together, ids[0]).bytes[0], pages_of(together, ids[1]).bytes[0]);
}

TEST(ContainerCases, F18_ReusedBlocksHaveNoPast) {
  CacheConfig config = small_config();
  config.first_tokens = 4;
  Cache cache(config);
  const auto& core = CacheAccess::core(cache);
  SequenceId old = new_sequence(cache), child;
  ASSERT_OK(feed(cache, old, 1, 0, 100));
  ASSERT_OK(cache.fork(old, 100, child));
  ASSERT_OK(cache.erase(old, 2, 30));  // fewer first tokens, entries that begin within a page
  ASSERT_OK(cache.seal(old));
  const std::vector<const std::byte*> addresses = pages_of(cache, child).addresses;
  cache.release(old);
  cache.release(child);
  const SequenceId heir = new_sequence(cache);
  EXPECT_TRUE(heir.index == old.index || heir.index == child.index);
  for (const SequenceId stale : {old, child}) {
    EXPECT_EQ(cache.length(stale), 0U);
    EXPECT_STATUS(unknown_sequence, feed(cache, stale, 1, 0, 1));
  }
  ASSERT_OK(feed(cache, heir, 2, 0, 100));
  std::size_t reused = 0;
  for (const auto& entry : core.find(heir)->layers[0].entries) {
    reused += std::find(addresses.begin(), addresses.end(), entry.page->memory) != addresses.end() ? 1 : 0;
    EXPECT_EQ(entry.page->references.load(), 1U);
    EXPECT_EQ(entry.first, 0U);
    EXPECT_EQ(entry.count, 16U);
  }
  EXPECT_GT(reused, 2U);
  Cache fresh(config);
  const SequenceId alone = new_sequence(fresh);
  ASSERT_OK(feed(fresh, alone, 2, 0, 100));
  EXPECT_TRUE(same_bits(snapshot(cache, heir), snapshot(fresh, alone)));
  // Emptied, it is as if new: positions, first tokens, base.
  ASSERT_OK(cache.erase(heir, 0, 3));
  ASSERT_OK(cache.truncate(heir, 0));
  const auto& state = core.find(heir)->layers[0];
  EXPECT_EQ(state.first, 4U);
  EXPECT_EQ(state.base, 4U);
  EXPECT_EQ(state.tail_begin, 4U);
  EXPECT_EQ(state.held_begin, 4U);
  EXPECT_EQ(state.dropped_entries, 0U);
  EXPECT_TRUE(state.entries.empty() && state.tail.empty() && state.first_tiles.empty() && state.coding.empty());
  ASSERT_OK(cache.fork(heir, 0, child));
  ASSERT_OK(feed(cache, child, 2, 0, 100));
  EXPECT_TRUE(same_bits(snapshot(cache, child), snapshot(fresh, alone)));
  EXPECT_TRUE(is_balanced(cache, std::array{heir, child}));
  // So it is behind a window.
  config.layers[0].window = 50;
  Cache windowed(config);
  const SequenceId id = new_sequence(windowed);
  ASSERT_OK(feed(windowed, id, 1, 0, 300));
  const auto& behind = CacheAccess::core(windowed).find(id)->layers[0];
  EXPECT_GT(behind.dropped_entries, 5U);
  EXPECT_GT(behind.held_begin, 100U);
  ASSERT_OK(windowed.truncate(id, 0));
  EXPECT_EQ(behind.dropped_entries, 0U);
  EXPECT_EQ(behind.held_begin, 4U);
}

TEST(ContainerCases, F19_TenGenerationsOfForks) {
  for (const std::uint32_t dim : {128U, 96U}) {
    SCOPED_TRACE(dim);
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 1, .head_dim = dim}};
    config.page_tokens = 16;
    config.recent_tokens = 16;
    KVCache<turboquant::TQ3> cache(config);
    const auto append = [&](SequenceId id, std::uint64_t stream, std::size_t begin, std::size_t end) {
      return append_only(cache, 0, id, gaussian_block(stream, end - begin, 1, dim, 1, begin),
                         gaussian_block(stream + 1000, end - begin, 1, dim, 1, begin));
    };
    std::vector<SequenceId> family{new_sequence(cache)};
    ASSERT_OK(append(family[0], 1, 0, 150));
    const Snapshot eldest = snapshot(cache, family[0]);
    const Pages pages = pages_of(cache, family[0]);
    ASSERT_GT(pages.bytes.size(), 6U);
    std::vector<Snapshot> parents{eldest};
    for (std::uint64_t generation = 1; generation <= 10; ++generation) {
      SequenceId child;
      ASSERT_OK(cache.fork(family.back(), cache.length(family.back()), child));
      family.push_back(child);
      ASSERT_OK(append(child, 10 * generation, cache.length(child), cache.length(child) + 20));
      parents.push_back(snapshot(cache, child));
      const Pages now = pages_of(cache, child);
      for (std::size_t i = 0; i < pages.bytes.size(); ++i) {
        ASSERT_EQ(now.addresses[i], pages.addresses[i]) << "not shared in generation " << generation;
        ASSERT_EQ(now.bytes[i], pages.bytes[i]);
      }
      // Nobody's child changes its elders.
      for (std::size_t i = 0; i < family.size(); ++i)
        ASSERT_TRUE(same_bits(snapshot(cache, family[i]), parents[i])) << i;
    }
    // Nor does the parent its children.
    ASSERT_OK(append(family[0], 7, 150, 200));
    for (std::size_t i = 1; i < family.size(); ++i) EXPECT_TRUE(same_bits(snapshot(cache, family[i]), parents[i])) << i;
    EXPECT_TRUE(is_balanced(cache, family));
  }
}

// Compression that was asked for happens: the bytes are those of the formula, and were really taken from the source.
TEST(ContainerCases, A01_BytesOfTheFormula) {
  const auto bytes_per_token = [](auto tag) {
    CountingSource memory;
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 4, .head_dim = 128}};
    config.recent_tokens = config.rollback_tokens = 0;
    config.memory = memory.source();
    typename decltype(tag)::type cache(config);
    const SequenceId id = new_sequence(cache);
    EXPECT_OK(append_only(cache, 0, id, gaussian_block(1, 1024, 4, 128), gaussian_block(2, 1024, 4, 128)));
    const MemoryUse use = cache.memory();
    EXPECT_EQ(use.tail_bytes, 0U) << "an exact fallback";
    EXPECT_LE(use.page_bytes, memory.bytes());
    EXPECT_LE(memory.bytes(), use.page_bytes + 3 * (std::size_t{1} << 21)) << "slabs, one spare in each class";
    return static_cast<double>(use.page_bytes) / (1024.0 * 4 * 2);  // key or value
  };
  // Codes and a scale of two bytes; pages add centre, header and padding, at most 5 %.
  const double three = bytes_per_token(std::type_identity<KVCache<turboquant::TQ3>>{}),
               four = bytes_per_token(std::type_identity<KVCache<turboquant::TQ4>>{});
  EXPECT_GE(three, 50);
  EXPECT_LE(three, 50 * 1.05);
  EXPECT_GE(four, 66);
  EXPECT_LE(four, 66 * 1.05);
  // And it shows in what is read.
  CacheConfig config = small_config();
  config.recent_tokens = config.rollback_tokens = 0;
  Cache cache(config);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(feed(cache, id, 1, 0, 1024));
  Block keys, values;
  ASSERT_OK(read_rows(cache, id, 0, 0, 1024, keys, values));
  const std::vector<double> raw = keys_of(1, 0, 1024).bfloat16_rounded().numbers, found = keys.exact().numbers;
  std::size_t equal = 0;
  for (std::size_t i = 0; i < raw.size(); ++i) equal += raw[i] == found[i] ? 1 : 0;
  EXPECT_LT(equal, raw.size() / 20);
}

}  // namespace
