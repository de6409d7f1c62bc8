// The page: where each section of `tokens` coded tokens of one layer lies, for all its KV heads.
#pragma once

#include <cstddef>

#include "turboquant/layout/fragment.hpp"

namespace turboquant::layout {

// Every section starts on 64 bytes; the padding counts as part of the page.
//
//   page   [ header | head 0 | head 1 | ... ]      header: bf16 centre scales, two per KV head (key, value);
//                                                  absent without centring
//   head   [ key centre | key scales | key fragments | value centre | value scales and zero points | value fragments ]
//
//   key fragments    tile by tile:              fragment (tile, group) is number tile * (head_dim / 16) + group
//   value fragments  coordinate group by group: fragment (group, tile) is number group * (tokens / 16) + tile
//
// That is the order in which attention reads, so it walks memory forward.
inline constexpr std::size_t kSectionAlignment = 64;

// One side (keys or values) of one KV head. `code_bits` are stored bits per coordinate, scales not counted.
struct SideShape {
  std::size_t dim = 0;
  unsigned code_bits = 0;
  bool zero_points = false;
};

struct PageShape {
  std::size_t tokens = 64;
  std::size_t kv_heads = 1;
  unsigned center_bits = 8;
  SideShape key{}, value{};
};

// Byte offsets from the start of the head's part of the page.
struct SideLayout {
  std::size_t center = 0;
  std::size_t scales = 0;       // tokens x bf16
  std::size_t zero_points = 0;  // tokens x bf16, directly behind the scales; only where the codec has them
  std::size_t fragments = 0;
  std::size_t end = 0;
};

struct PageLayout {
  std::size_t header_bytes = 0;
  std::size_t head_bytes = 0;
  std::size_t bytes = 0;
  SideLayout key{}, value{};

  constexpr std::size_t head_offset(std::size_t head) const { return header_bytes + head * head_bytes; }
  // Offset of the bf16 centre scale of one side in the page header.
  static constexpr std::size_t center_scale_offset(Side side, std::size_t head) {
    return (2 * head + (side == Side::value ? 1 : 0)) * 2;
  }
};

constexpr SideLayout side_layout(std::size_t begin, std::size_t tokens, unsigned center_bits, const SideShape& shape) {
  SideLayout at;
  at.center = begin;
  at.scales = at.center + round_up(shape.dim * center_bits / 8, kSectionAlignment);
  at.zero_points = at.scales + (shape.zero_points ? 2 * tokens : 0);
  at.fragments = at.scales + round_up((shape.zero_points ? 4 : 2) * tokens, kSectionAlignment);
  const std::size_t count = (tokens / kTileTokens) * (shape.dim / kGroupCoordinates);
  at.end = round_up(at.fragments + count * fragment_bytes(shape.code_bits), kSectionAlignment);
  return at;
}

// `tokens` and both dims are multiples of 16.
constexpr PageLayout page_layout(const PageShape& shape) {
  PageLayout page;
  page.header_bytes = shape.center_bits == 0 ? 0 : round_up(4 * shape.kv_heads, kSectionAlignment);
  page.key = side_layout(0, shape.tokens, shape.center_bits, shape.key);
  page.value = side_layout(page.key.end, shape.tokens, shape.center_bits, shape.value);
  page.head_bytes = page.value.end;
  page.bytes = page.header_bytes + shape.kv_heads * page.head_bytes;
  return page;
}

// Bits per coordinate of a full page, scales, centres, header and padding included.
constexpr double bits_per_coordinate(const PageShape& shape) {
  return 8.0 * static_cast<double>(page_layout(shape).bytes) /
         static_cast<double>(shape.tokens * shape.kv_heads * (shape.key.dim + shape.value.dim));
}

}  // namespace turboquant::layout
