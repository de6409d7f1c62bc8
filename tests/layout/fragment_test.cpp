// The fragment law: every code has its own bits, and packing and unpacking agree with it.
#include <turboquant/kernels/portable.hpp>
#include <turboquant/layout/fragment.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

namespace {

using namespace turboquant;
using layout::Side;

TEST(Fragment, PositionsAreAPermutation) {
  for (const Side side : {Side::key, Side::value}) {
    std::set<std::size_t> seen;
    for (std::size_t t = 0; t < 16; ++t) {
      for (std::size_t c = 0; c < 16; ++c) seen.insert(layout::code_position(side, t, c));
    }
    EXPECT_EQ(seen.size(), 256u);
    EXPECT_EQ(*seen.rbegin(), 255u);
  }
}

TEST(Fragment, ValuesAreTheTransposeOfKeys) {
  for (std::size_t t = 0; t < 16; ++t) {
    for (std::size_t c = 0; c < 16; ++c) {
      EXPECT_EQ(layout::code_position(Side::key, t, c), layout::code_position(Side::value, c, t));
    }
  }
}

// The examples of the picture: slot 0 starts with token 0, coordinates 0 to 3.
TEST(Fragment, PictureOfTheHeader) {
  EXPECT_EQ(layout::code_position(Side::key, 0, 3), 3u);
  EXPECT_EQ(layout::code_position(Side::key, 1, 0), 4u);
  EXPECT_EQ(layout::code_position(Side::key, 15, 3), 63u);
  EXPECT_EQ(layout::code_position(Side::key, 0, 4), 64u);
}

template <unsigned B>
void expect_disjoint_fields() {
  std::set<std::pair<std::size_t, unsigned>> bits;
  for (std::size_t position = 0; position < 256; ++position) {
    const auto low = layout::low_field(B, position);
    for (unsigned b = 0; b < low.count; ++b) bits.insert({low.byte, low.shift + b});
    if (B == 3) {
      const auto high = layout::high_field(position);
      bits.insert({high.byte, high.shift});
    }
  }
  EXPECT_EQ(bits.size(), 256u * B) << "two codes share a bit, B = " << B;
  EXPECT_EQ(bits.rbegin()->first + 1, layout::fragment_bytes(B));
  for (const auto& [byte, bit] : bits) EXPECT_LT(bit, 8u);
}

TEST(Fragment, EveryCodeHasItsOwnBits) {
  expect_disjoint_fields<1>();
  expect_disjoint_fields<2>();
  expect_disjoint_fields<3>();
  expect_disjoint_fields<4>();
  expect_disjoint_fields<8>();
}

// Reads a code by the layout law alone.
unsigned code_at(const std::uint8_t* fragment, unsigned bits, std::size_t position) {
  const auto low = layout::low_field(bits, position);
  unsigned code = fragment[low.byte] >> low.shift & ((1u << low.count) - 1);
  if (bits == 3) {
    const auto high = layout::high_field(position);
    code |= (fragment[high.byte] >> high.shift & 1u) << 2;
  }
  return code;
}

// L07: every code at every position, also 3-bit codes across byte borders, in a buffer of exact size; and the decoded
// row is the table look-up. Tokens beyond `count` have code zero.
template <unsigned B>
void expect_pack_and_decode(Side side, std::size_t count, std::size_t page_tokens, std::size_t dim) {
  using Kernels = kernels::Portable;
  std::int8_t levels[16];
  for (int i = 0; i < 16; ++i) levels[i] = static_cast<std::int8_t>(7 * i - 50);
  const kernels::LevelCodes<B> codes{levels};
  const std::size_t bytes = page_tokens / 16 * (dim / 16) * layout::fragment_bytes(B);
  for (unsigned shift = 0; shift < (1u << B); shift += B == 8 ? 31 : 1) {
    std::vector<std::uint8_t> matrix(count * dim);
    for (std::size_t i = 0; i < matrix.size(); ++i)
      matrix[i] = static_cast<std::uint8_t>((i + i / dim + shift) % (1u << B));
    std::vector<std::uint8_t> fragments(bytes, 0xa5);
    Kernels::pack<B>(side, matrix.data(), 0, count, page_tokens, dim, fragments.data());
    std::vector<bfloat16> scales(page_tokens, to_bfloat16(1.0f));
    kernels::CodedPart part;
    part.dim = dim;
    part.page_tokens = page_tokens;
    part.scales = scales.data();
    part.fragments = fragments.data();
    for (std::size_t t = 0; t < page_tokens; ++t) {
      std::vector<float> row(dim);
      Kernels::decode_row(side, part, codes, t, row.data());
      for (std::size_t i = 0; i < dim; ++i) {
        const unsigned expected = t < count ? matrix[t * dim + i] : 0;
        const std::size_t tile = t / 16, group = i / 16;
        const std::size_t number = side == Side::key ? tile * (dim / 16) + group : group * (page_tokens / 16) + tile;
        ASSERT_EQ(code_at(fragments.data() + number * layout::fragment_bytes(B), B,
                          layout::code_position(side, t % 16, i % 16)),
                  expected);
        const int level = B == 8 ? static_cast<std::int8_t>(expected) : levels[expected];
        ASSERT_EQ(row[i], static_cast<float>(level));
      }
    }
  }
}

TEST(Fragment, L07_PackAndDecode) {
  for (const Side side : {Side::key, Side::value}) {
    for (const std::size_t count : {1u, 15u, 16u, 17u, 48u}) {
      expect_pack_and_decode<1>(side, count, 48, 80);
      expect_pack_and_decode<2>(side, count, 48, 80);
      expect_pack_and_decode<3>(side, count, 48, 80);
      expect_pack_and_decode<4>(side, count, 48, 80);
      expect_pack_and_decode<8>(side, count, 48, 80);
    }
  }
}

}  // namespace
