// Configurations: refused in words that name what is wrong, or they work. Names like A02 are cases
// of public reports; "bits = 5" and other codecs that do not exist do not compile (static_assert in the codecs).
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cache/audit.hpp"
#include "cache/counting_source.hpp"
#include "cache/small_cache.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::npos;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;

/// The words of a refusal, and that the constructor uses the same.
std::string refusal(const CacheConfig& config) {
  const std::string words = turboquant::why_invalid(config, 1);
  if (words.empty()) return words;
  try {
    const Cache cache(config);
    ADD_FAILURE() << "constructed although: " << words;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
  return words;
}
testing::AssertionResult says(const std::string& words, std::initializer_list<const char*> wanted) {
  for (const char* word : wanted)
    if (words.find(word) == std::string::npos)
      return testing::AssertionFailure() << '"' << words << "\" does not say " << word;
  return testing::AssertionSuccess();
}

TEST(KVCache, InvalidConfigurationsAreRefusedInWords) {
  const CacheConfig good = small_config();
  EXPECT_EQ(turboquant::why_invalid(good, 1), "");
  EXPECT_EQ(turboquant::why_invalid(CacheConfig{}, 1), "");
  CacheConfig config = good;
  config.layers.clear();
  EXPECT_TRUE(says(refusal(config), {"layer"}));
  for (const auto& [dim, nearest] : {std::pair<std::uint32_t, const char*>{40, "32"},
                                     {72, "64"},
                                     {100, "96"},
                                     {104, "96"},
                                     {136, "128"},
                                     {16, "32"},
                                     {0, "32"},
                                     {1040, "1024"},
                                     {(1U << 30) + 1, "1024"}}) {
    config = good;
    config.layers[0].head_dim = dim;
    EXPECT_TRUE(says(refusal(config), {"head_dim", std::to_string(dim).c_str(), nearest}));
    if (dim == 0) continue;  // as a value_dim: the same as head_dim
    config = good;
    config.layers[0].value_dim = dim;
    EXPECT_TRUE(says(refusal(config), {"value_dim", std::to_string(dim).c_str(), nearest}));
  }
  config = good;
  config.layers[0].kv_heads = 0;
  EXPECT_TRUE(says(refusal(config), {"kv_heads"}));
  config = good;
  config.layers[0].format = 1;
  EXPECT_TRUE(says(refusal(config), {"format", "1"}));
  EXPECT_EQ(turboquant::why_invalid(config, 2), "");
  for (const int bits : {1, 7, 9, 15, 32, 255}) {
    config = good;
    config.layers[0].center_bits = static_cast<std::uint8_t>(bits);
    EXPECT_TRUE(says(refusal(config), {"center_bits", std::to_string(bits).c_str()}));
  }
  for (const std::size_t page : {std::size_t{0}, std::size_t{8}, std::size_t{20}, std::size_t{272}, npos}) {
    config = good;
    config.page_tokens = page;
    EXPECT_TRUE(says(refusal(config), {"page_tokens", "16", "256"}));
  }
  for (const std::size_t page : {16U, 48U, 64U, 256U}) {
    config = good;
    config.page_tokens = page;
    EXPECT_EQ(turboquant::why_invalid(config, 1), "");
  }
  // The second layer is named.
  config = small_config(2);
  config.layers[1].head_dim = 72;
  EXPECT_TRUE(says(refusal(config), {"1", "head_dim", "72"}));
  // Half a memory source is none.
  CountingSource memory;
  config = good;
  config.memory = memory.source();
  config.memory.release = nullptr;
  EXPECT_TRUE(says(refusal(config), {"memory"}));
  config.memory = memory.source();
  config.memory.allocate = nullptr;
  EXPECT_TRUE(says(refusal(config), {"memory"}));
  for (auto member : {&CacheConfig::recent_tokens, &CacheConfig::first_tokens, &CacheConfig::rollback_tokens}) {
    config = good;
    config.*member = npos;  // sums of these must not wrap
    if (turboquant::why_invalid(config, 1).empty()) {
      Cache cache(config);
      const SequenceId id = new_sequence(cache);
      ASSERT_OK(feed(cache, id, 1, 0, 40));
      Block keys, values;
      ASSERT_OK(read_rows(cache, id, 0, 0, 40, keys, values));
      EXPECT_EQ(keys.exact().numbers == keys_of(1, 0, 40).bfloat16_rounded().numbers,
                member != &CacheConfig::rollback_tokens);
    }
  }
}

TEST(KVCache, TellsItsConfiguration) {
  const CacheConfig config = small_config(3);
  const Cache cache(config);
  EXPECT_EQ(cache.config().layers.size(), 3U);
  EXPECT_EQ(cache.config().page_tokens, 16U);
  EXPECT_EQ(cache.config().layers[2].head_dim, 32U);
}

TEST(ContainerCases, A02_InvalidConstructionsAreRefusedAtOnce) {
  const auto refuse = [](auto change, const std::string& value) {
    CacheConfig config = small_config();
    change(config);
    EXPECT_TRUE(says(refusal(config), {value.c_str()}));
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
