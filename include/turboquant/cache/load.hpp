// Loading a saved sequence, or a single page, from a byte source that nobody vouches for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <turboquant/cache/byte_stream.hpp>
#include <turboquant/cache/file_format.hpp>
#include <turboquant/cache/kv_cache.hpp>

namespace turboquant {
namespace detail {

// A sequence that is not in the table yet; whatever happens, its blocks find their way back.
class Draft {
 public:
  explicit Draft(CacheCore& core) noexcept : core_(core), sequence_(core.make_sequence()) {}
  ~Draft() {
    if (sequence_ != nullptr) core_.destroy(sequence_);
  }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  explicit operator bool() const noexcept { return sequence_ != nullptr; }
  LayerState& layer(std::size_t index) noexcept { return sequence_->layers[index]; }
  Status adopt(SequenceId& created) noexcept {
    Sequence* sequence = sequence_;
    sequence_ = nullptr;
    return core_.adopt(sequence, created);
  }

 private:
  CacheCore& core_;
  Sequence* sequence_;
};

// Magic, byte order and version come first: they say how to read the rest.
inline Status read_preamble(const Magic& magic, SectionReader& in) {
  in.begin("header");
  if (const Status status = in.take(kPreambleBytes); status.code != Status::ok) return status;
  const std::uint8_t* found = in.rest();
  if (!std::equal(magic.begin(), magic.end(), found)) {
    if (std::equal(magic.rbegin(), magic.rend(), found)) {
      return {Status::format_mismatch, "endianness", kEndianMark, 0x04030201};
    }
    return {Status::format_mismatch, "magic", static_cast<std::int64_t>(word_at(magic.data())),
            static_cast<std::int64_t>(word_at(found))};
  }
  (void)in.number();
  const auto mark = static_cast<std::uint32_t>(in.number(4)), version = static_cast<std::uint32_t>(in.number(4));
  if (mark != kEndianMark) return {Status::format_mismatch, "endianness", kEndianMark, mark};
  if (version != kFileFormatVersion) return {Status::format_mismatch, "version", kFileFormatVersion, version};
  return {};
}

// A visitor for describe_...: compares each number with the next one of the section. The first difference sticks.
class Comparison {
 public:
  explicit Comparison(SectionReader& in) noexcept : in_(in) {}
  void operator()(const char* name, std::uint64_t expected) noexcept {
    const std::uint64_t found = in_.number();
    if (found != expected && status_.code == Status::ok) {
      status_ = {Status::format_mismatch, name, static_cast<std::int64_t>(expected), static_cast<std::int64_t>(found)};
    }
  }
  const Status& status() const noexcept { return status_; }

 private:
  SectionReader& in_;
  Status status_;
};

inline Status take_section(std::size_t count, SectionReader& in) {
  const Status status = in.take(count);
  return status.code == Status::ok ? in.end() : status;
}

// A new block of the class at the end of `blocks`, or null.
inline Block* add_block(CacheCore& core, unsigned size_class, Array<Block*>& blocks) noexcept {
  Block* block = core.pool().acquire(size_class);
  if (block != nullptr && !blocks.push_back(block)) {
    core.pool().release(block);
    return nullptr;
  }
  return block;
}

// Reads `tokens` raw rows into tiles. A tile is taken when its rows have arrived and are what rows may be.
inline Status load_tiles(CacheCore& core, const Layer& layer, std::size_t tokens, Array<Block*>& tiles,
                         SectionReader& in) {
  const std::size_t heads = layer.shape.kv_heads;
  for (std::size_t begin = 0; begin < tokens; begin += 16) {
    const std::size_t count = (std::min)(tokens - begin, std::size_t{16});
    in.begin("raw rows");
    const Status status = take_section(layer.tile_bytes() / 16 * count, in);
    if (status.code != Status::ok) return status;
    const std::uint8_t* from = in.rest();
    for (const Side side : {Side::key, Side::value}) {
      const ConstRows rows(from, DType::bf16, heads * count, 1, layer.dim(side));
      for (std::size_t row = 0; row < rows.tokens; ++row) {
        if (!is_storable_row(rows, row, 0)) return in.damaged(side == Side::key ? "raw key" : "raw value");
      }
      from += rows.tokens * rows.dim * sizeof(bfloat16);
    }
    Block* tile = add_block(core, layer.tile_class, tiles);
    if (tile == nullptr) return {Status::out_of_memory, "tiles"};
    from = in.rest();
    for (const Side side : {Side::key, Side::value}) {
      const std::size_t bytes = count * layer.dim(side) * sizeof(bfloat16);
      for (std::size_t head = 0; head < heads; ++head, from += bytes) {
        std::memcpy(layer.tile_row(tile, side, head, 0), from, bytes);
      }
    }
  }
  return {};
}

// One page, checked but for where its tokens lie in the sequence, and its block until somebody takes it over.
class PageRead {
 public:
  explicit PageRead(PagePool& pool) noexcept : pool_(pool) {}
  ~PageRead() {
    if (block_ != nullptr) pool_.release(block_);
  }
  PageRead(const PageRead&) = delete;
  PageRead& operator=(const PageRead&) = delete;

