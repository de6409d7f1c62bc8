// Files that are not what they should be: cut, damaged, forged, of another cache; sinks that give out. Every
// one is refused, in words, and nothing has changed. Names like S01 are cases of public reports.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <turboquant/cache/stream.hpp>
#include <utility>
#include <vector>

#include "cache/damaged_file.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;
using turboquant::detail::CacheAccess;

TEST(FileDamage, EveryTruncationIsRefused) {
  Small small(small_config());
  Mixed mixed(mixed_config(), 70);
  EXPECT_OK(small.load_bytes(small.bytes));
  EXPECT_OK(mixed.load_bytes(mixed.bytes));
  const auto cut = [](auto& file) {
    for (std::size_t count = 0; count < file.bytes.size(); ++count) {
      MemoryStream stream(file.bytes.data(), count);
      const Status status = file.load_stream(stream);
      ASSERT_TRUE(status == Status::corrupt_file) << count << ' ' << turboquant::to_string(status.code);
      ASSERT_EQ(status.found, static_cast<std::int64_t>(count));  // where it ends
      ASSERT_GT(status.expected, status.found);
      ASSERT_STRNE(status.field, "");
    }
  };
  cut(small);
  cut(mixed);
}

TEST(FileDamage, S06EveryFlippedBitIsRefused) {
  Small file(small_config());
  std::set<std::string> fields;
  for (std::size_t bit = 0; bit < 8 * file.bytes.size(); ++bit) {
    file.bytes[bit / 8] = static_cast<std::uint8_t>(file.bytes[bit / 8] ^ (1U << bit % 8));
    const Status status = file.load_bytes(file.bytes);
    ASSERT_TRUE(status == Status::corrupt_file || status == Status::format_mismatch) << bit;
    fields.insert(status.field);
    file.bytes[bit / 8] = static_cast<std::uint8_t>(file.bytes[bit / 8] ^ (1U << bit % 8));
  }
  EXPECT_EQ(fields, (std::set<std::string>{"magic", "endianness", "version", "header", "layer shape", "layer",
                                           "raw rows", "page", "page spans"}));
}

TEST(FileDamage, TenThousandRandomCorruptionsAreRefused) {
  const std::uint64_t seed = 20240607;
  RecordProperty("seed", std::to_string(seed));
  Mixed file(mixed_config(), 70);
  Decisions dice(seed);
  for (int i = 0; i < 10000; ++i) {
    Bytes bytes = file.bytes;
    const std::size_t at = dice.roll(bytes.size()), count = 1 + dice.roll(std::min<std::size_t>(64, bytes.size() - at));
    switch (dice.roll(5)) {
      case 0:  // a run of other bytes
        for (std::size_t k = 0; k < count; ++k) bytes[at + k] = static_cast<std::uint8_t>(dice.roll(256));
        break;
      case 1:  // one bit
        bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ (1U << dice.roll(8)));
        break;
      case 2:  // a hole
        bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                    bytes.begin() + static_cast<std::ptrdiff_t>(at + count));
        break;
      case 3: {  // two places exchanged
        const std::size_t other = dice.roll(bytes.size());
        std::swap(bytes[at], bytes[other]);
        break;
      }
      default:  // something put in
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), count, static_cast<std::uint8_t>(dice.roll(256)));
    }
    if (std::equal(file.bytes.begin(), file.bytes.end(), bytes.begin(),
                   bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), file.bytes.size()))) &&
        bytes.size() >= file.bytes.size()) {
      continue;  // unchanged
    }
    const Status status = file.load_bytes(bytes);
    ASSERT_TRUE(status == Status::corrupt_file || status == Status::format_mismatch)
        << "seed " << seed << " corruption " << i << ": " << turboquant::to_string(status.code);
  }
}

