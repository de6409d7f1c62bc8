// libFuzzer target for load and load_page: any bytes are refused without a trace, or give a sequence that can be used.
// The first byte of an input says what is done with the rest: bit 0, give all sections the right checksums, so that the
// checks behind them are reached; bit 1, load a page instead of a sequence; bits 2 and 3, which cache.
#include <turboquant/turboquant.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cache/mixed_cache.hpp"
#include "cache/saved_file.hpp"
#include "fuzz/target.hpp"

namespace {

using namespace tests;
using fuzz::require;
using turboquant::CacheConfig;
using turboquant::SequenceId;
using turboquant::Status;

CacheConfig config_of(unsigned which) {
  CacheConfig config = mixed_config();
  if ((which & 1U) != 0) config.layers.resize(1);
  if ((which & 2U) != 0) config.first_tokens = config.recent_tokens = config.rollback_tokens = 0;
  return config;
}

MixedCache& cache_of(unsigned which) {
  static MixedCache caches[] = {MixedCache(config_of(0)), MixedCache(config_of(1)), MixedCache(config_of(2)),
                                MixedCache(config_of(3))};
  return caches[which];
}

/// Whatever got in: read it, attend to it, go on with it, save it again.
void use(MixedCache& cache, SequenceId id) {
  const std::size_t length = cache.length(id);
  for (std::size_t l = 0; l < cache.config().layers.size(); ++l) {
    const turboquant::LayerShape& shape = cache.config().layers[l];
    (void)attend_only(cache, l, id, Block(1, 2 * shape.kv_heads, shape.head_dim, 0.5F));
    Block keys, values;
    (void)read_rows(cache, id, l, length - std::min<std::size_t>(length, 40), length, keys, values);
  }
  MemorySink file, again;
  if (!(save(cache, id, file.sink()) == Status::ok)) return;  // layers of unequal length
  MemoryStream stream(file.bytes);
  SequenceId copy;
  require(load(cache, stream.source(), copy) == Status::ok, "what was saved is refused");
  require(save(cache, copy, again.sink()) == Status::ok && file.bytes == again.bytes, "the copy differs");
  if (length < (std::size_t{1} << 47)) {
    for (std::size_t l = 0; l < cache.config().layers.size(); ++l) {
      const turboquant::LayerShape& shape = cache.config().layers[l];
      const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
      (void)append_only(cache, l, copy, Block(20, shape.kv_heads, shape.head_dim, 1),
                        Block(20, shape.kv_heads, value_dim, 1));
    }
  }
  (void)cache.truncate(copy, length / 2);
  (void)cache.seal(copy);
  cache.release(copy);
}

/// Sequences of some lengths, sealed ones, and pages.
void write_seeds(fuzz::Seeds& seeds) {
  const auto write = [&](unsigned flags, const Bytes& bytes) {
    seeds.write(static_cast<char>(flags) + std::string(bytes.begin(), bytes.end()));
  };
  for (unsigned which = 0; which < 4; ++which) {
    MixedCache cache(config_of(which));
    for (const std::size_t tokens : {0U, 2U, 30U, 75U}) {
      const SequenceId id = new_sequence(cache);
      if (tokens > 0) (void)append_all(cache, id, tokens, tokens);
      MemorySink file, sealed, page;
      require(save(cache, id, file.sink()) == Status::ok, "a seed is refused");
      for (const unsigned flags : {0U, 1U}) write(which << 2 | flags, file.bytes);
      if (tokens < 30 || !(cache.seal(id) == Status::ok)) continue;
      require(save(cache, id, sealed.sink()) == Status::ok, "a seed is refused");
      write(which << 2 | 1U, sealed.bytes);
      if (save_page(cache, id, 0, 20, page.sink()) == Status::ok) write(which << 2 | 3U, page.bytes);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (fuzz::Seeds seeds(*argc, *argv); seeds) write_seeds(seeds);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const unsigned flags = data[0];
  MixedCache& cache = cache_of(flags >> 2 & 3U);
  Bytes bytes(data + 1, data + size);
  const turboquant::MemoryUse before = cache.memory();
  SequenceId id;
  if ((flags & 2U) == 0) {
    if ((flags & 1U) != 0) seal_sections(bytes, cache);
    MemoryStream stream(bytes);
    const SequenceId none;
    const Status status = load(cache, stream.source(), id);
    require((status == Status::ok) == !(id == none), "created and status disagree");
    if (status == Status::ok) use(cache, id);
  } else {
    if ((flags & 1U) != 0) seal_sections(bytes, page_sections(bytes));
    id = new_sequence(cache);
    const std::size_t first = cache.config().first_tokens;
    if (first > 0) (void)append_all(cache, id, 1, first);
    MemoryStream stream(bytes);
    if (load_page(cache, id, 0, stream.source()) == Status::ok) use(cache, id);
  }
  cache.release(id);
  const turboquant::MemoryUse after = cache.memory();
  require(before.page_bytes == after.page_bytes && before.tail_bytes == after.tail_bytes, "blocks were lost");
  return 0;
}
