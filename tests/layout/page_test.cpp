// The page: sections in reading order, aligned, without overlap; and the true bits that the documentation promises.
#include <turboquant/cache/format.hpp>
#include <turboquant/layout/page.hpp>

#include <gtest/gtest.h>

namespace {

using namespace turboquant;

template <class F>
layout::PageShape shape(std::size_t tokens, std::size_t heads, unsigned center_bits, std::size_t dim,
                        std::size_t value_dim) {
  return {tokens,
          heads,
          center_bits,
          {dim, F::key_codec::bits, false},
          {value_dim, F::value_codec::bits, F::value_codec::zero_points}};
}

TEST(Page, SectionsFollowEachOtherOn64Bytes) {
  for (const std::size_t tokens : {16u, 48u, 64u, 256u}) {
    for (const unsigned center : {0u, 8u, 16u}) {
      for (const std::size_t dim : {32u, 80u, 128u, 576u, 1024u}) {
        const auto page = layout::page_layout(shape<Format<PolarQuant<3>, ScalarQuant<4>>>(tokens, 3, center, dim, 48));
        const std::size_t at[] = {page.key.center,   page.key.scales,      page.key.fragments, page.key.end,
                                  page.value.scales, page.value.fragments, page.value.end};
        for (const std::size_t offset : at) EXPECT_EQ(offset % 64, 0u);
        EXPECT_GE(page.key.scales, page.key.center + dim * center / 8);
        EXPECT_GE(page.key.fragments, page.key.scales + 2 * tokens);
        EXPECT_EQ(page.key.end, layout::round_up(page.key.fragments + tokens * dim * 3 / 8, 64));
        EXPECT_EQ(page.value.center, page.key.end);
        EXPECT_EQ(page.value.zero_points, page.value.scales + 2 * tokens);
        EXPECT_GE(page.value.fragments, page.value.zero_points + 2 * tokens);
        EXPECT_EQ(page.header_bytes, center == 0 ? 0u : 64u);
        EXPECT_EQ(page.bytes, page.header_bytes + 3 * page.head_bytes);
      }
    }
  }
}

// Design section 5: 128 coordinates, pages of 64, 8-bit centres: B + 0.125 (scale) + 0.125 (centre) + header.
TEST(Page, TrueBits) {
  const double header = 64.0 * 8 / (64.0 * 8 * 256);
  EXPECT_DOUBLE_EQ(layout::bits_per_coordinate(shape<TQ4>(64, 8, 8, 128, 128)), 4.25 + header);
  EXPECT_DOUBLE_EQ(layout::bits_per_coordinate(shape<TQ3>(64, 8, 8, 128, 128)), 3.25 + header);
  EXPECT_DOUBLE_EQ(layout::bits_per_coordinate(shape<TQ2>(64, 8, 8, 128, 128)), 2.25 + header);
  EXPECT_DOUBLE_EQ(layout::bits_per_coordinate(shape<TQ4>(64, 8, 0, 128, 128)), 4.125);
  EXPECT_DOUBLE_EQ(layout::bits_per_coordinate(shape<Format<PolarQuant<4>, ScalarQuant<4>>>(64, 8, 8, 128, 128)),
                   4.25 + 0.0625 + header);
}

// A01: bytes per token and head at d = 128 are code bytes and scale, and at most 5 % more.
TEST(Page, A01_BytesPerToken) {
  EXPECT_LE(static_cast<double>(layout::page_layout(shape<TQ3>(64, 8, 8, 128, 128)).bytes) / (64 * 8), 2 * 50 * 1.05);
  EXPECT_LE(static_cast<double>(layout::page_layout(shape<TQ4>(64, 8, 8, 128, 128)).bytes) / (64 * 8), 2 * 66 * 1.05);
}

}  // namespace
