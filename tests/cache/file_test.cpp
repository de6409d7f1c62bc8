// Saved sequences come back as they were, and go on as they would have. Names like F19 are cases of public
// reports.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <turboquant/cache/stream.hpp>
#include <vector>

#include "cache/block.hpp"
#include "cache/coded_rows.hpp"
#include "cache/counting_source.hpp"
#include "cache/mixed_cache.hpp"
#include "cache/sanitized.hpp"
#include "cache/saved_file.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::Format;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::PolarQuant;
using turboquant::ScalarQuant;
using turboquant::SequenceId;
using turboquant::Status;
using turboquant::TrellisQuant;
using turboquant::detail::CacheAccess;

TEST(File, EverySequenceGoesOnAsItWouldHave) {
  std::size_t erased_pages = 0, windowed = 0, deep = 0;
  for (std::uint64_t seed = 0; seed < (kSanitized ? 5 : 12) && !HasFailure(); ++seed) {
    CacheConfig config = mixed_config();
    config.recent_tokens = seed % 3 * 20;  // less than a window, and more
    config.rollback_tokens = seed % 2 * 24;
    config.first_tokens = seed % 4 * 3;
    config.page_tokens = seed % 5 == 4 ? 32 : 16;
    MixedCache here(config), there(config);
    const SequenceId id = new_sequence(here);
    Decisions dice(seed);
    for (int step = 0; step < 25 && !HasFailure(); ++step) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " step " << step << " length " << here.length(id));
      const Bytes bytes = saved(here, id);
      const SequenceId copy = loaded(there, bytes);
      ASSERT_EQ(there.length(copy), here.length(id));
      ASSERT_EQ(saved(there, copy), bytes);
      SequenceId original;  // `id` lives on in its own way
      ASSERT_OK(here.fork(id, here.length(id), original));
      ASSERT_EQ(saved(here, original), bytes);
      Decisions here_dice(seed * 1000 + static_cast<std::uint64_t>(step) + 7), there_dice = here_dice;
      for (int k = 0; k < 4; ++k) {
        ASSERT_TRUE(same_bits(live_on(here, original, here_dice), live_on(there, copy, there_dice))) << k;
        ASSERT_EQ(saved(here, original), saved(there, copy)) << k;
      }
      for (std::size_t l = 0; l < config.layers.size(); ++l) {
        const auto& state = CacheAccess::core(here).find(id)->layers[l];
        windowed += state.dropped_entries > 0 ? 1U : 0U;
        for (std::size_t i = 1; i < state.entries.size(); ++i) {
          erased_pages += state.entries[i].page == state.entries[i - 1].page ? 1U : 0U;
          deep += state.entries[i].count < config.page_tokens ? 1U : 0U;
        }
      }
      here.release(original);
      there.release(copy);
      (void)live_on(here, id, dice);
    }
    here.release(id);
    for (const MixedCache* cache : {&here, &there}) {
      EXPECT_EQ(cache->memory().page_bytes, 0U);
      EXPECT_EQ(cache->memory().tail_bytes, 0U);
    }
  }
  EXPECT_GT(erased_pages, 10U);
  EXPECT_GT(windowed, 10U);
  EXPECT_GT(deep, 10U);
}

TEST(File, TheEmptySequence) {
  MixedCache here(mixed_config()), there(mixed_config());
  const SequenceId id = new_sequence(here);
  const Bytes bytes = saved(here, id);
  const SequenceId copy = loaded(there, bytes);
  EXPECT_EQ(there.length(copy), 0U);
  EXPECT_TRUE(same_bits(append_all(here, id, 1, 50), append_all(there, copy, 1, 50)));
}

TEST(File, SequencesFollowEachOtherInOneStream) {
  MixedCache here(mixed_config()), there(mixed_config());
  const SequenceId a = new_sequence(here), b = new_sequence(here);
  (void)append_all(here, a, 1, 50);
  (void)append_all(here, b, 2, 21);
  std::stringstream stream;
  ASSERT_OK(save(here, a, stream));
  ASSERT_OK(save(here, b, stream));
  SequenceId copy_a, copy_b;
  ASSERT_OK(load(there, stream, copy_a));
  ASSERT_OK(load(there, stream, copy_b));
  EXPECT_EQ(saved(there, copy_a), saved(here, a));
  EXPECT_EQ(saved(there, copy_b), saved(here, b));
  SequenceId none = copy_a;
  EXPECT_STATUS(corrupt_file, load(there, stream, none));
  EXPECT_TRUE(none == copy_a);
}