TEST(FileDamage, TenThousandForgeriesAreHarmless) {
  // As before, but with checksums that are right: what gets in must be usable.
  const std::uint64_t seed = 20240608;
  RecordProperty("seed", std::to_string(seed));
  Mixed file(mixed_config(), 70);
  Decisions dice(seed);
  std::size_t accepted = 0;
  for (int i = 0; i < 10000 && !HasFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << " forgery " << i);
    Bytes bytes = file.bytes;
    for (std::size_t n = 1 + dice.roll(3); n > 0; --n) {
      const Section& section = file.sections[dice.roll(file.sections.size())];
      const std::size_t at =
          section.begin + dice.roll(dice.roll(2) == 0 ? section.size : std::min<std::size_t>(section.size, 96));
      constexpr std::uint8_t kLoud[] = {0, 1, 0x7f, 0x80, 0xff};
      bytes[at] = dice.roll(2) == 0 ? kLoud[dice.roll(5)] : static_cast<std::uint8_t>(dice.roll(256));
    }
    seal_sections(bytes, file.from);
    const Status status = file.load_bytes(bytes);
    ASSERT_TRUE(status == Status::ok || status == Status::corrupt_file || status == Status::format_mismatch);
    accepted += status == Status::ok ? 1U : 0U;
  }
  EXPECT_GT(accepted, 1000U);  // codes mean something whatever they are
  EXPECT_LT(accepted, 9000U);
}

TEST(FileDamage, S01BadNumbersWithGoodChecksumsAreRefused) {
  CacheConfig config = mixed_config();
  Mixed file(config, 100);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const auto& layer = CacheAccess::core(file.from).layer(l);
    const Section& page = file.find(SectionKind::page, l);
    const std::size_t memory = page.begin;
    const std::size_t head = memory + layer.page.head_offset(layer.shape.kv_heads - 1);
    const auto expect_refused = [&](std::size_t at, unsigned bits, const char* name) {
      const Status status = file.load_bytes(file.forged(at, bits, 2));
      EXPECT_TRUE(status == Status::corrupt_file) << name << ' ' << std::hex << bits;
      EXPECT_STREQ(status.field, name);
      EXPECT_EQ(status.found, static_cast<std::int64_t>(page.begin));
    };
    // Infinity, NaN, minus infinity, -1 and -0 as bfloat16; the largest finite number.
    for (const unsigned bits : {0x7f80U, 0x7fc0U, 0xff80U, 0xbf80U, 0x8000U, 0x7f7fU}) {
      expect_refused(head + layer.page.key.scales + 6, bits, "key scale");
      expect_refused(head + layer.page.value.scales + 6, bits, "value scale");
      if (layer.shape.center_bits != 0) {
        expect_refused(memory + layer.page.center_scale_offset(turboquant::layout::Side::key, 0), bits, "centre scale");
        expect_refused(memory + layer.page.center_scale_offset(turboquant::layout::Side::value, 0), bits,
                       "centre scale");
      }
      if (layer.zero_points(turboquant::layout::Side::value) && bits != 0xbf80 && bits != 0x8000) {
        expect_refused(head + layer.page.value.zero_points + 6, bits, "zero point");
      }
    }
    // The numbers of the report are binary16; as bfloat16 they are finite, two beyond any row and two negative.
    for (const unsigned bits : {0x7c00U, 0x7e00U, 0xfc00U, 0xbc00U}) {
      expect_refused(head + layer.page.key.scales, bits, "key scale");
      expect_refused(head + layer.page.value.scales, bits, "value scale");
    }
    for (const auto& [kind, side] : {std::pair{SectionKind::first_rows, 0}, std::pair{SectionKind::tail_rows, 1}}) {
      const Section& rows = file.find(kind, l);
      for (const unsigned bits : {0x7f80U, 0x7fc0U, 0xff80U, 0x7f7fU}) {
        const Status status =
            file.load_bytes(file.forged(side == 0 ? rows.begin : rows.begin + rows.size - 2, bits, 2));
        EXPECT_TRUE(status == Status::corrupt_file);
        EXPECT_STREQ(status.field, side == 0 ? "raw key" : "raw value");
      }
    }
  }
}

