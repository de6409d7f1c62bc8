// The format of saved sequences and pages, as far as writer and reader share it; docs/file-format.md has it byte by
// byte.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/cache/cache_core.hpp>
#include <turboquant/core/random.hpp>
#include <turboquant/version.hpp>

namespace turboquant::detail {

using Magic = std::array<std::uint8_t, 8>;

// A byte that no text begins with, then what a transfer in text mode would change.
inline constexpr Magic kSequenceMagic{0x93, 'T', 'Q', 'K', 'V', '\r', '\n', 0x1a};
inline constexpr Magic kPageMagic{0x93, 'T', 'Q', 'P', 'G', '\r', '\n', 0x1a};
inline constexpr std::uint32_t kEndianMark = 0x01020304;
inline constexpr std::size_t kPreambleBytes = 16;  // magic, endian mark, version

// Rows and scales lie in files as in memory, and there they are in the machine's order.
inline Status check_byte_order() noexcept {
  if constexpr (std::endian::native == std::endian::little) {
    return {};
  } else {
    return {Status::format_mismatch, "endianness", kEndianMark, 0x04030201};
  }
}

// visit(name, number) for all that must agree between the cache that saved a sequence and the one that loads it.
template <class Visit>
void describe_cache(const CacheCore& core, Visit&& visit) {
  const CacheConfig& config = core.config();
  visit("page_tokens", config.page_tokens);
  visit("recent_tokens", config.recent_tokens);
  visit("first_tokens", config.first_tokens);
  visit("rollback_tokens", config.rollback_tokens);
  visit("seed", config.seed);
  visit("layers", core.layer_count());
}

// The signs of both rotations: a generator that has drifted is found by what it makes, not by its name.
inline std::uint64_t rotation_hash(const Layer& layer) noexcept {
  std::uint64_t hash = 0;
  for (const RotationView& rotation : {layer.key_rotation, layer.value_rotation}) {
    for (std::size_t i = 0; i < rotation.dim; ++i) hash = mix_bits(hash ^ (rotation.signs[i] < 0 ? 1u : 2u));
  }
  return hash;
}

// All that gives the bytes of a page their meaning, page_tokens excepted.
inline constexpr std::size_t kLayerFields = 7;
template <class Visit>
void describe_layer(const Layer& layer, Visit&& visit) {
  visit("kv_heads", layer.shape.kv_heads);
  visit("head_dim", layer.shape.head_dim);
  visit("value_dim", layer.shape.value_dim);
  visit("format", layer.operations->format_id);
  visit("center_bits", layer.shape.center_bits);
  visit("codebook", layer.operations->codebook);
  visit("rotation", rotation_hash(layer));
}

// `count` tokens of a page, from its token `first` on.
struct Span {
  std::uint32_t first, count;
};

// One side of one head of a page that lies at `memory`.
struct SidePlace {
  std::byte* scales;
  std::byte* zero_points;  // null without
  std::byte* fragments;
};
inline SidePlace side_place(const Layer& layer, std::byte* memory, Side side, std::size_t head) noexcept {
  const layout::SideLayout& at = side == Side::key ? layer.page.key : layer.page.value;
  std::byte* begin = memory + layer.page.head_offset(head);
  return {begin + at.scales, layer.zero_points(side) ? begin + at.zero_points : nullptr, begin + at.fragments};
}

// Zeroes the codes of one token of one side. Not for codes that others continue.
inline void clear_codes(const Layer& layer, Side side, std::size_t token, std::byte* fragments) noexcept {
  const Operations& ops = *layer.operations;
  const unsigned bits = side == Side::key ? ops.key_bits : ops.value_bits;
  const std::size_t tiles = layer.page_shape.tokens / 16, groups = layer.dim(side) / 16, tile = token / 16;
  const auto clear = [](std::byte* fragment, const layout::CodeField& field) {
    fragment[field.byte] &= static_cast<std::byte>(~(((1u << field.count) - 1) << field.shift));
  };
  for (std::size_t group = 0; group < groups; ++group) {
    const std::size_t index = side == Side::key ? tile * groups + group : group * tiles + tile;
    std::byte* fragment = fragments + index * layout::fragment_bytes(bits);
    if (side == Side::key && ops.key_has_memory) {
      for (std::size_t plane = 0; plane < 2 * bits; ++plane) fragment[plane * 16 + token % 16] = std::byte{0};
      continue;
    }
    for (std::size_t c = 0; c < 16; ++c) {
      const std::size_t position = layout::code_position(side, token % 16, c);
      clear(fragment, layout::low_field(bits, position));
      if (bits == 3) clear(fragment, layout::high_field(position));
    }
  }
}

// Takes out of a copied page what belongs to none of the spans: scales, zero points and codes become zero. Codes of
// values that later ones continue stay, with scale zero.
inline void clear_dead_tokens(const Layer& layer, const Span* spans, std::size_t count, std::byte* memory) noexcept {
  std::array<bool, layout::kMaxPageTokens> live{};
  for (std::size_t s = 0; s < count; ++s) std::fill_n(live.begin() + spans[s].first, spans[s].count, true);
  for (std::size_t head = 0; head < layer.shape.kv_heads; ++head) {
    for (const Side side : {Side::key, Side::value}) {
      const SidePlace place = side_place(layer, memory, side, head);
      const bool keep_codes = side == Side::value && layer.operations->value_has_memory;
      for (std::size_t t = 0; t < layer.page_shape.tokens; ++t) {
        if (live[t]) continue;
        std::memset(place.scales + 2 * t, 0, 2);
        if (place.zero_points != nullptr) std::memset(place.zero_points + 2 * t, 0, 2);
        if (!keep_codes) clear_codes(layer, side, t, place.fragments);
      }
    }
  }
}

// Bounds for the numbers of a page. Rows are at most 2^96, so that a rotated coordinate is at most sqrt(1024) 2^96 =
// 2^101, one of a centre too, their difference 2^102. From there, with room for rounding:
//   centre scale              2^101 / (2^(bits - 1) - 1)
//   key scale, unbiased       |x|^2 / <x, c> <= |x| / smallest level <= 2 sqrt(1024) 2^96
//   value scale               |x| / |c| <= 2 sqrt(d) 2^96 / sqrt(d)
//   value scale, zero point   2^103 / (2^B - 1), 2^102
// Below them no logit overflows, 2^103 * 1024 * 127 * max |q| / 127 <= 2^127 with |q| <= 2^7 rotated, and a decoded
// value is below 2^106: attention over 2^21 such tokens does not overflow either.
struct PageBounds {
  std::uint16_t center_scale, key_scale, value_scale, zero_point;  // as bfloat16 bits

