// Views of the caller's keys, values, queries and outputs, and the only code that reads or writes through them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/core/dtype.hpp>
#include <turboquant/core/status.hpp>

namespace turboquant {

/// Writable view of rows [tokens][heads][dim].
///
/// Element (t, h, i) lies at `data + (t * token_stride + h * head_stride + i) * size_of(type)` bytes: `dim` is
/// contiguous, strides are in elements and may be negative or zero. `data` needs no alignment. The view owns nothing.
struct Rows {
  void* data = nullptr;             ///< element (0, 0, 0); not aligned in any way; null: no rows
  DType type = DType::f32;          ///< of every element
  std::size_t tokens = 0;           ///< rows per head
  std::size_t heads = 0;            ///< query heads or KV heads
  std::size_t dim = 0;              ///< contiguous elements of a row
  std::ptrdiff_t token_stride = 0;  ///< elements from a token to the next
  std::ptrdiff_t head_stride = 0;   ///< elements from a head to the next

  /// No rows.
  constexpr Rows() noexcept = default;
  /// Contiguous rows of one element type: head_stride is dim, token_stride heads * dim.
  /// @{
  constexpr Rows(float* rows, std::size_t token_count, std::size_t head_count, std::size_t dimension) noexcept
      : Rows(rows, DType::f32, token_count, head_count, dimension) {}
  constexpr Rows(half* rows, std::size_t token_count, std::size_t head_count, std::size_t dimension) noexcept
      : Rows(rows, DType::f16, token_count, head_count, dimension) {}
  constexpr Rows(bfloat16* rows, std::size_t token_count, std::size_t head_count, std::size_t dimension) noexcept
      : Rows(rows, DType::bf16, token_count, head_count, dimension) {}
  constexpr Rows(void* rows, DType element, std::size_t token_count, std::size_t head_count,
                 std::size_t dimension) noexcept
      : Rows(rows, element, token_count, head_count, dimension, std::ptrdiff_t(head_count * dimension),
             std::ptrdiff_t(dimension)) {}
  /// @}
  /// Rows with strides, in elements.
  constexpr Rows(void* rows, DType element, std::size_t token_count, std::size_t head_count, std::size_t dimension,
                 std::ptrdiff_t stride_of_tokens, std::ptrdiff_t stride_of_heads) noexcept
      : data(rows),
        type(element),
        tokens(token_count),
        heads(head_count),
        dim(dimension),
        token_stride(stride_of_tokens),
        head_stride(stride_of_heads) {}
};

/// Read-only view of rows [tokens][heads][dim]; otherwise as Rows.
struct ConstRows {
  const void* data = nullptr;       ///< element (0, 0, 0); not aligned in any way; null: no rows
  DType type = DType::f32;          ///< of every element
  std::size_t tokens = 0;           ///< rows per head
  std::size_t heads = 0;            ///< query heads or KV heads
  std::size_t dim = 0;              ///< contiguous elements of a row
  std::ptrdiff_t token_stride = 0;  ///< elements from a token to the next
  std::ptrdiff_t head_stride = 0;   ///< elements from a head to the next