TEST(FileDamage, S02AndS05AnotherConfigurationIsNamed) {
  using Cache = KVCache<turboquant::TQ4, turboquant::TQ3>;
  CacheConfig config = small_config();
  config.layers = {LayerShape{.kv_heads = 2, .head_dim = 96, .value_dim = 64, .window = 40}};
  Saved<Cache> file(config, 40);
  EXPECT_OK(file.load_bytes(file.bytes));
  const auto expect = [&file](const CacheConfig& other, const char* field, std::int64_t expected, std::int64_t found) {
    Cache cache(other);
    MemoryStream stream(file.bytes);
    SequenceId created;
    const Status status = load(cache, stream.source(), created);
    EXPECT_TRUE(status == Status::format_mismatch) << field;
    EXPECT_STREQ(status.field, field);
    EXPECT_EQ(status.expected, expected) << field;
    EXPECT_EQ(status.found, found) << field;
    EXPECT_TRUE(created == SequenceId{});
    EXPECT_EQ(cache.memory().page_bytes + cache.memory().tail_bytes, 0U);
  };
  const auto with = [&config](const std::function<void(CacheConfig&)>& change) {
    CacheConfig other = config;
    change(other);
    return other;
  };
  expect(with([](CacheConfig& c) { c.page_tokens = 32; }), "page_tokens", 32, 16);
  expect(with([](CacheConfig& c) { c.recent_tokens = 5; }), "recent_tokens", 5, 4);
  expect(with([](CacheConfig& c) { c.first_tokens = 0; }), "first_tokens", 0, 2);
  expect(with([](CacheConfig& c) { c.rollback_tokens = 3; }), "rollback_tokens", 3, 2);
  expect(with([](CacheConfig& c) { c.seed = 2; }), "seed", 2, 42);
  expect(with([](CacheConfig& c) { c.layers.push_back(c.layers[0]); }), "layers", 2, 1);
  expect(with([](CacheConfig& c) { c.layers[0].kv_heads = 1; }), "kv_heads", 1, 2);
  expect(with([](CacheConfig& c) { c.layers[0].head_dim = 128; }), "head_dim", 128, 96);
  expect(with([](CacheConfig& c) { c.layers[0].value_dim = 0; }), "value_dim", 96, 64);
  expect(with([](CacheConfig& c) { c.layers[0].window = 0; }), "window", 0, 40);
  expect(with([](CacheConfig& c) { c.layers[0].format = 1; }), "format", turboquant::TQ3::id, turboquant::TQ4::id);
  expect(with([](CacheConfig& c) { c.layers[0].center_bits = 0; }), "center_bits", 0, 8);

  // A codebook or a rotation that is not ours, all else equal.
  const std::size_t shape = file.find(SectionKind::shape).begin;
  for (const auto& [at, field] :
       {std::pair{shape + offset::codebook, "codebook"}, {shape + offset::rotation, "rotation"}}) {
    const Status status = file.load_bytes(file.forged(at, number_at(file.bytes, at) + 1));
    EXPECT_TRUE(status == Status::format_mismatch);
    EXPECT_STREQ(status.field, field);
    EXPECT_EQ(status.found, status.expected + 1);
  }
  const Status version = file.load_bytes(file.forged(offset::version, turboquant::kFileFormatVersion + 1, 4));
  EXPECT_TRUE(version == Status::format_mismatch);
  EXPECT_STREQ(version.field, "version");
  EXPECT_EQ(version.found, turboquant::kFileFormatVersion + 1);
}

TEST(FileDamage, CodebookHashesDifferAndArePinned) {
  // Reversed or collapsed levels are another codebook: the hash is over the numbers themselves, and it stays.
  using namespace turboquant;
  const std::uint64_t hashes[] = {detail::codebook_hash<PolarQuant<1>>(0),   detail::codebook_hash<PolarQuant<2>>(0),
                                  detail::codebook_hash<PolarQuant<3>>(0),   detail::codebook_hash<PolarQuant<4>>(0),
                                  detail::codebook_hash<PolarQuant<8>>(0),   detail::codebook_hash<ScalarQuant<2>>(0),
                                  detail::codebook_hash<ScalarQuant<3>>(0),  detail::codebook_hash<ScalarQuant<4>>(0),
                                  detail::codebook_hash<ScalarQuant<8>>(0),  detail::codebook_hash<TrellisQuant<2>>(0),
                                  detail::codebook_hash<TrellisQuant<3>>(0), detail::codebook_hash<TrellisQuant<4>>(0)};
  EXPECT_EQ(std::set<std::uint64_t>(std::begin(hashes), std::end(hashes)).size(), 12U);
  std::uint64_t levels = detail::mix_bits(PolarQuant<2>::id);
  for (const int level : {-100, -30, 30, 100})
    levels = detail::mix_bits(levels ^ static_cast<std::uint8_t>(static_cast<std::int8_t>(level)));
  EXPECT_EQ(hashes[1], levels);
}

