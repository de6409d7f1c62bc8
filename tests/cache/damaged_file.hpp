// A saved sequence to damage, and a cache that must not notice anything when it refuses what became of it.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/block.hpp"
#include "cache/mixed_cache.hpp"
#include "cache/saved_file.hpp"

namespace tests {

/// A layer small enough to flip every bit: one head, 32 coordinates, 24 tokens, one page.
inline turboquant::CacheConfig small_config() {
  turboquant::CacheConfig config;
  config.layers = {turboquant::LayerShape{.kv_heads = 1, .head_dim = 32}};
  config.page_tokens = 16;
  config.recent_tokens = 4;
  config.rollback_tokens = 2;
  config.first_tokens = 2;
  return config;
}

/// A file and the cache that it was saved from, with a second one to load into and a sequence there that must not
/// notice anything.
template <class Cache>
struct Saved {
  Cache from, to;
  turboquant::SequenceId id, bystander;
  Bytes bytes;
  std::vector<Section> sections;

  explicit Saved(const turboquant::CacheConfig& config, std::size_t tokens = 24)
      : from(config), to(config), id(new_sequence(from)), bystander(new_sequence(to)) {
    (void)append_all(from, id, 1, tokens);
    (void)append_all(to, bystander, 50, 60);  // so that the pool has a slab of every class
    MemorySink file;
    EXPECT_OK(save(from, id, file.sink()));
    bytes = file.bytes;
    sections = sections_of(bytes, turboquant::detail::CacheAccess::core(from));
    EXPECT_EQ(sections.back().begin + sections.back().size + 8, bytes.size());
  }

  turboquant::Status load_bytes(const Bytes& from_bytes, std::size_t padding = 0) {
    MemoryStream stream(from_bytes);
    stream.padding = padding;
    return load_stream(stream);
  }
  /// Loads; what is refused must leave no trace, what is accepted is released again.
  turboquant::Status load_stream(MemoryStream& stream) {
    const turboquant::MemoryUse before = to.memory();
    const turboquant::SequenceId mark{123456, 7};
    turboquant::SequenceId created = mark;
    const turboquant::Status status = load(to, stream.source(), created);
    EXPECT_EQ(status == turboquant::Status::ok, !(created == mark));
    if (status == turboquant::Status::ok) {
      exercise(created);
      to.release(created);
    }
    const turboquant::MemoryUse after = to.memory();
    EXPECT_EQ(before.page_bytes, after.page_bytes);
    EXPECT_EQ(before.tail_bytes, after.tail_bytes);
    EXPECT_EQ(to.length(bystander), 60U);
    return status;
  }
  /// A sequence that was let in can be used, whatever it says.
  void exercise(turboquant::SequenceId created) {
    for (std::size_t l = 0; l < to.config().layers.size(); ++l) {
      const turboquant::LayerShape& shape = to.config().layers[l];
      (void)attend_only(to, l, created, gaussian_block(1, 1, 2 * shape.kv_heads, shape.head_dim));
    }
    MemorySink again;
    (void)save(to, created, again.sink());
  }
  /// The file with one number replaced and all checksums right.
  Bytes forged(std::size_t at, std::uint64_t number, std::size_t count = 8) const {
    Bytes copy = bytes;
    set_number(copy, at, number, count);
    seal_sections(copy, sections);
    return copy;
  }
  const Section& find(SectionKind kind, std::size_t layer = 0) const {
    for (const Section& section : sections)
      if (section.kind == kind && section.layer == layer) return section;
    ADD_FAILURE() << "no such section";
    return sections.front();
  }
};

using Small = Saved<turboquant::KVCache<turboquant::TQ4>>;
using Mixed = Saved<MixedCache>;

}  // namespace tests
