// Cases of public reports about containers that no other test has; every test's name begins with the id of its case.
//
// Elsewhere, by id: F01 F02 F04 F05 F13 F15 F16 A03 A04 in kv_cache_test, F03 in attention/invariance_test, F07 F08 C01
// C02 C03 C04 in concurrency_test, F09 in transactions_test. What cannot apply:
// F06: nothing is ever compacted, because blocks never move and holes are filled block by block; the test holds that.
// F10: an allocation of 2^46 bytes is asked of reserve, because a cache takes no page memory when it is constructed.
// F12: a shift is never done to stored keys, so there is no call that could forget it; the engine turns the query
//      instead: attention/shift_test.
// F19: there is no copy on write of coded pages, nor a compaction, that could decode; the rounds of forks are here,
//      those of saving and loading in file_test.
// A02: "bits = 5" and other codecs that do not exist do not compile (static_assert in the codecs).
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/audit.hpp"
#include "cache/block.hpp"
#include "cache/counting_source.hpp"
#include "cache/sanitized.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheAccess;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::MemoryUse;
using turboquant::npos;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;

CacheConfig small_config() {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 2, .head_dim = 32}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  return config;
}
Block keys_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream, end - begin, 2, 32, 1, begin);
}
Block values_of(std::uint64_t stream, std::size_t begin, std::size_t end) {
  return gaussian_block(stream + 1000, end - begin, 2, 32, 1, begin);
}
Block queries_of(std::uint64_t stream, std::size_t tokens) { return gaussian_block(stream + 2000, tokens, 4, 32); }

Status feed(Cache& cache, SequenceId id, std::uint64_t stream, std::size_t begin, std::size_t end) {
  return append_only(cache, 0, id, keys_of(stream, begin, end), values_of(stream, begin, end));
}

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

/// Everything that can be read, and the attention of the newest position.
struct Shot {
  Block keys, values;
  Outcome outcome;
};
template <class AnyCache>
Shot shoot(AnyCache& cache, SequenceId id) {
  Shot shot;
  EXPECT_OK(read_rows(cache, id, 0, 0, cache.length(id), shot.keys, shot.values));
  const LayerShape& shape = cache.config().layers[0];
  shot.outcome = attend_only(cache, 0, id, gaussian_block(2001, 1, 2 * shape.kv_heads, shape.head_dim));
  EXPECT_OK(shot.outcome.status);
  return shot;
}
bool same_bits(const Shot& a, const Shot& b) {
  return tests::same_bits(a.keys, b.keys) && tests::same_bits(a.values, b.values) &&
         tests::same_bits(a.outcome, b.outcome);
}

