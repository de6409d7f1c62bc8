// One layer of a cache: shape, kernels, page and tile layout, rotations; encoding of a page and access to its parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/cache/config.hpp>
#include <turboquant/cache/format.hpp>
#include <turboquant/cache/page_pool.hpp>
#include <turboquant/layout/page.hpp>
#include <turboquant/transform/rotation.hpp>

namespace turboquant::detail {

struct Layer {
  LayerShape shape{};  // value_dim resolved
  const Operations* operations = nullptr;
  layout::PageShape page_shape{};
  layout::PageLayout page{};
  RotationView key_rotation{}, value_rotation{};
  unsigned page_class = 0, tile_class = 0;

  std::size_t dim(Side side) const { return side == Side::key ? shape.head_dim : shape.value_dim; }
  const RotationView& rotation(Side side) const { return side == Side::key ? key_rotation : value_rotation; }

  // A tile: [keys: head][16 tokens][head_dim], then [values: head][16 tokens][value_dim], bf16.
  std::size_t tile_bytes() const {
    return shape.kv_heads * layout::kTileTokens * (shape.head_dim + std::size_t{shape.value_dim}) * sizeof(bfloat16);
  }
  bfloat16* tile_row(const Block* tile, Side side, std::size_t head, std::size_t token) const {
    auto* keys = reinterpret_cast<bfloat16*>(tile->memory);
    if (side == Side::key) return keys + (head * layout::kTileTokens + token) * shape.head_dim;
    return keys + shape.kv_heads * layout::kTileTokens * std::size_t{shape.head_dim} +
           (head * layout::kTileTokens + token) * shape.value_dim;
  }

  CodedPart part(const Block* block, Side side, std::size_t head) const {
    const layout::SideLayout& at = side == Side::key ? page.key : page.value;
    const std::byte* memory = block->memory + page.head_offset(head);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(memory);
    CodedPart part;
    part.dim = dim(side);
    part.page_tokens = page_shape.tokens;
    part.center_bits = shape.center_bits;
    if (shape.center_bits != 0) {
      bfloat16 scale{};
      std::memcpy(&scale, block->memory + layout::PageLayout::center_scale_offset(side, head), sizeof scale);
      part.center_scale = to_float(scale);
      part.center = bytes + at.center;
    }
    part.scales = reinterpret_cast<const bfloat16*>(memory + at.scales);
    if (zero_points(side)) part.zero_points = reinterpret_cast<const bfloat16*>(memory + at.zero_points);
    part.fragments = bytes + at.fragments;
    return part;
  }

  bool zero_points(Side side) const { return side == Side::value && page_shape.value.zero_points; }

  // Work space of encode, in bytes: rows in float, then what the codec needs.
  std::size_t encode_scratch_bytes() const {
    std::size_t most = 0;
    for (const Side side : {Side::key, Side::value}) {
      const std::size_t codec = operations->encode_scratch_bytes(side, page_shape.tokens, dim(side));
      const std::size_t bytes = page_shape.tokens * dim(side) * sizeof(float) + layout::round_up(codec, kCacheLine);
      most = bytes > most ? bytes : most;
    }
    return most;
  }

  // Zeroes the padding of a new page, so that every byte of it is a function of its tokens.
  void clear_padding(Block* block) const {
    std::memset(block->memory, 0, page.header_bytes);
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      std::byte* memory = block->memory + page.head_offset(head);
      for (const Side side : {Side::key, Side::value}) {
        const layout::SideLayout& at = side == Side::key ? page.key : page.value;
        std::memset(memory + at.center, 0, at.fragments - at.center);
        const std::size_t codes =
            page_shape.tokens / 16 * (dim(side) / 16) *
            layout::fragment_bytes(side == Side::key ? operations->key_bits : operations->value_bits);
        std::memset(memory + at.fragments + codes, 0, at.end - at.fragments - codes);
      }
    }
  }

  // Encodes one side of one head: row(t, out) yields token t of `count` as bf16 [dim]. Different (side, head) pairs of
  // a page may be encoded at the same time. Requires clear_padding before.
  template <class Row>
  void encode(Block* block, Side side, std::size_t head, std::size_t count, std::byte* scratch, Row row) const {
    const std::size_t width = dim(side);
    const layout::SideLayout& at = side == Side::key ? page.key : page.value;
    std::byte* memory = block->memory + page.head_offset(head);
    auto* rows = reinterpret_cast<float*>(scratch);
    for (std::size_t t = 0; t < count; ++t) {
      bfloat16 raw[1024];
      row(t, raw);
      float* out = rows + t * width;
      for (std::size_t i = 0; i < width; ++i) out[i] = to_float(raw[i]);
      operations->rotate(rotation(side), out, out);
    }
    if (shape.center_bits != 0) {
      const bfloat16 scale = operations->center_rows(rows, count, width, shape.center_bits,
                                                     reinterpret_cast<std::uint8_t*>(memory + at.center));
      std::memcpy(block->memory + layout::PageLayout::center_scale_offset(side, head), &scale, sizeof scale);
    }
    CodedTarget target;
    target.dim = width;
    target.page_tokens = page_shape.tokens;
    target.scales = reinterpret_cast<bfloat16*>(memory + at.scales);
    if (zero_points(side)) target.zero_points = reinterpret_cast<bfloat16*>(memory + at.zero_points);
    target.fragments = reinterpret_cast<std::uint8_t*>(memory + at.fragments);
    auto* codes = reinterpret_cast<std::uint8_t*>(scratch + page_shape.tokens * width * sizeof(float));
    operations->encode(side, rows, count, target, codes);
  }
};

}  // namespace turboquant::detail
