// Pages without the container: coding and reading single pages that an engine's own block manager holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <turboquant/cache/config.hpp>
#include <turboquant/cache/layer.hpp>
#include <turboquant/core/refuse.hpp>
#include <turboquant/core/rows.hpp>
#include <turboquant/core/status.hpp>
#include <turboquant/transform/rotation.hpp>

namespace turboquant {

namespace detail {
struct CacheAccess;
}

/// Codes the tokens of one layer into pages whose memory the caller owns; attend_pages (attention/pages.hpp) reads
/// them. A page is plain bytes, the same as those of a KVCache with this shape, page size and seed: it may be copied,
/// moved, shared and sent to another machine, and lies at a multiple of 64 bytes when it is read or written. Pages are
/// trusted: bytes from a stranger go through load. All calls are const, allocate nothing and may run concurrently. The
/// object can be neither copied nor moved.
template <class F>
class PageCodec {
 public:
  /// shape.format is 0. isa: as for KVCache. Throws std::invalid_argument as KVCache does.
  explicit PageCodec(const LayerShape& shape, std::size_t page_tokens = 64, std::uint64_t seed = 42,
                     Isa isa = best_isa())
      : isa_(is_supported(isa) ? isa : Isa::portable),
        key_rotation_(seed, shape.head_dim),
        value_rotation_(seed, shape.value_dim != 0 ? shape.value_dim : shape.head_dim) {
    CacheConfig config;
    config.layers[0] = shape;
    config.page_tokens = page_tokens;
    const std::string why = why_invalid(config, 1);
    if (!why.empty()) detail::refuse(why);
    layer_ = detail::Layer(shape, page_tokens, detail::OperationsOf<F>::on(isa_));
    layer_.key_rotation = detail::view_of(key_rotation_);
    layer_.value_rotation = detail::view_of(value_rotation_);
  }
  PageCodec(const PageCodec&) = delete;
  PageCodec& operator=(const PageCodec&) = delete;

  /// The kernels that run.
  Isa isa() const noexcept { return isa_; }

  /// As given, value_dim resolved where it was 0.
  const LayerShape& shape() const noexcept { return layer_.shape; }
  /// Tokens that a page has room for.
  std::size_t page_tokens() const noexcept { return layer_.page_shape.tokens; }

  /// Bytes of a page: all KV heads, keys and values, scales and centres; a multiple of 64.
  std::size_t page_bytes() const noexcept { return layer_.page.bytes; }

  /// Bytes of work space of encode_page.
  std::size_t workspace_bytes() const noexcept { return layer_.encode_scratch_bytes(); }

  /// Codes 1 to page_tokens() tokens into `page`, as bytes that depend on them alone. keys:
  /// [tokens][kv_heads][head_dim], values: [tokens][kv_heads][value_dim]; page: page_bytes(), workspace:
  /// workspace_bytes(), both aligned to 64. Errors: bad_shape, non_finite_input; then the page is untouched.
  Status encode_page(ConstRows keys, ConstRows values, std::byte* page, std::byte* workspace) const noexcept {
    if (const Status status = check(keys, values); status.code != Status::ok) return status;
    if (page == nullptr) return {Status::bad_shape, "page"};
    if (workspace == nullptr) return {Status::bad_shape, "workspace"};
    for (std::size_t t = 0; t < keys.tokens; ++t) {
      for (std::size_t head = 0; head < keys.heads; ++head) {
        const auto at = static_cast<std::int64_t>(t);
        if (!is_storable_row(keys, t, head)) return {Status::non_finite_input, "keys", 0, at};
        if (!is_storable_row(values, t, head)) return {Status::non_finite_input, "values", 0, at};
      }
    }
    layer_.clear_padding(page);
    for (std::size_t unit = 0; unit < layer_.units(); ++unit) {
      const Side side = detail::Layer::side_of(unit);
      layer_.encode(page, unit, keys.tokens, 0, layer_.parts(side), workspace, [&](std::size_t t, bfloat16* out) {
        layer_.load(side == Side::key ? keys : values, t, unit / 2, out);
      });
    }
    return {};
  }

  /// Decodes the tokens of `page` from `first` on. keys, values: as in encode_page; either may be no rows. Errors:
  /// bad_shape.
  Status read_page(const std::byte* page, std::size_t first, Rows keys, Rows values) const noexcept {
    if (page == nullptr) return {Status::bad_shape, "page"};
    for (const Side side : {Side::key, Side::value}) {
      const Rows& rows = side == Side::key ? keys : values;
      if (rows.tokens == 0) continue;
      if (const Status status = check(rows, side, first); status.code != Status::ok) return status;
      for (std::size_t t = 0; t < rows.tokens; ++t) {
        for (std::size_t head = 0; head < rows.heads; ++head) {
          float out[kMaxDim];
          layer_.operations->decode_row(side, layer_.part(page, side, head), first + t, out);
          layer_.operations->rotate_back(layer_.rotation(side), out, out);
          store_row(rows, t, head, out);
        }
      }
    }
    return {};
  }

 private:
  friend struct detail::CacheAccess;

  static Status bad_shape(const char* field, std::size_t expected, std::size_t found) noexcept {
    return {Status::bad_shape, field, static_cast<std::int64_t>(expected), static_cast<std::int64_t>(found)};
  }
  Status check(const ConstRows& keys, const ConstRows& values) const noexcept {
    if (keys.tokens == 0) return bad_shape("keys.tokens", page_tokens(), 0);
    if (values.tokens != keys.tokens) return bad_shape("values.tokens", keys.tokens, values.tokens);
    if (const Status status = check(keys, Side::key, 0); status.code != Status::ok) return status;
    return check(values, Side::value, 0);
  }
  Status check(const ConstRows& rows, Side side, std::size_t first) const noexcept {
    const bool key = side == Side::key;
    const Status status = detail::check_rows(rows, key ? detail::kKeyFields : detail::kValueFields,
                                             layer_.shape.kv_heads, layer_.dim(side));
    if (status.code != Status::ok) return status;
    const std::size_t room = page_tokens() - (std::min)(first, page_tokens());
    return rows.tokens > room ? bad_shape(key ? "keys.tokens" : "values.tokens", room, rows.tokens) : Status{};
  }

  Isa isa_;
  Rotation key_rotation_, value_rotation_;
  detail::Layer layer_;
};

}  // namespace turboquant
