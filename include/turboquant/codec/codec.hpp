// What a codec is: two concepts, keys are scored and values are accumulated, and what an encoder writes.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <turboquant/core/dtype.hpp>
#include <turboquant/kernels/operands.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant {

using kernels::ScaleRule;
using layout::Side;

/// How an encoder chooses scales.
struct EncodeOptions {
  ScaleRule scale = ScaleRule::least_squares;  ///< keys: unbiased; values: least_squares
  bool search = true;                          ///< search the scale on a grid before rounding: less error, same decoder
};

/// Where an encoder writes one side of one KV head of a page. All of it is written once all parts are done. Unused
/// tokens get zero scales; their codes are a function of the rows too, and part of a trellis code of values.
struct CodedTarget {
  std::size_t dim = 0;                ///< coordinates of a row, a multiple of 16
  std::size_t page_tokens = 0;        ///< tokens the page has room for, a multiple of 16
  bfloat16* scales = nullptr;         ///< page_tokens
  bfloat16* zero_points = nullptr;    ///< page_tokens; null for codecs without zero points
  std::uint8_t* fragments = nullptr;  ///< page_tokens * dim * bits / 8 bytes, as layout/fragment.hpp orders them
};

/// A codec turns rows (rotated, centred) into scales and codes, and names the code family that kernels read. The work
/// on one side of one KV head of a page is divided into parts, to be done in order, so that a decode loop can spread
/// it.
///   bits         stored bits per coordinate, without scales
///   id, name     frozen number and text in files and messages
///   zero_points  true: a zero point per token is stored beside the scale
///   codes()      the argument of kernels::score, accumulate and decode_row
///   by_token(side)           true: part t is token t and needs its row only; false: every part needs all rows
///   parts(side, page_tokens) number of parts
///   encode_parts<K>          parts [begin, end) of a page of `count` tokens, with the kernels K. rows: of the tokens
///                            [begin, min(end, count)) by token, else of all `count`
///   scratch_bytes(page_tokens, dim)  work space of encode_parts
template <class C>
concept Codec = requires(const float* rows, std::size_t count, std::uint8_t* scratch, const CodedTarget& target) {
  { C::bits } -> std::convertible_to<unsigned>;
  { C::id } -> std::convertible_to<std::uint16_t>;
  { C::name } -> std::convertible_to<const char*>;
  { C::zero_points } -> std::convertible_to<bool>;
  {C::codes()};
  { C::by_token(Side::key) } -> std::convertible_to<bool>;
  { C::parts(Side::key, count) } -> std::convertible_to<std::size_t>;
  { C::scratch_bytes(count, count) } -> std::convertible_to<std::size_t>;
  requires C::bits >= 1 && C::bits <= 8;
};

/// Keys are scored: an integer dot product with the query, times one scale. `query_planes` int8 planes of the query
/// keep the rounding of the query below the error of the code.
template <class C>
concept KeyCodec = Codec<C> && !C::zero_points && requires {
  { C::query_planes } -> std::convertible_to<unsigned>;
  requires C::query_planes == 1 || C::query_planes == 2;
};

/// Values are accumulated: weights times levels, plus weights times zero points where there are any.
template <class C>
concept ValueCodec = Codec<C>;

/// All parts at once: rows [count][target.dim], rotated and centred -> target, with the kernels K. scratch:
/// C::scratch_bytes(target.page_tokens, target.dim), aligned to 2.
template <Codec C, class K>
void encode_rows(Side side, const float* rows, std::size_t count, EncodeOptions options, const CodedTarget& target,
                 std::uint8_t* scratch) {
  C::template encode_parts<K>(side, rows, count, 0, C::parts(side, target.page_tokens), options, target, scratch);
}

}  // namespace turboquant