  std::span<const Span> spans() const noexcept { return {spans_, span_count_}; }

  // Reads the two sections of a page. `in_place`: straight into a block, which is taken before the page has arrived.
  Status read(const Layer& layer, SectionReader& in, bool in_place) {
    in.begin("page spans");
    const std::size_t page_tokens = layer.page_shape.tokens;
    if (const Status status = in.take(4); status.code != Status::ok) return status;
    const std::uint64_t count = in.number(4);
    if (count == 0 || count > page_tokens) return in.damaged("page spans");
    if (const Status status = in.take(8 * count); status.code != Status::ok) return status;
    if (const Status status = in.end(); status.code != Status::ok) return status;
    span_count_ = count;
    std::uint64_t end = 0;
    for (std::size_t s = 0; s < count; ++s) {
      const std::uint64_t first = in.number(4), tokens = in.number(4);
      if (first < end || tokens == 0 || first + tokens > page_tokens) return in.damaged("page spans");
      spans_[s] = {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(tokens)};
      end = first + tokens;
    }
    in.begin("page");
    if (!in_place) {
      if (const Status status = in.take(layer.page.bytes); status.code != Status::ok) return status;
      if (const Status status = in.end(); status.code != Status::ok) return status;
    }
    block_ = pool_.acquire(layer.page_class);
    if (block_ == nullptr) return {Status::out_of_memory, "pages"};
    auto* to = reinterpret_cast<std::uint8_t*>(block_->memory);
    if (in_place) {
      if (const Status status = in.take_to(to, layer.page.bytes); status.code != Status::ok) return status;
    } else {
      std::memcpy(to, in.rest(), layer.page.bytes);
    }
    const char* bad = find_bad_number(layer, block_->memory);
    return bad != nullptr ? in.damaged(bad) : Status{};
  }

  // Moves the page behind the codes of a layer, one entry per span. Nothing has changed if there is no memory.
  Status append_to(LayerState& state) noexcept {
    if (!state.entries.reserve_more(span_count_)) return {Status::out_of_memory, "entries"};
    for (std::size_t s = 0; s < span_count_; ++s) {
      if (s > 0) block_->retain();
      (void)state.entries.push_back(Entry{block_, state.coded_end(), spans_[s].first, spans_[s].count});
    }
    block_ = nullptr;
    return {};
  }