  /// No rows.
  constexpr ConstRows() noexcept = default;
  /// A writable view, for reading.
  constexpr ConstRows(const Rows& rows) noexcept
      : ConstRows(rows.data, rows.type, rows.tokens, rows.heads, rows.dim, rows.token_stride, rows.head_stride) {}
  /// Contiguous rows of one element type: head_stride is dim, token_stride heads * dim.
  /// @{
  constexpr ConstRows(const float* rows, std::size_t token_count, std::size_t head_count,
                      std::size_t dimension) noexcept
      : ConstRows(rows, DType::f32, token_count, head_count, dimension) {}
  constexpr ConstRows(const half* rows, std::size_t token_count, std::size_t head_count, std::size_t dimension) noexcept
      : ConstRows(rows, DType::f16, token_count, head_count, dimension) {}
  constexpr ConstRows(const bfloat16* rows, std::size_t token_count, std::size_t head_count,
                      std::size_t dimension) noexcept
      : ConstRows(rows, DType::bf16, token_count, head_count, dimension) {}
  constexpr ConstRows(const void* rows, DType element, std::size_t token_count, std::size_t head_count,
                      std::size_t dimension) noexcept
      : ConstRows(rows, element, token_count, head_count, dimension, std::ptrdiff_t(head_count * dimension),
                  std::ptrdiff_t(dimension)) {}
  /// @}
  /// Rows with strides, in elements.
  constexpr ConstRows(const void* rows, DType element, std::size_t token_count, std::size_t head_count,
                      std::size_t dimension, std::ptrdiff_t stride_of_tokens, std::ptrdiff_t stride_of_heads) noexcept
      : data(rows),
        type(element),
        tokens(token_count),
        heads(head_count),
        dim(dimension),
        token_stride(stride_of_tokens),
        head_stride(stride_of_heads) {}
};

namespace detail {

/// Bytes from `data` to element 0 of row (token, head).
template <class View>
[[nodiscard]] constexpr std::ptrdiff_t row_offset(const View& rows, std::size_t token, std::size_t head) noexcept {
  return (std::ptrdiff_t(token) * rows.token_stride + std::ptrdiff_t(head) * rows.head_stride) *
         std::ptrdiff_t(size_of(rows.type));
}

[[nodiscard]] inline const std::byte* row_begin(const ConstRows& rows, std::size_t token, std::size_t head) noexcept {
  return static_cast<const std::byte*>(rows.data) + row_offset(rows, token, head);
}

/// Element i of a row at any address.
template <class T>
[[nodiscard]] inline T element(const std::byte* row, std::size_t i) noexcept {
  T value;
  std::memcpy(&value, row + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
inline void set_element(std::byte* row, std::size_t i, T value) noexcept {
  std::memcpy(row + i * sizeof(T), &value, sizeof(T));
}

/// True if the bits of no element, its sign left out, are above `limit`. NaN and infinity have the largest bits of all.
template <class Bits>
[[nodiscard]] inline bool are_magnitudes_at_most(const std::byte* row, std::size_t count, Bits limit) noexcept {
  constexpr auto kMagnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  const auto carry = static_cast<Bits>(kMagnitude - limit);  // takes what is above into the sign
  const auto sum = [row, carry](std::size_t i) noexcept {
    const auto magnitude = static_cast<Bits>(element<Bits>(row, i) & kMagnitude);
    return static_cast<Bits>(magnitude + carry);
  };
  // No early exit, and blocks of a fixed size: the loop becomes vectors at -O2 too.
  constexpr std::size_t kBlock = 128 / sizeof(Bits);
  const std::size_t rest = count % kBlock;
  Bits all = 0;
  for (std::size_t i = 0; i < count - rest; i += kBlock) {
    Bits block = 0;
    for (std::size_t at = 0; at < kBlock; ++at) block = static_cast<Bits>(block | sum(i + at));
    all = static_cast<Bits>(all | block);
  }
  for (std::size_t i = count - rest; i < count; ++i) all = static_cast<Bits>(all | sum(i));
  return all <= kMagnitude;
}

/// The same for a row, with one limit for each type.
[[nodiscard]] inline bool is_row_at_most(const ConstRows& rows, std::size_t token, std::size_t head,
                                         std::uint32_t float_limit, std::uint16_t half_limit,
                                         std::uint16_t bfloat16_limit) noexcept {
  const std::byte* row = row_begin(rows, token, head);
  if (rows.type == DType::f32) return are_magnitudes_at_most(row, rows.dim, float_limit);
  return are_magnitudes_at_most(row, rows.dim, rows.type == DType::f16 ? half_limit : bfloat16_limit);
}

/// What a Status calls the parts of one argument.
struct RowFields {
  const char* data;
  const char* type;
  const char* heads;
  const char* dim;
};
inline constexpr RowFields kKeyFields = {"keys.data", "keys.type", "keys.heads", "keys.dim"};
inline constexpr RowFields kValueFields = {"values.data", "values.type", "values.heads", "values.dim"};
inline constexpr RowFields kQueryFields = {"queries.data", "queries.type", "queries.heads", "queries.dim"};
inline constexpr RowFields kOutFields = {"out.data", "out.type", "out.heads", "out.dim"};

/// bad_shape unless there are rows, of a known type and of this shape.
[[nodiscard]] inline Status check_rows(const ConstRows& rows, const RowFields& fields, std::size_t heads,
                                       std::size_t dim) noexcept {
  const auto refuse = [](const char* field, std::size_t expected, std::size_t found) {
    return Status{Status::bad_shape, field, static_cast<std::int64_t>(expected), static_cast<std::int64_t>(found)};
  };
  if (rows.data == nullptr) return refuse(fields.data, 1, 0);
  if (size_of(rows.type) == 0) {
    return refuse(fields.type, static_cast<std::size_t>(DType::bf16), static_cast<std::size_t>(rows.type));
  }
  if (rows.heads != heads) return refuse(fields.heads, heads, rows.heads);
  if (rows.dim != dim) return refuse(fields.dim, dim, rows.dim);
  return {};
}

}  // namespace detail

/// out[i] = element (token, head, i), widened exactly. `out`: rows.dim floats. Requires token < rows.tokens,
/// head < rows.heads.
inline void load_row(const ConstRows& rows, std::size_t token, std::size_t head, float* out) noexcept {
  const std::byte* row = detail::row_begin(rows, token, head);
  switch (rows.type) {
    case DType::f32:
      if (rows.dim != 0) std::memcpy(out, row, rows.dim * sizeof(float));
      break;
    case DType::f16:
      for (std::size_t i = 0; i < rows.dim; ++i) out[i] = to_float(detail::element<half>(row, i));
      break;
    case DType::bf16:
      for (std::size_t i = 0; i < rows.dim; ++i) out[i] = to_float(detail::element<bfloat16>(row, i));
      break;
  }
}

/// out[i] = element (token, head, i), rounded to the nearest bfloat16, ties to even. bf16 rows are copied bit by bit.
/// `out`: rows.dim elements. Requires token < rows.tokens, head < rows.heads.
inline void load_row(const ConstRows& rows, std::size_t token, std::size_t head, bfloat16* out) noexcept {
  const std::byte* row = detail::row_begin(rows, token, head);
  switch (rows.type) {
    case DType::f32:
      for (std::size_t i = 0; i < rows.dim; ++i) out[i] = to_bfloat16(detail::element<float>(row, i));
      break;
    case DType::f16:
      for (std::size_t i = 0; i < rows.dim; ++i) out[i] = to_bfloat16(to_float(detail::element<half>(row, i)));
      break;
    case DType::bf16:
      if (rows.dim != 0) std::memcpy(out, row, rows.dim * sizeof(bfloat16));
      break;
  }
}

/// Element (token, head, i) = in[i], rounded to the nearest value of the view's type, ties to even. `in`: rows.dim
/// floats. Requires token < rows.tokens, head < rows.heads.
inline void store_row(const Rows& rows, std::size_t token, std::size_t head, const float* in) noexcept {
  std::byte* row = static_cast<std::byte*>(rows.data) + detail::row_offset(rows, token, head);
  switch (rows.type) {
    case DType::f32:
      if (rows.dim != 0) std::memcpy(row, in, rows.dim * sizeof(float));
      break;
    case DType::f16:
      for (std::size_t i = 0; i < rows.dim; ++i) detail::set_element(row, i, to_half(in[i]));
      break;
    case DType::bf16:
      for (std::size_t i = 0; i < rows.dim; ++i) detail::set_element(row, i, to_bfloat16(in[i]));
      break;
  }
}

/// True if every element of the row is finite and at most 2^96 in magnitude after rounding to bfloat16: below that
/// neither the scales and means of a page overflow nor the sums of attention over 2^26 tokens. Requires token <
/// rows.tokens, head < rows.heads.
[[nodiscard]] inline bool is_storable_row(const ConstRows& rows, std::size_t token, std::size_t head) noexcept {
  // 2^96 is even as a bfloat16: floats up to half a step above round to it.
  constexpr std::uint16_t kMost = (96u + 127u) << 7;
  return detail::is_row_at_most(rows, token, head, (std::uint32_t{kMost} << 16) + 0x8000u, 0x7bff, kMost);
}

/// True if no element of the row is infinite or NaN. Requires token < rows.tokens, head < rows.heads.
[[nodiscard]] inline bool is_finite_row(const ConstRows& rows, std::size_t token, std::size_t head) noexcept {
  return detail::is_row_at_most(rows, token, head, 0x7f7fffff, 0x7bff, 0x7f7f);
}

}  // namespace turboquant
