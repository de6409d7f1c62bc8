// Single pages that are saved and loaded: into other sequences, from their middle, and where they do not belong.
#include <gtest/gtest.h>

#include <cstddef>

#include "cache/block.hpp"
#include "cache/mixed_cache.hpp"
#include "cache/saved_file.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::detail::CacheAccess;

template <class Cache>
Bytes saved_page(const Cache& cache, SequenceId id, std::size_t layer, std::size_t position, std::size_t& tokens) {
  MemorySink file;
  EXPECT_OK(save_page(cache, id, layer, position, file.sink(), &tokens));
  return file.bytes;
}

/// A cache without first tokens whose sequence is sealed at 41 tokens: pages of 16, 16 and 9.
struct Exporter {
  CacheConfig config = mixed_config();
  MixedCache cache;
  SequenceId id;

  Exporter() : cache(prepare(config)), id(new_sequence(cache)) {
    (void)append_all(cache, id, 1, 41);
    EXPECT_OK(cache.seal(id));
  }
  static CacheConfig prepare(CacheConfig& config) {
    config.first_tokens = 0;
    config.layers[1].window = 8;
    return config;
  }
};

TEST(File, PagesMoveOneByOne) {
  Exporter from;
  MixedCache there(from.config);
  const SequenceId copy = new_sequence(there);
  for (const std::size_t l : {0U, 2U, 4U}) {  // those without a window
    std::size_t at = 0, pages = 0;
    for (; at < 41; ++pages) {
      std::size_t tokens = 0;
      const Bytes page = saved_page(from.cache, from.id, l, at, tokens);
      MemoryStream stream(page);
      ASSERT_OK(load_page(there, copy, l, stream.source()));
      EXPECT_EQ(stream.read, page.size());
      at += tokens;
    }
    EXPECT_EQ(at, 41U);
    EXPECT_EQ(pages, 3U);
    const LayerShape& shape = from.config.layers[l];
    const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
    for (std::uint64_t stream = 0; stream < 3; ++stream) {  // and on they go
      Block keys, values, copied_keys(at, shape.kv_heads, shape.head_dim), copied_values(at, shape.kv_heads, value_dim);
      ASSERT_OK(from.cache.read(from.id, l, 0, copied_keys.rows(), copied_values.rows()));
      keys = copied_keys, values = copied_values;
      ASSERT_OK(there.read(copy, l, 0, copied_keys.rows(), copied_values.rows()));
      EXPECT_TRUE(same_bits(keys, copied_keys) && same_bits(values, copied_values));
      const Block new_keys = gaussian_block(stream, 30, shape.kv_heads, shape.head_dim),
                  new_values = gaussian_block(stream + 9, 30, shape.kv_heads, value_dim),
                  queries = gaussian_block(stream + 18, 30, 2 * shape.kv_heads, shape.head_dim);
      EXPECT_TRUE(same_bits(attend_one(from.cache, l, from.id, new_keys, new_values, queries),
                            attend_one(there, l, copy, new_keys, new_values, queries)));
      at += 30;
    }
  }
}

TEST(File, APageFromItsMiddle) {
  Exporter from;
  MixedCache there(from.config);
  const SequenceId copy = new_sequence(there);
  std::size_t tokens = 0;
  for (const std::size_t position : {21U, 32U, 5U}) {
    const Bytes page = saved_page(from.cache, from.id, 0, position, tokens);
    EXPECT_EQ(tokens, position == 32 ? 9U : 11U);
    MemoryStream stream(page);
    ASSERT_OK(load_page(there, copy, 0, stream.source()));
  }
  Block keys(31, 2, 32), wanted(41, 2, 32);
  ASSERT_OK(there.read(copy, 0, 0, keys.rows(), turboquant::Rows()));
  ASSERT_OK(from.cache.read(from.id, 0, 0, wanted.rows(), turboquant::Rows()));
  Block moved = wanted.slice(21, 32);
  moved.append(wanted.slice(32, 41));
  moved.append(wanted.slice(5, 16));
  EXPECT_TRUE(same_bits(keys, moved));
}