TEST(ContainerCases, F06_HolesAreFilledAndNothingMoves) {
  Cache cache(small_config());
  std::array<SequenceId, 3> ids;
  for (SequenceId& id : ids) id = new_sequence(cache);
  for (std::size_t n = 0; n < 128; n += 16)  // interleaved by page
    for (std::size_t i = 0; i < 3; ++i) ASSERT_OK(feed(cache, ids[i], i, n, n + 16));
  const std::array<Shot, 2> before{shoot(cache, ids[0]), shoot(cache, ids[2])};
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
    EXPECT_TRUE(same_bits(shoot(cache, id), before[i]));
    EXPECT_EQ(pages_of(cache, id).addresses, pages[i].addresses);
    EXPECT_EQ(pages_of(cache, id).bytes, pages[i].bytes);
    ASSERT_OK(feed(cache, id, 2 * i, 128, 170));
    Cache fresh(small_config());
    const SequenceId alone = new_sequence(fresh);
    ASSERT_OK(feed(fresh, alone, 2 * i, 0, 170));
    EXPECT_TRUE(same_bits(shoot(cache, id), shoot(fresh, alone)));
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
  EXPECT_TRUE(same_bits(shoot(cache, id), shoot(straight, twin)));
  // From 400 to the end: the next position is 400, said or unsaid.
  ASSERT_OK(cache.erase(id, 400, 500));
  EXPECT_EQ(cache.length(id), 400U);
  ASSERT_OK(straight.truncate(twin, 400));
  const Block query = queries_of(5, 1);
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
    EXPECT_TRUE(same_bits(shoot(together, ids[i]), shoot(alone, id)));
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
  EXPECT_TRUE(same_bits(shoot(cache, heir), shoot(fresh, alone)));
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
  EXPECT_TRUE(same_bits(shoot(cache, child), shoot(fresh, alone)));
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
    const Shot eldest = shoot(cache, family[0]);
    const Pages pages = pages_of(cache, family[0]);
    ASSERT_GT(pages.bytes.size(), 6U);
    std::vector<Shot> parents{eldest};
    for (std::uint64_t generation = 1; generation <= 10; ++generation) {
      SequenceId child;
      ASSERT_OK(cache.fork(family.back(), cache.length(family.back()), child));
      family.push_back(child);
      ASSERT_OK(append(child, 10 * generation, cache.length(child), cache.length(child) + 20));
      parents.push_back(shoot(cache, child));
      const Pages now = pages_of(cache, child);
      for (std::size_t i = 0; i < pages.bytes.size(); ++i) {
        ASSERT_EQ(now.addresses[i], pages.addresses[i]) << "not shared in generation " << generation;
        ASSERT_EQ(now.bytes[i], pages.bytes[i]);
      }
      // Nobody's child changes its elders.
      for (std::size_t i = 0; i < family.size(); ++i) ASSERT_TRUE(same_bits(shoot(cache, family[i]), parents[i])) << i;
    }
    // Nor does the parent its children.
    ASSERT_OK(append(family[0], 7, 150, 200));
    for (std::size_t i = 1; i < family.size(); ++i) EXPECT_TRUE(same_bits(shoot(cache, family[i]), parents[i])) << i;
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

/// Empty, or the words of the refusal, which name the value.
std::string refusal(const CacheConfig& config, const std::string& value) {
  const std::string words = turboquant::why_invalid(config, 1);
  EXPECT_NE(words.find(value), std::string::npos) << '"' << words << "\" does not name " << value;
  bool refused = false;
  try {
    const Cache cache(config);
  } catch (const std::invalid_argument& error) {
    refused = std::string(error.what()).find(words) != std::string::npos;
  }
  EXPECT_TRUE(refused) << words;
  return words;
}

TEST(ContainerCases, A02_InvalidConstructionsAreRefusedAtOnce) {
  const auto refuse = [](auto change, const std::string& value) {
    CacheConfig config = small_config();
    change(config);
    EXPECT_NE(refusal(config, value), "");
  };
  refuse([](CacheConfig& c) { c.layers.clear(); }, "layers");
  for (const std::uint32_t dim : {0U, 1U, 31U, 33U, 48U + 8, 72U, 1025U, ~0U})
    refuse([dim](CacheConfig& c) { c.layers[0].head_dim = dim; }, std::to_string(dim));
  refuse([](CacheConfig& c) { c.layers[0].value_dim = 33; }, "33");
  refuse([](CacheConfig& c) { c.layers[0].kv_heads = 0; }, "0");
  refuse([](CacheConfig& c) { c.layers[0].kv_heads = 65537; }, "65537");
  for (const std::size_t page : {std::size_t{0}, std::size_t{1}, std::size_t{24}, std::size_t{257}, npos})
    refuse([page](CacheConfig& c) { c.page_tokens = page; }, std::to_string(page));
  refuse([](CacheConfig& c) { c.layers[0].center_bits = 5; }, "5");
  refuse([](CacheConfig& c) { c.layers[0].format = 1; }, "1");
  for (auto member : {&CacheConfig::recent_tokens, &CacheConfig::first_tokens, &CacheConfig::rollback_tokens})
    refuse([member](CacheConfig& c) { c.*member = npos; }, std::to_string(npos));
  refuse([](CacheConfig& c) { c.memory.allocate = [](void*, std::size_t, std::size_t) -> void* { return nullptr; }; },
         "memory");
  // An allocator that never gives anything is valid, and its refusals are statuses.
  CacheConfig config = small_config();
  config.memory = {nullptr, [](void*, std::size_t, std::size_t) -> void* { return nullptr; },
                   [](void*, void*, std::size_t) {}};
  Cache cache(config);
  const SequenceId id = new_sequence(cache);
  EXPECT_STATUS(out_of_memory, feed(cache, id, 1, 0, 1));
  EXPECT_EQ(cache.length(id), 0U);
}

// Whatever is put together: refused in words, or it works. A window below first_tokens, pages larger than the window,
// values wider than keys, no recent tokens, limits of no use.
TEST(ContainerCases, A02_AnyCombinationIsRefusedOrWorks) {
  std::size_t refused = 0, worked = 0;
  for (std::uint64_t seed = 0; seed < 400 && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::uint64_t count = 0;
    const auto pick = [&](std::initializer_list<std::uint64_t> from) {
      return *(from.begin() + oracle::hash(seed, 3, ++count) % from.size());
    };
    CacheConfig config;
    config.layers.resize(pick({1, 1, 2}));
    for (LayerShape& shape : config.layers) {
      shape.kv_heads = static_cast<std::uint32_t>(pick({1, 2, 3, 1, 2, 3, 0}));
      shape.head_dim = static_cast<std::uint32_t>(pick({32, 48, 64, 80, 96, 32, 48, 64, 80, 96, 40}));
      shape.value_dim = static_cast<std::uint32_t>(pick({0, 32, 64, 112, 0, 32, 64, 112, 56}));
      shape.window = static_cast<std::uint32_t>(pick({0, 1, 2, 15, 16, 17, 100, ~0U}));
      shape.center_bits = static_cast<std::uint8_t>(pick({0, 8, 16, 0, 8, 16, 4}));
    }
    config.page_tokens = pick({16, 32, 48, 256, 16, 32, 48, 256, 8});
    config.recent_tokens = pick({0, 1, 16, 100, std::uint64_t{1} << 40});
    config.first_tokens = pick({0, 1, 5, 16, 40, std::uint64_t{1} << 40});
    config.rollback_tokens = pick({0, 1, 20, 300, std::uint64_t{1} << 40});
    config.max_bytes = pick({0, 0, 1, 5000, 100000});
    const std::string words = turboquant::why_invalid(config, 1);
    if (!words.empty()) {
      ++refused;
      EXPECT_THROW(Cache{config}, std::invalid_argument);
      continue;
    }
    CountingSource memory;
    config.memory = memory.source();
    Cache cache(config);
    const SequenceId id = new_sequence(cache);
    std::size_t length = 0;
    bool full = false;
    while (length < 120 && !full) {
      const std::size_t more = pick({1, 2, 17, 60});
      for (std::size_t l = 0; l < config.layers.size() && !full; ++l) {
        const LayerShape& shape = config.layers[l];
        const std::size_t width = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
        const Outcome outcome =
            attend_one(cache, l, id, gaussian_block(seed, more, shape.kv_heads, shape.head_dim, 1, length),
                       gaussian_block(seed + 1, more, shape.kv_heads, width, 1, length),
                       gaussian_block(seed + 2, more, 2 * shape.kv_heads, shape.head_dim, 1, length));
        if (config.max_bytes != 0 && outcome.status == Status::out_of_memory) {
          full = true;
          break;
        }
        ASSERT_OK(outcome.status);
        ASSERT_TRUE(all_finite(outcome.out));
      }
      if (!full) length += more;
    }
    ASSERT_EQ(cache.length(id), length);
    if (full) ASSERT_OK(cache.truncate(id, length));
    ++worked;
    ASSERT_TRUE(is_balanced(cache, std::array{id}));
  }
  EXPECT_GT(refused, 50U);
  EXPECT_GT(worked, 50U);
}

}  // namespace