TEST(File, FilesOnDisk) {
  const std::string path = testing::TempDir() + "turboquant_file_test.bin";
  MixedCache here(mixed_config()), there(mixed_config());
  const SequenceId id = new_sequence(here);
  (void)append_all(here, id, 1, 70);
  {
    std::ofstream file(path, std::ios::binary);
    ASSERT_OK(save(here, id, file));
  }
  std::ifstream file(path, std::ios::binary);
  SequenceId copy;
  ASSERT_OK(load(there, file, copy));
  EXPECT_EQ(saved(there, copy), saved(here, id));
  std::remove(path.c_str());
}

TEST(File, LayersOfUnequalLengthAreRefused) {
  MixedCache cache(mixed_config());
  const SequenceId id = new_sequence(cache);
  (void)append_all(cache, id, 1, 20);
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 1, 2, 32), gaussian_block(2, 1, 2, 32)));
  MemorySink file;
  const Status status = save(cache, id, file.sink());
  EXPECT_TRUE(status == Status::bad_shape);
  EXPECT_STREQ(status.field, "layer lengths");
  EXPECT_TRUE(file.bytes.empty());
  ASSERT_OK(cache.truncate(id, 20));
  EXPECT_OK(save(cache, id, file.sink()));
  EXPECT_STATUS(unknown_sequence, save(cache, SequenceId{}, file.sink()));
}

/// 64-bit FNV-1a: a hash that owes nothing to the library.
std::uint64_t fnv(const Bytes& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3U;
  return hash;
}

/// Small integers: no rounding on arrival, no library's idea of a logarithm.
Block whole_numbers(std::size_t tokens, std::size_t heads, std::size_t dim, std::uint32_t salt) {
  Block block(tokens, heads, dim);
  for (std::size_t i = 0; i < block.numbers.size(); ++i) {
    const auto n = static_cast<std::uint32_t>(i) * 2654435761U + salt * 40503U;
    block.numbers[i] = static_cast<float>(static_cast<int>((n >> 16) % 41) - 20);
  }
  return block;
}

CacheConfig pinned_config(std::uint8_t center_bits) {
  CacheConfig config = coded_config(2, 64, 96, center_bits);
  config.recent_tokens = 4;
  config.rollback_tokens = 4;
  config.first_tokens = 2;
  return config;
}

/// 43 tokens: first ones, two pages, a tail.
template <class F>
std::uint64_t pinned(std::uint8_t center_bits) {
  KVCache<F> cache(pinned_config(center_bits));
  const SequenceId id = new_sequence(cache);
  EXPECT_OK(append_only(cache, 0, id, whole_numbers(43, 2, 64, 1), whole_numbers(43, 2, 96, 2)));
  return fnv(saved(cache, id));
}

TEST(File, BytesArePinned) {
  // The same for every compiler, optimisation level and instruction set. If the format changes on purpose, so does
  // kFileFormatVersion; if nothing was to change, this is a defect.
  EXPECT_EQ(turboquant::kFileFormatVersion, 1U);
  EXPECT_EQ(pinned<turboquant::TQ2>(8), 0x9687b4a16a9f4ae8U);
  EXPECT_EQ(pinned<turboquant::TQ3>(16), 0xfcc1e7c72140cc61U);
  EXPECT_EQ(pinned<turboquant::TQ4>(8), 0xaad0cf67b6ceb102U);
  EXPECT_EQ(pinned<turboquant::TQ8>(0), 0x5381c720c705fe6dU);
  EXPECT_EQ((pinned<Format<PolarQuant<1>, ScalarQuant<3>>>(8)), 0x144ab447e1e29822U);
  EXPECT_EQ((pinned<Format<PolarQuant<3>, ScalarQuant<8>>>(8)), 0x7178c7b57604be90U);
  EXPECT_EQ((pinned<Format<PolarQuant<2>, TrellisQuant<4>>>(8)), 0x68a61a93d77e3f92U);
}