TEST(File, PagesAreRefusedWhereTheyDoNotBelong) {
  Exporter from;
  std::size_t tokens = 77;
  MemorySink none;
  EXPECT_STATUS(bad_shape, save_page(from.cache, from.id, 0, 41, none.sink(), &tokens));
  EXPECT_STATUS(bad_layer, save_page(from.cache, from.id, 5, 0, none.sink(), &tokens));
  EXPECT_STATUS(unknown_sequence, save_page(from.cache, SequenceId{}, 0, 0, none.sink(), &tokens));
  EXPECT_STATUS(behind_window, save_page(from.cache, from.id, 1, 0, none.sink(), &tokens));
  EXPECT_STATUS(io_error, save_page(from.cache, from.id, 0, 0, turboquant::ByteSink{}, &tokens));
  EXPECT_EQ(tokens, 77U);
  EXPECT_TRUE(none.bytes.empty());

  const Bytes page = saved_page(from.cache, from.id, 0, 0, tokens);
  const auto refused = [&page](MixedCache& cache, SequenceId id, std::size_t layer) {
    MemoryStream stream(page);
    return load_page(cache, id, layer, stream.source());
  };
  MixedCache there(from.config);
  const SequenceId id = new_sequence(there);
  EXPECT_STREQ(refused(there, id, 2).field, "kv_heads");
  EXPECT_STATUS(bad_layer, refused(there, id, 5));
  EXPECT_STATUS(unknown_sequence, refused(there, SequenceId{}, 0));
  (void)append_all(there, id, 3, 1);
  EXPECT_STREQ(refused(there, id, 0).field, "raw rows");
  EXPECT_EQ(there.length(id), 1U);
  ASSERT_OK(there.seal(id));
  EXPECT_OK(refused(there, id, 0));
  EXPECT_EQ(there.length(id), 1U);  // of the shortest layer
  EXPECT_STATUS(bad_shape, there.seal(id));
  ASSERT_OK(there.truncate(id, 1));

  CacheConfig config = from.config;
  config.first_tokens = 4;
  MixedCache with_first(config);
  const SequenceId fresh = new_sequence(with_first);
  EXPECT_STREQ(refused(with_first, fresh, 0).field, "first_tokens");
  (void)append_all(with_first, fresh, 3, 4);
  EXPECT_OK(refused(with_first, fresh, 0));
  config = from.config;
  config.page_tokens = 32;
  MixedCache larger(config);
  EXPECT_STREQ(refused(larger, new_sequence(larger), 0).field, "page_tokens");
  config = from.config;
  config.seed = 43;
  MixedCache seeded(config);
  EXPECT_STREQ(refused(seeded, new_sequence(seeded), 0).field, "seed");

  // A sequence is no page and a page no sequence.
  SequenceId created;
  MemoryStream stream(page);
  EXPECT_STREQ(load(from.cache, stream.source(), created).field, "magic");
  const Bytes sequence = saved(from.cache, from.id);
  MemoryStream other(sequence);
  EXPECT_STREQ(load_page(there, new_sequence(there), 0, other.source()).field, "magic");
}

TEST(File, PagesKeepWhatReservePromised) {
  Exporter from;
  std::size_t tokens = 0;
  const Bytes page = saved_page(from.cache, from.id, 0, 0, tokens);
  MixedCache there(from.config);
  const SequenceId id = new_sequence(there);
  ASSERT_OK(there.reserve(id, 64));
  const std::size_t before = there.memory().page_bytes;
  MemoryStream stream(page);
  ASSERT_OK(load_page(there, id, 0, stream.source()));
  EXPECT_EQ(there.memory().page_bytes, before + CacheAccess::core(there).layer(0).page.bytes);
}

}  // namespace
