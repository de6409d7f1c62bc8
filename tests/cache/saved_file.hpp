// Saved bytes in memory: sinks and sources for them, and where the sections of a file lie, to patch them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <turboquant/turboquant.hpp>
#include <vector>

#include "cache/block.hpp"

namespace tests {

using Bytes = std::vector<std::uint8_t>;

/// A sink that takes at most `limit` bytes.
struct MemorySink {
  Bytes bytes;
  std::size_t limit = static_cast<std::size_t>(-1), calls = 0;

  turboquant::ByteSink sink() {
    return {this, [](void* context, const void* from, std::size_t count) {
              auto& self = *static_cast<MemorySink*>(context);
              ++self.calls;
              const auto* begin = static_cast<const std::uint8_t*>(from);
              const std::size_t room = std::min(count, self.limit - self.bytes.size());
              self.bytes.insert(self.bytes.end(), begin, begin + room);
              return room == count;
            }};
  }
};

/// A source that hands out `bytes`, then `padding` zeros.
struct MemoryStream {
  const std::uint8_t* bytes;
  std::size_t size, padding = 0, read = 0;

  explicit MemoryStream(const Bytes& from) : bytes(from.data()), size(from.size()) {}
  MemoryStream(const std::uint8_t* from, std::size_t count) : bytes(from), size(count) {}

  turboquant::ByteSource source() {
    return {this, [](void* context, void* to, std::size_t count) {
              auto& self = *static_cast<MemoryStream*>(context);
              const std::size_t got = std::min(count, self.size + self.padding - self.read);
              const std::size_t real = std::min(got, self.size - std::min(self.size, self.read));
              if (real > 0) std::memcpy(to, self.bytes + self.read, real);
              if (got > real) std::memset(static_cast<std::uint8_t*>(to) + real, 0, got - real);
              self.read += got;
              return got;
            }};
  }
};

inline std::uint64_t number_at(const Bytes& bytes, std::size_t at, std::size_t count = 8) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < count; ++i) number |= std::uint64_t{bytes[at + i]} << 8 * i;
  return number;
}
inline void set_number(Bytes& bytes, std::size_t at, std::uint64_t number, std::size_t count = 8) {
  for (std::size_t i = 0; i < count; ++i) bytes[at + i] = static_cast<std::uint8_t>(number >> 8 * i);
}

/// The whole sequence as bytes.
template <class Cache>
Bytes saved(const Cache& cache, turboquant::SequenceId id) {
  MemorySink file;
  EXPECT_OK(save(cache, id, file.sink()));
  return file.bytes;
}
/// The sequence of such bytes, all of which are read.
template <class Cache>
turboquant::SequenceId loaded(Cache& cache, const Bytes& bytes) {
  MemoryStream stream(bytes);
  turboquant::SequenceId id;
  EXPECT_OK(load(cache, stream.source(), id));
  EXPECT_EQ(stream.read, bytes.size());
  return id;
}

enum class SectionKind { header, shape, layer, first_rows, tail_rows, spans, page };
struct Section {
  SectionKind kind;
  std::size_t layer, begin, size;  // size: without the checksum
};

/// Offsets in the header, in a shape section and in a layer section, as docs/file-format.md has them.
namespace offset {
inline constexpr std::size_t mark = 8, version = 12, page_tokens = 16, recent = 24, first = 32, rollback = 40,
                             seed = 48, layers = 56, length = 64, header_end = 72;
inline constexpr std::size_t kv_heads = 0, head_dim = 8, value_dim = 16, format = 24, center_bits = 32, codebook = 40,
                             rotation = 48, window = 56, shape_end = 64;
inline constexpr std::size_t layer_first = 0, base = 8, tail_begin = 16, held_begin = 24, dropped = 32, pages = 40,
                             layer_end = 48;
}  // namespace offset

/// The sections of a saved sequence, read from the description of the format. Stops where the bytes end.
inline std::vector<Section> sections_of(const Bytes& bytes, const turboquant::detail::CacheCore& core) {
  std::vector<Section> sections;
  std::size_t at = 0;
  const auto add = [&](SectionKind kind, std::size_t layer, std::size_t size) {
    if (bytes.size() - at < 8 || size > bytes.size() - at - 8) return false;
    sections.push_back({kind, layer, at, size});
    at += size + 8;
    return true;
  };
  if (!add(SectionKind::header, 0, offset::header_end)) return sections;
  const std::uint64_t length = number_at(bytes, offset::length);
  for (std::size_t l = 0; l < core.layer_count(); ++l)
    if (!add(SectionKind::shape, l, offset::shape_end)) return sections;
  for (std::size_t l = 0; l < core.layer_count(); ++l) {
    const turboquant::LayerShape& shape = core.layer(l).shape;
    const std::size_t numbers = at, row = shape.kv_heads * 2 * (std::size_t{shape.head_dim} + shape.value_dim);
    if (!add(SectionKind::layer, l, offset::layer_end)) return sections;
    const auto rows = [&](SectionKind kind, std::uint64_t count) {
      for (std::uint64_t begin = 0; begin < count; begin += 16)
        if (!add(kind, l, row * std::min<std::uint64_t>(16, count - begin))) return false;
      return true;
    };
    const std::uint64_t tail_begin = number_at(bytes, numbers + offset::tail_begin);
    if (!rows(SectionKind::first_rows, std::min(length, number_at(bytes, numbers + offset::layer_first))))
      return sections;
    if (!rows(SectionKind::tail_rows, length > tail_begin ? length - tail_begin : 0)) return sections;
    const std::uint64_t pages = number_at(bytes, numbers + offset::pages);
    for (std::uint64_t i = 0; i < pages; ++i) {
      if (bytes.size() - at < 4) return sections;
      const std::uint64_t spans = number_at(bytes, at, 4);
      if (!add(SectionKind::spans, l, 4 + 8 * spans) || !add(SectionKind::page, l, core.layer(l).page.bytes))
        return sections;
    }
  }
  return sections;
}

/// Gives every section the checksum of what it holds now.
inline void seal_sections(Bytes& bytes, const std::vector<Section>& sections) {
  std::uint64_t chain = 0;
  for (const Section& section : sections) {
    chain = turboquant::detail::checksum(bytes.data() + section.begin, section.size, chain);
    set_number(bytes, section.begin + section.size, chain);
  }
}

template <class Cache>
void seal_sections(Bytes& bytes, const Cache& cache) {
  seal_sections(bytes, sections_of(bytes, turboquant::detail::CacheAccess::core(cache)));
}

/// The sections of a saved page.
inline std::vector<Section> page_sections(const Bytes& bytes) {
  constexpr std::size_t kHeader = 16 + 9 * 8;
  if (bytes.size() < kHeader + 36) return {};
  return {{SectionKind::header, 0, 0, kHeader},
          {SectionKind::spans, 0, kHeader + 8, 12},
          {SectionKind::page, 0, kHeader + 28, bytes.size() - kHeader - 36}};
}

}  // namespace tests