TEST(File, TheChecksumIsPinnedAndFindsEveryChangeOfOneWord) {
  Bytes bytes(100);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 7 + 1);
  const auto sum = [&bytes](std::size_t count) { return turboquant::detail::checksum(bytes.data(), count, 5); };
  EXPECT_EQ(sum(0), 0xd8a37bf59d490e50U);
  EXPECT_EQ(sum(64), 0xefb1a159cb35f73eU);
  EXPECT_EQ(sum(100), 0x138a841b94ced6faU);
  const std::uint64_t whole = sum(100);
  EXPECT_NE(turboquant::detail::checksum(bytes.data(), 100, 6), whole);
  for (std::size_t word = 0; word < 12; ++word) {
    const Bytes before = bytes;
    for (std::uint64_t k = 1; k < 2000; ++k) {
      set_number(bytes, 8 * word,
                 number_at(before, 8 * word) ^ (k < 65 ? std::uint64_t{1} << (k - 1) : oracle::hash(1, 2, k)));
      ASSERT_NE(sum(100), whole) << word << ' ' << k;
    }
    bytes = before;
  }
  // Zeros at the end count.
  Bytes zeros(64);
  for (std::size_t count = 1; count < 64; ++count)
    EXPECT_NE(turboquant::detail::checksum(zeros.data(), count, 0), turboquant::detail::checksum(zeros.data(), 64, 0));
}

TEST(File, F19SavingAndLoadingTenTimesChangesNothing) {
  for (const std::size_t dim : {128U, 96U}) {
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 1, .head_dim = static_cast<std::uint32_t>(dim)}};
    config.page_tokens = 16;
    config.recent_tokens = 16;
    KVCache<turboquant::TQ4> first(config);
    SequenceId id = new_sequence(first);
    ASSERT_OK(append_only(first, 0, id, gaussian_block(1, 75, 1, dim), gaussian_block(2, 75, 1, dim)));
    const Bytes bytes = saved(first, id);
    for (int generation = 0; generation < 10; ++generation) {
      KVCache<turboquant::TQ4> next(config);
      id = loaded(next, bytes);
      ASSERT_EQ(saved(next, id), bytes) << generation;
      // The child's tokens are its own.
      SequenceId child;
      ASSERT_OK(next.fork(id, 75, child));
      ASSERT_OK(append_only(next, 0, child, gaussian_block(3, 40, 1, dim), gaussian_block(4, 40, 1, dim)));
      ASSERT_EQ(saved(next, id), bytes) << generation;
      Block before_keys, before_values, keys, values;
      ASSERT_OK(read_rows(next, id, 0, 0, 48, before_keys, before_values));
      ASSERT_OK(read_rows(next, child, 0, 0, 48, keys, values));
      ASSERT_TRUE(same_bits(keys, before_keys) && same_bits(values, before_values));
    }
  }
}

TEST(File, L03PaddedAndUnequalSizesTakeTurns) {
  // 96 coordinates are no power of two; two sequences in turn, each saved and loaded between.
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 2, .head_dim = 96}};
  config.page_tokens = 16;
  config.recent_tokens = 0;
  config.rollback_tokens = 0;
  using Cache = KVCache<turboquant::TQ4>;
  Cache plain(config);
  const SequenceId a = new_sequence(plain), b = new_sequence(plain);
  Bytes file_a, file_b;
  for (int turn = 0; turn < 6; ++turn) {
    const SequenceId id = turn % 2 == 0 ? a : b;
    Bytes& file = turn % 2 == 0 ? file_a : file_b;
    Cache fresh(config);
    const SequenceId copy = turn < 2 ? new_sequence(fresh) : loaded(fresh, file);
    const std::size_t count = turn < 2 ? 19 : 5;
    const auto stream = std::uint64_t{100} * static_cast<std::uint64_t>(turn);
    const Block keys = gaussian_block(stream + 1, count, 2, 96), values = gaussian_block(stream + 2, count, 2, 96),
                queries = gaussian_block(stream + 3, 2, 4, 96);
    ASSERT_TRUE(
        same_bits(attend_one(plain, 0, id, keys, values, queries), attend_one(fresh, 0, copy, keys, values, queries)));
    std::vector<float> here(2 * 4 * plain.length(id)), there = here;
    ASSERT_OK(turboquant::logits(plain, id, 0, queries.rows(), here.data()));
    ASSERT_OK(turboquant::logits(fresh, copy, 0, queries.rows(), there.data()));
    EXPECT_TRUE(same_bits(here, there));
    file = saved(fresh, copy);
    // Header and layer 80 + 72 + 56; a page 12 + 8 + 8 more than its bytes; raw rows as they are, and 8 per tile.
    const std::size_t n = fresh.length(copy), page = CacheAccess::core(fresh).layer(0).page.bytes;
    EXPECT_EQ(file.size(), 208 + n / 16 * (page + 28) + n % 16 * (2 * 2 * 96 * 2) + (n % 16 != 0 ? 8 : 0));
  }
}