  static constexpr std::uint16_t power_of_two(unsigned e) { return static_cast<std::uint16_t>((e + 127) << 7); }
  explicit PageBounds(const Layer& layer) noexcept
      : center_scale(power_of_two(104u - layer.shape.center_bits)),
        key_scale(power_of_two(103)),
        value_scale(power_of_two(layer.zero_points(Side::value) ? 104u - layer.operations->value_bits : 98u)),
        zero_point(power_of_two(103)) {}
};

// The largest of `count` bfloat16 bit patterns under a mask. With all bits, negative numbers are above all others.
inline std::uint16_t largest_bits(const std::byte* numbers, std::size_t count, std::uint16_t mask) noexcept {
  std::uint16_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, numbers + 2 * i, 2);
    largest = (std::max)(largest, static_cast<std::uint16_t>(bits & mask));
  }
  return largest;
}

// Which numbers of a page from outside are not finite, negative where a scale is meant, or out of bounds; null: none.
// Codes need no check: every bit pattern is a code.
inline const char* find_bad_number(const Layer& layer, std::byte* memory) noexcept {
  const PageBounds bounds(layer);
  const std::size_t tokens = layer.page_shape.tokens, heads = layer.shape.kv_heads;
  if (layer.shape.center_bits != 0 && largest_bits(memory, 2 * heads, 0xffff) > bounds.center_scale) {
    return "centre scale";
  }
  for (std::size_t head = 0; head < heads; ++head) {
    const SidePlace keys = side_place(layer, memory, Side::key, head);
    const SidePlace values = side_place(layer, memory, Side::value, head);
    if (largest_bits(keys.scales, tokens, 0xffff) > bounds.key_scale) return "key scale";
    if (largest_bits(values.scales, tokens, 0xffff) > bounds.value_scale) return "value scale";
    if (values.zero_points != nullptr && largest_bits(values.zero_points, tokens, 0x7fff) > bounds.zero_point) {
      return "zero point";
    }
  }
  return nullptr;
}

// The numbers of a layer that a file holds.
struct LayerNumbers {
  std::uint64_t first, base, tail_begin, held_begin, dropped_entries, pages;
};
inline constexpr std::size_t kLayerNumbers = 6;

// What is wrong with them, for a layer of `length` tokens; null: nothing. These are the invariants of LayerState:
//   - a layer no longer than its first tokens has nothing coded;
//   - page counting starts at `base`; the raw tail starts on that grid, not before what a rollback could need and not
//     behind the codes;
//   - only a window lets go of pages in front, and of whole ones.
inline const char* find_bad_layer(const CacheCore& core, const Layer& layer, std::size_t length,
                                  const LayerNumbers& numbers) noexcept {
  const CodingRule& rule = core.rule();
  const std::uint64_t first = numbers.first, held = numbers.held_begin;
  if (first > core.config().first_tokens || (length <= first && first != core.config().first_tokens)) return "first";
  if (length <= first) {
    if (numbers.base != first) return "base";
    if (numbers.tail_begin != first) return "tail_begin";
    if (held != first) return "held_begin";
    if (numbers.dropped_entries != 0) return "dropped_entries";
    return numbers.pages != 0 ? "pages" : nullptr;
  }
  if (numbers.base < first || numbers.base > length) return "base";
  if (numbers.tail_begin < rule.raw_begin(numbers.base, length) ||
      numbers.tail_begin > rule.coded(numbers.base, length) ||
      (numbers.tail_begin - numbers.base) % rule.page_tokens != 0) {
    return "tail_begin";
  }
  if (held < first || held > length || (held > numbers.base && (held - numbers.base) % rule.page_tokens != 0)) {
    return "held_begin";
  }
  if (held > first && layer.shape.window == 0) return "held_begin";
  if (numbers.dropped_entries != 0 && layer.shape.window == 0) return "dropped_entries";
  // Each held at most a page of tokens. All of these may have been erased since, and entries keep their numbers.
  if (numbers.dropped_entries > kMostTokens || numbers.dropped_entries * rule.page_tokens < held - first) {
    return "dropped_entries";
  }
  return numbers.pages > length ? "pages" : nullptr;
}

// Where the codes of a layer end; see LayerState.
inline std::size_t coded_end_of(const CodingRule& rule, std::size_t base, std::size_t held_begin, std::size_t length) {
  return (std::max)(rule.coded(base, length), held_begin);
}

}  // namespace turboquant::detail
