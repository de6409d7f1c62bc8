// Kernels touch nothing before or behind a page: not where readers take whole registers, not in its last fragment.
#include <gtest/gtest.h>

#if defined(__unix__) || defined(__APPLE__)

#include <cstddef>
#include <vector>

#include "cache/block.hpp"
#include "cache/fenced.hpp"

namespace {

using namespace tests;
using turboquant::Format;
using turboquant::LayerShape;
using turboquant::PageCodec;
using turboquant::PageItem;
using turboquant::PageSpan;
using turboquant::PolarQuant;
using turboquant::ScalarQuant;
using turboquant::TrellisQuant;

template <class F>
class Fence : public testing::Test {};
using Formats = testing::Types<Format<PolarQuant<1>, PolarQuant<1>>, Format<PolarQuant<2>, ScalarQuant<2>>,
                               Format<PolarQuant<3>, ScalarQuant<3>>, Format<PolarQuant<4>, ScalarQuant<4>>,
                               Format<PolarQuant<8>, ScalarQuant<8>>, Format<TrellisQuant<2>, TrellisQuant<2>>,
                               Format<TrellisQuant<3>, TrellisQuant<3>>, Format<TrellisQuant<4>, TrellisQuant<4>>,
                               Format<PolarQuant<4>, PolarQuant<4>>, Format<PolarQuant<8>, PolarQuant<8>>>;
TYPED_TEST_SUITE(Fence, Formats);

// Two pages, the second one short, each with a fence on the same side. Groups from one head to more than a block.
template <class F>
void attend_between_fences(std::size_t dim, std::size_t page_tokens, std::uint8_t center_bits, bool at_the_end) {
  SCOPED_TRACE(testing::Message() << "head " << dim << ", page " << page_tokens << ", centre " << int{center_bits});
  LayerShape shape;
  shape.kv_heads = 1;
  shape.head_dim = static_cast<std::uint32_t>(dim);
  shape.center_bits = center_bits;
  const PageCodec<F> codec(shape, page_tokens);
  const std::size_t tokens = page_tokens + 5;
  const Block keys = gaussian_block(1, tokens, 1, dim), values = gaussian_block(2, tokens, 1, dim);
  Fenced<std::byte> first(codec.page_bytes(), at_the_end), second(codec.page_bytes(), at_the_end),
      workspace(codec.workspace_bytes() / 64 * 64 + 64, at_the_end);
  ASSERT_OK(codec.encode_page(keys.slice(0, page_tokens).rows(), values.slice(0, page_tokens).rows(), first.data(),
                              workspace.data()));
  ASSERT_OK(codec.encode_page(keys.slice(page_tokens, tokens).rows(), values.slice(page_tokens, tokens).rows(),
                              second.data(), workspace.data()));
  const std::vector<PageSpan> spans = {{first.data(), 0, static_cast<std::uint32_t>(page_tokens)},
                                       {second.data(), 0, 5}};
  Block read_keys(5, 1, dim, kNaN), read_values(5, 1, dim, kNaN);
  ASSERT_OK(codec.read_page(second.data(), 0, read_keys.rows(), read_values.rows()));
  EXPECT_TRUE(all_finite(read_keys) && all_finite(read_values));
  for (const std::size_t heads : {1U, 2U, 3U, 5U, 8U, 17U}) {
    const Block queries = gaussian_block(3, 1, heads, dim);
    Block out(1, heads, dim, kNaN);
    PageItem item;
    item.pages = spans;
    item.queries = queries.rows();
    item.out = out.rows();
    ASSERT_OK(turboquant::attend_pages(codec, std::span<const PageItem>(&item, 1)));
    EXPECT_TRUE(all_finite(out));
  }
}

TYPED_TEST(Fence, L18_NothingBeyondThePagesIsTouched) {
  for (const std::size_t dim : {32U, 48U, 80U, 128U})
    for (const std::size_t page_tokens : {16U, 64U})
      for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}})
        for (const bool at_the_end : {true, false})
          attend_between_fences<TypeParam>(dim, page_tokens, center_bits, at_the_end);
}

}  // namespace

#endif