TEST(File, S08FragmentedPoolAndWindow) {
  CountingSource memory;
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32}};
  config.page_tokens = 16;
  config.recent_tokens = config.rollback_tokens = 0;
  config.memory = memory.source();
  using Cache = KVCache<turboquant::TQ4>;
  config.max_bytes = 8 * turboquant::layout::page_layout({16, 1, 8, {32, 4, false}, {32, 4, false}}).bytes;
  Cache cache(config);
  const SequenceId four = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, four, gaussian_block(1, 64, 1, 32), gaussian_block(2, 64, 1, 32)));
  const Bytes bytes = saved(cache, four);
  const Block query = gaussian_block(5, 2, 2, 32);
  const Outcome wanted = attend_only(cache, 0, four, query);
  cache.release(four);
  std::vector<SequenceId> ones;
  for (std::uint64_t i = 0; i < 8; ++i) {
    ones.push_back(new_sequence(cache));
    ASSERT_OK(append_only(cache, 0, ones.back(), gaussian_block(10 + i, 16, 1, 32), gaussian_block(20 + i, 16, 1, 32)));
  }
  SequenceId none;
  MemoryStream refused(bytes);
  EXPECT_STATUS(out_of_memory, load(cache, refused.source(), none));
  EXPECT_TRUE(none == SequenceId{});
  for (std::size_t i = 0; i < 8; i += 2) cache.release(ones[i]);
  EXPECT_TRUE(same_bits(attend_only(cache, 0, loaded(cache, bytes), query), wanted));

  // A windowed layer holds fewer tokens than the sequence has.
  config.layers[0].window = 20;
  config.max_bytes = 0;
  Cache windowed(config), other(config);
  const SequenceId id = new_sequence(windowed);
  ASSERT_OK(append_only(windowed, 0, id, gaussian_block(1, 100, 1, 32), gaussian_block(2, 100, 1, 32)));
  EXPECT_GT(CacheAccess::core(windowed).find(id)->layers[0].held_begin, 0U);
  const SequenceId copy = loaded(other, saved(windowed, id));
  EXPECT_TRUE(same_bits(attend_only(windowed, 0, id, query), attend_only(other, 0, copy, query)));
  Block keys, values;
  EXPECT_STATUS(behind_window, read_rows(other, copy, 0, 0, 16, keys, values));
}

TEST(File, ASealBehindAWindowThatIsShorterThanTheRawTail) {
  // After the rollback codes are readable to 16 only, but the window has let go of all before 32.
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32, .window = 24}};
  config.page_tokens = 16;
  config.recent_tokens = 32;
  config.rollback_tokens = 8;
  using Cache = KVCache<turboquant::TQ4>;
  Cache here(config), there(config);
  const SequenceId id = new_sequence(here);
  ASSERT_OK(append_only(here, 0, id, gaussian_block(1, 64, 1, 32), gaussian_block(2, 64, 1, 32)));
  ASSERT_OK(here.truncate(id, 57));
  ASSERT_EQ(CacheAccess::core(here).find(id)->layers[0].held_begin, 32U);
  EXPECT_EQ(saved(there, loaded(there, saved(here, id))), saved(here, id));
  ASSERT_OK(here.seal(id));
  EXPECT_EQ(CacheAccess::core(here).find(id)->layers[0].entries[0].begin, 32U);
  const SequenceId copy = loaded(there, saved(here, id));
  Block keys, values, copied_keys, copied_values;
  ASSERT_OK(read_rows(here, id, 0, 32, 57, keys, values));
  ASSERT_OK(read_rows(there, copy, 0, 32, 57, copied_keys, copied_values));
  EXPECT_TRUE(same_bits(keys, copied_keys) && same_bits(values, copied_values));
}