TEST(FileDamage, LayersThatContradictThemselvesAreRefusedByName) {
  struct Forgery {
    std::size_t at;
    std::uint64_t number;
    const char* field;
  };
  const auto expect = [](Small& file, const Forgery& forgery) {
    const Status status =
        file.load_bytes(file.forged(file.find(SectionKind::layer).begin + forgery.at, forgery.number));
    EXPECT_TRUE(status == Status::corrupt_file) << forgery.field << ' ' << forgery.number;
    EXPECT_STREQ(status.field, forgery.field) << forgery.number;
  };
  // 24 tokens, 2 of them first ones: coded to 18, raw from 18 on.
  Small file(small_config());
  for (const Forgery& forgery : {Forgery{offset::layer_first, 3, "first"},
                                 {offset::layer_first, 1, "held_begin"},
                                 {offset::base, 1, "base"},
                                 {offset::base, 25, "base"},
                                 {offset::base, 4, "tail_begin"},
                                 {offset::tail_begin, 2, "tail_begin"},
                                 {offset::tail_begin, 17, "tail_begin"},
                                 {offset::tail_begin, 34, "tail_begin"},
                                 {offset::held_begin, 18, "held_begin"},
                                 {offset::dropped, 1, "dropped_entries"},
                                 {offset::pages, 0, "pages"},
                                 {offset::pages, 25, "pages"}})
    expect(file, forgery);
  EXPECT_STREQ(file.load_bytes(file.forged(offset::length, 1)).field, "tail_begin");
  // With a window, 60 tokens: three pages, all let go of.
  CacheConfig config = small_config();
  config.layers[0].window = 8;
  Small windowed(config, 60);
  for (const Forgery& forgery : {Forgery{offset::held_begin, 1, "held_begin"},
                                 {offset::held_begin, 49, "held_begin"},
                                 {offset::held_begin, 66, "held_begin"},
                                 {offset::dropped, 0, "dropped_entries"},
                                 {offset::dropped, 2, "dropped_entries"},
                                 {offset::dropped, turboquant::kMostTokens + 1, "dropped_entries"},
                                 {offset::held_begin, 34, "pages"}})
    expect(windowed, forgery);
  // A sequence of first tokens only has nothing else.
  Small first(small_config(), 2);
  for (const Forgery& forgery : {Forgery{offset::base, 3, "base"},
                                 {offset::tail_begin, 18, "tail_begin"},
                                 {offset::held_begin, 3, "held_begin"},
                                 {offset::dropped, 1, "dropped_entries"},
                                 {offset::pages, 1, "pages"}})
    expect(first, forgery);
}

TEST(FileDamage, S04LargeCountsStayLarge) {
  // A windowed sequence that has come 2^32 tokens further: no count is narrowed on the way.
  CacheConfig config = small_config();
  config.layers[0].window = 8;
  Small file(config, 60);
  constexpr std::size_t kFar = std::size_t{1} << 32;
  auto& state = CacheAccess::core(file.from).find(file.id)->layers[0];
  ASSERT_GT(state.dropped_entries, 0U);
  for (std::size_t* position : {&state.length, &state.base, &state.tail_begin, &state.held_begin}) *position += kFar;
  state.dropped_entries += kFar / config.page_tokens;
  for (auto& entry : state.entries) entry.begin += kFar;
  MemorySink sink;
  ASSERT_OK(save(file.from, file.id, sink.sink()));
  MemoryStream stream(sink.bytes);
  SequenceId copy;
  ASSERT_OK(load(file.to, stream.source(), copy));
  EXPECT_EQ(file.to.length(copy), kFar + 60);
  const Block query = gaussian_block(3, 1, 2, 32);
  EXPECT_TRUE(same_bits(attend_only(file.from, 0, file.id, query), attend_only(file.to, 0, copy, query)));
}

