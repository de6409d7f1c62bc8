// One layer of a cache: shape, kernels, page and tile layout, rotations; encoding of a page and access to its parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/cache/config.hpp>
#include <turboquant/cache/format.hpp>
#include <turboquant/cache/page_pool.hpp>
#include <turboquant/core/rows.hpp>
#include <turboquant/layout/page.hpp>
#include <turboquant/transform/rotation.hpp>

namespace turboquant::detail {

struct Layer {
  Layer() = default;
  Layer(const LayerShape& described, std::size_t page_tokens, const Operations* kernels)
      : shape(described), operations(kernels) {
    if (shape.value_dim == 0) shape.value_dim = shape.head_dim;
    page_shape = {page_tokens,
                  shape.kv_heads,
                  shape.center_bits,
                  {shape.head_dim, operations->key_bits, false},
                  {shape.value_dim, operations->value_bits, operations->value_zero_points}};
    page = layout::page_layout(page_shape);
  }

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

  CodedPart part(const std::byte* page_memory, Side side, std::size_t head) const {
    CodedPart part;
    find_part(page_memory, side, head, part);
    return part;
  }
  // Writes all of `part` but what is read next, field by field: vectors that copy it would wait for those stores.
  void find_part(const std::byte* page_memory, Side side, std::size_t head, CodedPart& part) const {
    const layout::SideLayout& at = side == Side::key ? page.key : page.value;
    const std::byte* memory = page_memory + page.head_offset(head);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(memory);
    part.dim = dim(side);
    part.page_tokens = page_shape.tokens;
    part.center_bits = shape.center_bits;
    part.center = nullptr;
    part.center_scale = 0;
    if (shape.center_bits != 0) {
      bfloat16 scale{};
      std::memcpy(&scale, page_memory + layout::PageLayout::center_scale_offset(side, head), sizeof scale);
      part.center_scale = to_float(scale);
      part.center = bytes + at.center;
    }
    part.scales = reinterpret_cast<const bfloat16*>(memory + at.scales);
    part.zero_points = zero_points(side) ? reinterpret_cast<const bfloat16*>(memory + at.zero_points) : nullptr;
    part.fragments = bytes + at.fragments;
  }

  // CodedPart::begin() of a part of a page that is only to be fetched; of the page's header, the line with the part's
  // centre scale is fetched here. Null without a page.
  const std::uint8_t* part_ahead(const std::byte* page_memory, Side side, std::size_t head) const {
    if (page_memory == nullptr) return nullptr;
    kernels::fetch_line(page_memory + layout::PageLayout::center_scale_offset(side, head));
    const std::size_t at = side == Side::key ? page.key.center : page.value.center;
    return reinterpret_cast<const std::uint8_t*>(page_memory + page.head_offset(head) + at);
  }