TEST(File, AnErasureOfMoreThanTheWindowLeft) {
  // Six pages are let go of, and then most of their tokens, or all, are erased: fewer positions than pages.
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32, .window = 24}};
  config.page_tokens = config.recent_tokens = 16;
  config.rollback_tokens = 8;
  using Cache = KVCache<turboquant::TQ4>;
  for (const std::size_t end : {91U, 96U, 110U}) {
    SCOPED_TRACE(end);
    Cache here(config), there(config);
    const SequenceId id = new_sequence(here);
    ASSERT_OK(append_only(here, 0, id, gaussian_block(1, 130, 1, 32), gaussian_block(2, 130, 1, 32)));
    ASSERT_OK(here.erase(id, 0, end));
    const auto& state = CacheAccess::core(here).find(id)->layers[0];
    ASSERT_GT(state.dropped_entries, state.held_begin);
    const Bytes bytes = saved(here, id);
    const SequenceId copy = loaded(there, bytes);
    EXPECT_EQ(saved(there, copy), bytes);
    const Block more = gaussian_block(3, 50, 1, 32), queries = gaussian_block(4, 50, 2, 32);
    EXPECT_TRUE(
        same_bits(attend_one(here, 0, id, more, more, queries), attend_one(there, 0, copy, more, more, queries)));
  }
}

TEST(File, DroppedTokensLeaveNoTraceInLevelCodes) {
  // Two sequences share their first 20 tokens; what the longer one dropped again must not be in the file.
  using Cache = KVCache<Format<PolarQuant<3>, ScalarQuant<4>>, turboquant::TQ2>;
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 2, .head_dim = 32}, LayerShape{.kv_heads = 2, .head_dim = 32, .format = 1}};
  config.page_tokens = 16;
  config.recent_tokens = config.rollback_tokens = 0;
  Cache cache(config);
  const SequenceId id = new_sequence(cache);
  for (std::size_t l = 0; l < 2; ++l)
    ASSERT_OK(append_only(cache, l, id, gaussian_block(1, 48, 2, 32), gaussian_block(2, 48, 2, 32)));
  ASSERT_OK(cache.erase(id, 5, 9));
  ASSERT_OK(cache.truncate(id, 32));
  Block keys, values, copied_keys, copied_values;
  const Bytes bytes = saved(cache, id);
  Cache other(config);
  const SequenceId copy = loaded(other, bytes);
  const auto& core = CacheAccess::core(cache);
  for (std::size_t l = 0; l < 2; ++l) {
    ASSERT_OK(read_rows(cache, id, l, 0, 32, keys, values));
    ASSERT_OK(read_rows(other, copy, l, 0, 32, copied_keys, copied_values));
    EXPECT_TRUE(same_bits(keys, copied_keys) && same_bits(values, copied_values));
    const auto& layer = core.layer(l);
    const auto& entries = CacheAccess::core(other).find(copy)->layers[l].entries;
    ASSERT_EQ(entries.size(), 4U);  // page 0 twice, page 1, 4 tokens of page 2
    EXPECT_EQ(entries[0].page, entries[1].page);
    const auto expect_dead = [&](const turboquant::detail::Block* page, std::size_t token) {
      for (const auto side : {turboquant::layout::Side::key, turboquant::layout::Side::value}) {
        const auto part = layer.part(page->memory, side, 1);
        EXPECT_EQ(part.scales[token].bits, 0U);
        if (part.zero_points != nullptr) {
          EXPECT_EQ(part.zero_points[token].bits, 0U);
        }
        if (l == 1 && side == turboquant::layout::Side::value) continue;  // a trellis along the tokens
        // With scale 1 the codes speak.
        std::vector<turboquant::bfloat16> scales(16, turboquant::to_bfloat16(1.0F));
        auto loud = part;
        loud.scales = scales.data();
        loud.zero_points = nullptr;
        loud.center_bits = 0;
        std::vector<float> dead(32), empty(32);
        layer.operations->decode_row(side, loud, token, dead.data());
        std::vector<std::uint8_t> zeros(layer.page.bytes);
        loud.fragments = zeros.data();
        layer.operations->decode_row(side, loud, token, empty.data());
        EXPECT_EQ(dead, empty) << "layer " << l << " token " << token;
      }
    };
    for (const std::size_t token : {5U, 8U}) expect_dead(entries[0].page, token);
    for (const std::size_t token : {4U, 15U}) expect_dead(entries[3].page, token);
    // The cache's own page was not touched.
    const auto part = layer.part(core.find(id)->layers[l].entries[0].page->memory, turboquant::layout::Side::key, 0);
    EXPECT_NE(part.scales[5].bits, 0U);
  }
}