 private:
  PagePool& pool_;
  Block* block_ = nullptr;
  Span spans_[layout::kMaxPageTokens];
  std::size_t span_count_ = 0;
};

inline Status load_layer(CacheCore& core, std::size_t index, std::size_t length, LayerState& state, SectionReader& in) {
  const Layer& layer = core.layer(index);
  const CodingRule& rule = core.rule();
  in.begin("layer");
  if (const Status status = take_section(8 * kLayerNumbers, in); status.code != Status::ok) return status;
  LayerNumbers numbers{};
  for (std::uint64_t* number : {&numbers.first, &numbers.base, &numbers.tail_begin, &numbers.held_begin,
                                &numbers.dropped_entries, &numbers.pages}) {
    *number = in.number();
  }
  if (const char* bad = find_bad_layer(core, layer, length, numbers); bad != nullptr) return in.damaged(bad);
  const std::size_t base = numbers.base, tail_begin = numbers.tail_begin;
  Status status = load_tiles(core, layer, (std::min)(length, std::size_t{numbers.first}), state.first_tiles, in);
  if (status.code == Status::ok) {
    status = load_tiles(core, layer, saturating_subtract(length, tail_begin), state.tail, in);
  }
  if (status.code != Status::ok) return status;
  state.held_begin = numbers.held_begin;
  const std::size_t coded_end =
      length > numbers.first ? coded_end_of(rule, base, state.held_begin, length) : state.held_begin;
  for (std::uint64_t i = 0; i < numbers.pages; ++i) {
    PageRead page(core.pool());
    status = page.read(layer, in, i > 0);
    if (status.code != Status::ok) return status;
    std::size_t begin = state.coded_end();
    for (const Span& span : page.spans()) {
      // Behind the base there are whole pages only, each its own.
      const bool whole = span.first == 0 && span.count == rule.page_tokens && (begin - base) % rule.page_tokens == 0;
      if (begin >= base ? !whole : begin + span.count > base) return in.damaged("page spans");
      begin += span.count;
    }
    if (begin > coded_end) return in.damaged("page spans");
    status = page.append_to(state);
    if (status.code != Status::ok) return status;
  }
  if (state.coded_end() != coded_end) return in.damaged("pages");
  state.length = length;
  state.first = numbers.first;
  state.base = base;
  state.tail_begin = tail_begin;
  state.dropped_entries = numbers.dropped_entries;
  return {};
}

inline Status load(CacheCore& core, const ByteSource& source, SequenceId& created) {
  if (const Status status = check_byte_order(); status.code != Status::ok) return status;
  SectionReader in(source);
  if (const Status status = read_preamble(kSequenceMagic, in); status.code != Status::ok) return status;
  constexpr std::size_t kCacheFields = 6;
  if (const Status status = take_section(8 * (kCacheFields + 1), in); status.code != Status::ok) return status;
  Comparison compare(in);
  describe_cache(core, compare);
  if (compare.status().code != Status::ok) return compare.status();
  const std::uint64_t length = in.number();
  if (length > kMostTokens) return in.damaged("length");
  for (std::size_t l = 0; l < core.layer_count(); ++l) {
    in.begin("layer shape");
    if (const Status status = take_section(8 * (kLayerFields + 1), in); status.code != Status::ok) return status;
    describe_layer(core.layer(l), compare);
    compare("window", core.layer(l).shape.window);
    if (compare.status().code != Status::ok) return compare.status();
  }
  Draft draft(core);
  if (!draft) return {Status::out_of_memory, "sequence"};
  for (std::size_t l = 0; l < core.layer_count(); ++l) {
    const Status status = load_layer(core, l, length, draft.layer(l), in);
    if (status.code != Status::ok) return status;
  }
  return draft.adopt(created);
}

inline Status load_page(CacheCore& core, SequenceId id, std::size_t index, const ByteSource& source) {
  if (const Status status = check_byte_order(); status.code != Status::ok) return status;
  Sequence* sequence = nullptr;
  if (const Status status = core.mutable_sequence(id, sequence); status.code != Status::ok) return status;
  if (index >= core.layer_count()) {
    return {Status::bad_layer, "layer", CacheCore::as_signed(core.layer_count()), CacheCore::as_signed(index)};
  }
  const Layer& layer = core.layer(index);
  LayerState& state = sequence->layers[index];
  const std::size_t first = state.first;
  if (state.length < first) return CacheCore::bad_shape("first_tokens", first, state.length);
  if (state.length != state.coded_end()) return CacheCore::bad_shape("raw rows", state.coded_end(), state.length);
  SectionReader in(source);
  if (const Status status = read_preamble(kPageMagic, in); status.code != Status::ok) return status;
  if (const Status status = take_section(8 * (2 + kLayerFields), in); status.code != Status::ok) return status;
  Comparison compare(in);
  compare("page_tokens", core.config().page_tokens);
  compare("seed", core.config().seed);
  describe_layer(layer, compare);
  if (compare.status().code != Status::ok) return compare.status();
  PageRead page(core.pool());
  if (const Status status = page.read(layer, in, false); status.code != Status::ok) return status;
  if (page.spans().size() != 1) return in.damaged("page spans");
  if (state.length > kMostTokens - page.spans()[0].count) {
    return CacheCore::bad_shape("length", kMostTokens, state.length);
  }
  if (const Status status = page.append_to(state); status.code != Status::ok) return status;
  for (Block* tile : state.tail) core.recycle(*sequence, state, layer.tile_class, tile);
  state.tail.clear();
  state.length = state.base = state.tail_begin = state.coded_end();
  core.free_behind_window(layer, state);
  core.settle_reserve(*sequence);
  core.account(*sequence);
  return {};
}

}  // namespace detail

/// Makes a new sequence of a saved one. It continues like the original, bit for bit; reserve() is not part of it. Bytes
/// from anywhere are safe: each section is checked against its checksum before it is used, its numbers as well, and
/// memory is taken as bytes arrive, whatever the file announces. Reads exactly the saved bytes: what follows in the
/// source is left to the caller. On failure nothing changes, and `created` neither. Errors: format_mismatch (saved by
/// another configuration, format or version; `field` is the one that differs), corrupt_file (damaged or cut off;
/// `field` is the place, `found` the byte), out_of_memory, io_error (no source).
template <class... F>
Status load(KVCache<F...>& cache, ByteSource source, SequenceId& created) {
  return detail::load(detail::CacheAccess::core(cache), source, created);
}

/// Appends the tokens of a saved page to one layer, as codes; page counting starts anew behind them. The layer must
/// have its first_tokens and no raw rows behind them that are not coded too: a new sequence, or one that was sealed.
/// Other layers do not change; until they get as many tokens, layers are of unequal length. On failure nothing changes.
/// Errors: unknown_sequence, bad_layer, bad_shape (raw rows), out_of_memory, and those of `load`.
template <class... F>
Status load_page(KVCache<F...>& cache, SequenceId sequence, std::size_t layer, ByteSource source) {
  return detail::load_page(detail::CacheAccess::core(cache), sequence, layer, source);
}

}  // namespace turboquant