TEST(FileDamage, S04ASinkThatFailsAnywhere) {
  Small file(small_config());
  for (std::size_t room = 0; room < file.bytes.size(); ++room) {
    MemorySink sink;
    sink.limit = room;
    EXPECT_STATUS(io_error, save(file.from, file.id, sink.sink()));
    ASSERT_LE(sink.calls, file.sections.size());
    ASSERT_EQ(sink.bytes, Bytes(file.bytes.begin(), file.bytes.begin() + static_cast<std::ptrdiff_t>(room)));
    ASSERT_FALSE(file.load_bytes(sink.bytes) == Status::ok);
  }
  EXPECT_OK(file.load_bytes(file.bytes));  // the file saved before
  if (std::ofstream full("/dev/full", std::ios::binary); full) {
    EXPECT_STATUS(io_error, save(file.from, file.id, full));
  }
  EXPECT_STATUS(io_error, save(file.from, file.id, turboquant::ByteSink{}));
  SequenceId created;
  EXPECT_STATUS(io_error, load(file.to, turboquant::ByteSource{}, created));
}

TEST(FileDamage, S07SwappedBytesAreCalledByTheirName) {
  Small file(small_config());
  const auto swapped = [&file](std::size_t begin, std::size_t width) {
    Bytes bytes = file.bytes;
    for (std::size_t at = begin; at + width <= offset::header_end; at += width)
      std::reverse(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                   bytes.begin() + static_cast<std::ptrdiff_t>(at + width));
    return bytes;
  };
  for (const Bytes& bytes : {swapped(0, 8), swapped(8, 8), swapped(8, 4)}) {
    const Status status = file.load_bytes(bytes);
    EXPECT_TRUE(status == Status::format_mismatch);
    EXPECT_STREQ(status.field, "endianness");
  }
}

TEST(FileDamage, SectionsInAnotherOrderAreRefused) {
  Mixed file(mixed_config(), 70);
  std::vector<Section> pages;
  for (const Section& section : file.sections)
    if (section.kind == SectionKind::page && section.layer == 2) pages.push_back(section);
  ASSERT_GE(pages.size(), 2U);
  ASSERT_EQ(pages[0].size, pages[1].size);
  Bytes bytes = file.bytes;
  std::swap_ranges(bytes.begin() + static_cast<std::ptrdiff_t>(pages[0].begin),
                   bytes.begin() + static_cast<std::ptrdiff_t>(pages[0].begin + pages[0].size + 8),
                   bytes.begin() + static_cast<std::ptrdiff_t>(pages[1].begin));
  EXPECT_STATUS(corrupt_file, file.load_bytes(bytes));
}

TEST(FileDamage, PagesAreCheckedLikeSequences) {
  Small file(small_config(), 60);
  ASSERT_OK(file.from.seal(file.id));
  MemorySink sink;
  ASSERT_OK(save_page(file.from, file.id, 0, 20, sink.sink()));
  const Bytes bytes = sink.bytes;
  auto& cache = file.to;
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, gaussian_block(1, 2, 1, 32), gaussian_block(2, 2, 1, 32)));
  const turboquant::MemoryUse before = cache.memory();
  const auto load_bytes = [&](const Bytes& from) {
    MemoryStream stream(from);
    const Status status = load_page(cache, id, 0, stream.source());
    if (!(status == Status::ok)) {
      EXPECT_EQ(cache.length(id), 2U);
      EXPECT_EQ(cache.memory().page_bytes, before.page_bytes);
    }
    return status;
  };
  for (std::size_t count = 0; count < bytes.size(); ++count)
    ASSERT_TRUE(load_bytes(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count))) ==
                Status::corrupt_file);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    Bytes flipped = bytes;
    flipped[bit / 8] = static_cast<std::uint8_t>(flipped[bit / 8] ^ (1U << bit % 8));
    ASSERT_FALSE(load_bytes(flipped) == Status::ok) << bit;
  }
  const auto sections = page_sections(bytes);
  const auto& layer = CacheAccess::core(cache).layer(0);
  Bytes forged = bytes;
  set_number(forged, bytes.size() - 8 - layer.page.bytes + layer.page.head_offset(0) + layer.page.key.scales, 0x7fc0,
             2);
  seal_sections(forged, sections);
  EXPECT_STREQ(load_bytes(forged).field, "key scale");
  for (std::size_t room = 0; room < bytes.size(); ++room) {
    MemorySink full;
    full.limit = room;
    ASSERT_TRUE(save_page(file.from, file.id, 0, 20, full.sink()) == Status::io_error);
  }
  EXPECT_OK(load_bytes(bytes));
  EXPECT_GT(cache.length(id), 2U);
}

}  // namespace