TEST(File, LargestAndSmallestRowsComeBack) {
  // What append accepts, save writes and load accepts: rows at 2^96, spikes, constants, zeros, subnormals.
  for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}}) {
    using Cache = KVCache<turboquant::TQ2, turboquant::TQ3, turboquant::TQ4, turboquant::TQ8,
                          Format<PolarQuant<1>, ScalarQuant<2>>, Format<PolarQuant<2>, PolarQuant<1>>,
                          Format<PolarQuant<4>, ScalarQuant<8>>, Format<TrellisQuant<4>, TrellisQuant<4>>>;
    CacheConfig config;
    for (std::uint32_t format = 0; format < 8; ++format)
      for (const std::uint32_t dim : {32U, 1024U})
        config.layers.push_back({.kv_heads = 1, .head_dim = dim, .format = format, .center_bits = center_bits});
    config.page_tokens = 16;
    config.recent_tokens = config.rollback_tokens = 0;
    Cache cache(config), other(config);
    const SequenceId id = new_sequence(cache);
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const std::size_t dim = config.layers[l].head_dim;
      const turboquant::Rotation rotation(config.seed, dim);
      Block keys(80, 1, dim);
      for (std::size_t t = 0; t < 80; ++t)
        for (std::size_t i = 0; i < dim; ++i) {
          const float sign = oracle::hash(l, t, i) % 2 == 0 ? 1.0F : -1.0F;
          float& x = keys.row(t)[i];
          switch (t / 16) {
            case 0:  // rotated, all of it in one coordinate, with either sign
              x = 0x1p96F * rotation.signs()[i] * (t % 2 == 0 ? 1.0F : -1.0F);
              break;
            case 1:
              x = 0x1p96F * sign;
              break;
            case 2:
              x = t % 3 == 0 ? 0x1p96F * rotation.signs()[i] : 0x1p-149F * sign;
              break;
            case 3:
              x = i == t ? 0x1p96F : 0.0F;
              break;
            default:
              x = 0x1p-133F * sign;
          }
        }
      ASSERT_OK(append_only(cache, l, id, keys, keys));
    }
    const Bytes bytes = saved(cache, id);
    const SequenceId copy = loaded(other, bytes);
    ASSERT_EQ(saved(other, copy), bytes);
    for (std::size_t l = 0; l < config.layers.size(); ++l)
      EXPECT_TRUE(all_finite(attend_only(other, l, copy, gaussian_block(1, 1, 1, config.layers[l].head_dim)).out)) << l;
  }
}

TEST(File, SavingBesideReadersAndBesideWritersOfOtherSequences) {
  MixedCache cache(mixed_config());
  const SequenceId id = new_sequence(cache);
  (void)append_all(cache, id, 1, 90);
  const Bytes wanted = saved(cache, id);
  SequenceId fork;
  ASSERT_OK(cache.fork(id, 90, fork));
  std::atomic<std::size_t> wrong{0};
  std::array<std::thread, 2> threads;
  for (std::thread& thread : threads)
    thread = std::thread([&] {
      for (int round = 0; round < 20; ++round) {
        MemorySink file;
        if (!(save(cache, id, file.sink()) == Status::ok) || file.bytes != wanted) ++wrong;
        SequenceId copy;
        MemoryStream stream(wanted);
        if (!(load(cache, stream.source(), copy) == Status::ok)) ++wrong;
        cache.release(copy);
      }
    });
  for (std::uint64_t round = 0; round < 20; ++round) (void)append_all(cache, fork, 1000 * round, 3);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0U);
}

}  // namespace
