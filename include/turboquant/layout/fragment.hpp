// The fragment: 16 tokens x 16 coordinates of codes, the unit that kernels unpack, and where each of its bits lies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turboquant::layout {

// A fragment is 256 codes = 4 slots x 16 lanes x 4 bytes. Unpacked, one slot is one 64-byte register and one operand of
// a 4-way int8 dot product. Keys and values are transposes of each other:
//
//                     lane (16)      byte in lane (4)         slot (4)
//   key fragment      token          coordinate 4 slot + byte coordinate quad
//   value fragment    coordinate     token 4 slot + byte      token quad
//
//            byte 0    1    2    3    4 ...                 63
//   slot 0  [ t0c0 t0c1 t0c2 t0c3 | t1c0 ... | ... | ... t15c3 ]     (key fragment)
//   slot 1  [ t0c4 t0c5 t0c6 t0c7 | t1c4 ...             t15c7 ]
//   slot 2  ...
//
// For keys the other operand is 4 query bytes broadcast to all lanes, so the 16 accumulators are the 16 logits; for
// values it is 4 weights broadcast, and the accumulators are 16 output coordinates. No horizontal sums.
inline constexpr std::size_t kTileTokens = 16;
inline constexpr std::size_t kMaxPageTokens = 256;
inline constexpr std::size_t kGroupCoordinates = 16;
inline constexpr std::size_t kFragmentCodes = 256;
inline constexpr std::size_t kSlotCodes = 64;

enum class Side : std::uint8_t { key, value };

// Trellis codes of width B (kernels/portable_trellis.hpp) take the same bytes: 2 halves x B planes x 16 bytes. In half
// h, lane t makes the word W = sum over i of n_i << B (7 - i), n_i the new bits of depth 8 h + i; plane p, byte t =
// byte B - 1 - p of W. A window of 8 bits slides over history << 8 B | W; the history of a half is the plane before it,
// the last plane of the sequence for its first half: sequences are closed.

// Bytes of a packed fragment of `bits`-wide codes (1, 2, 3, 4 or 8).
constexpr std::size_t fragment_bytes(unsigned bits) { return 32u * bits; }

// Index in [0, 256) of the code of `token` and `coordinate` (both in [0, 16)) in the unpacked fragment: 64 slot + 4
// lane + byte.
constexpr std::size_t code_position(Side side, std::size_t token, std::size_t coordinate) {
  const std::size_t lane = side == Side::key ? token : coordinate;
  const std::size_t depth = side == Side::key ? coordinate : token;
  return depth / 4 * kSlotCodes + lane * 4 + depth % 4;
}

// Where the low bits of a code lie in the packed fragment: `count` bits of byte `byte` from bit `shift` on.
struct CodeField {
  std::size_t byte;
  unsigned shift;
  unsigned count;
};

// The field that holds the low bits: all of them for widths 1, 2, 4 and 8, the low two for width 3.
//   width 8: one byte each. width 4: two 64-byte words, slots 0/1 are low/high nibbles of the first, 2/3 of the second.
//   width 3, 2: one 64-byte word, slot s in bits 2s, 2s+1. width 1: four 8-byte masks, bit i of mask s is byte i of
//   slot s.
constexpr CodeField low_field(unsigned bits, std::size_t position) {
  const std::size_t slot = position / kSlotCodes;
  const std::size_t i = position % kSlotCodes;
  switch (bits) {
    case 8:
      return {position, 0, 8};
    case 4:
      return {slot / 2 * kSlotCodes + i, static_cast<unsigned>(slot % 2 * 4), 4};
    case 1:
      return {slot * 8 + i / 8, static_cast<unsigned>(i % 8), 1};
    default:
      return {i, static_cast<unsigned>(2 * slot), 2};
  }
}

// Width 3 only: the field of the third bit, in four 8-byte masks after the 64-byte word.
constexpr CodeField high_field(std::size_t position) {
  const std::size_t i = position % kSlotCodes;
  return {kSlotCodes + position / kSlotCodes * 8 + i / 8, static_cast<unsigned>(i % 8), 1};
}

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Tiles that `tokens` tokens take, the last of them perhaps in part.
constexpr std::size_t tile_count(std::size_t tokens) { return round_up(tokens, kTileTokens) / kTileTokens; }

}  // namespace turboquant::layout