  // Fetches the centre of a part of a page, and its scale.
  void fetch_center(const std::byte* page_memory, Side side, std::size_t head) const {
    const std::uint8_t* center = part_ahead(page_memory, side, head);
    for (std::size_t at = 0; at < dim(side) * shape.center_bits / 8; at += 64) kernels::fetch_line(center + at);
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

  // load_row of core/rows.hpp, with this layer's kernels. Requires rows.dim a multiple of 16.
  void load(const ConstRows& rows, std::size_t token, std::size_t head, bfloat16* out) const {
    if (rows.type == DType::f32) {
      operations->narrow_row(row_begin(rows, token, head), rows.dim, out);
    } else {
      load_row(rows, token, head, out);
    }
  }

  // Zeroes the padding of a new page, so that every byte of it is a function of its tokens.
  void clear_padding(std::byte* page_memory) const {
    std::memset(page_memory, 0, page.header_bytes);
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      std::byte* memory = page_memory + page.head_offset(head);
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

  // ---- the work of coding a page, in units of the time that one token of one side takes
  //
  // It is divided into units: key of head 0, value of head 0, key of head 1, ... A unit has part 0, the centre, and
  // behind it the parts of the codec. They are done in this order, however they are spread over calls.

  std::size_t units() const { return 2 * std::size_t{shape.kv_heads}; }
  static Side side_of(std::size_t unit) { return unit % 2 == 0 ? Side::key : Side::value; }
  std::size_t parts(Side side) const { return 1 + operations->parts(side, page_shape.tokens); }
  // The centre rotates every row. So does a part that is no token, and then follows one trellis path along the page's
  // tokens where a token tries three along its coordinates (measured: 72 us and 33 us for 64 tokens).
  std::size_t center_work() const { return (page_shape.tokens + 63) / 64; }
  std::size_t part_work(Side side) const { return operations->by_token(side) ? 1 : (page_shape.tokens + 31) / 32; }
  std::size_t unit_work(Side side) const { return center_work() + (parts(side) - 1) * part_work(side); }
  std::size_t page_work() const { return shape.kv_heads * (unit_work(Side::key) + unit_work(Side::value)); }
  std::size_t work_before(std::size_t unit) const {
    return unit / 2 * (unit_work(Side::key) + unit_work(Side::value)) + unit % 2 * unit_work(Side::key);
  }
  // The unit to which a piece of the page's work belongs. Requires done < page_work().
  std::size_t unit_at(std::size_t done) const {
    const std::size_t both = unit_work(Side::key) + unit_work(Side::value);
    return 2 * (done / both) + (done % both < unit_work(Side::key) ? 0 : 1);
  }
  // Parts of a unit that begin before `done` of the page's work.
  std::size_t parts_begun(std::size_t unit, std::size_t done) const {
    const std::size_t before = work_before(unit), center = center_work(), each = part_work(side_of(unit));
    if (done <= before) return 0;
    if (done - before <= center) return 1;
    const std::size_t begun = 1 + (done - before - center + each - 1) / each, all = parts(side_of(unit));
    return begun < all ? begun : all;
  }

  // Codes the parts [begin, end) of a unit of a page with `count` tokens: row(t, out) yields token t as bf16 [dim].
  // Units may be coded at the same time, the parts of one in order. Requires clear_padding before.
  template <class Row>
  void encode(std::byte* page_memory, std::size_t unit, std::size_t count, std::size_t begin, std::size_t end,
              std::byte* scratch, Row row) const {
    if (begin >= end) return;
    const Side side = side_of(unit);
    const std::size_t width = dim(side), head = unit / 2;
    const layout::SideLayout& at = side == Side::key ? page.key : page.value;
    std::byte* memory = page_memory + page.head_offset(head);
    auto* center = reinterpret_cast<std::uint8_t*>(memory + at.center);
    auto* rows = reinterpret_cast<float*>(scratch);
    // Without part 0 the centre is there already, and codes by token need their own rows only.
    const bool all = begin == 0 || !operations->by_token(side);
    const std::size_t first = all ? 0 : begin - 1, last = all || end - 1 > count ? count : end - 1;
    for (std::size_t t = first; t < last; ++t) {
      bfloat16 raw[kMaxDim];
      row(t, raw);
      float* out = rows + (t - first) * width;
      for (std::size_t i = 0; i < width; ++i) out[i] = to_float(raw[i]);
      operations->rotate(rotation(side), out, out);
    }
    if (shape.center_bits != 0 && begin == 0) {
      const bfloat16 scale = operations->center_rows(rows, count, width, shape.center_bits, center);
      std::memcpy(page_memory + layout::PageLayout::center_scale_offset(side, head), &scale, sizeof scale);
    } else if (shape.center_bits != 0 && first < last) {
      operations->subtract_center(rows, last - first, part(page_memory, side, head));
    }
    if (end == 1) return;
    CodedTarget target;
    target.dim = width;
    target.page_tokens = page_shape.tokens;
    target.scales = reinterpret_cast<bfloat16*>(memory + at.scales);
    if (zero_points(side)) target.zero_points = reinterpret_cast<bfloat16*>(memory + at.zero_points);
    target.fragments = reinterpret_cast<std::uint8_t*>(memory + at.fragments);
    auto* codes = reinterpret_cast<std::uint8_t*>(scratch + page_shape.tokens * width * sizeof(float));
    operations->encode_parts(side, rows, count, begin == 0 ? 0 : begin - 1, end - 1, target, codes);
  }
};

}  // namespace turboquant::detail
