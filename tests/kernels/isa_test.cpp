// Every set of kernels that this machine has against the portable one: the same bytes, and the same numbers where the
// order of a sum is fixed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cache/block.hpp"

namespace {

using namespace turboquant;
using tests::Block;
using tests::gaussian_block;

// Where one set fuses products and the other does not, they round differently. AVX-512 fuses by name; compilers may
// where the unit's flags allow it. On Arm g++ fuses in the portable kernels, when it optimises, what the others fuse by
// name.
double tolerance_of(Isa isa) {
#if defined(__FMA__) || (defined(__ARM_FEATURE_FMA) && (defined(__clang__) || !defined(__OPTIMIZE__)))
  static_cast<void>(isa);
  return 2e-4;
#else
  return isa == Isa::avx512 ? 2e-4 : 1e-5;
#endif
}

std::vector<Isa> others() {
  std::vector<Isa> list;
  for (const Isa isa : {Isa::avx2, Isa::avx512, Isa::neon}) {
    if (is_supported(isa)) list.push_back(isa);
  }
  return list;
}

/// Rows of every kind: ordinary, with outliers, tiny, huge, zero, sparse, with an offset in all of a page.
Block rows_of(std::uint64_t seed, std::size_t tokens, std::size_t heads, std::size_t dim) {
  Block rows = gaussian_block(seed, tokens, heads, dim);
  for (std::size_t t = 0; t < tokens; ++t) {
    float* row = rows.row(t);
    for (std::size_t i = 0; i < heads * dim; ++i) {
      if (t % 8 == 1 && i % 17 == 3) row[i] *= 300;
      if (t % 8 == 2) row[i] *= 1e-30F;
      if (t % 8 == 3) row[i] *= 1e26F;
      if (t % 8 == 4) row[i] = 0;
      if (t % 8 == 5 && i % 9 != 0) row[i] = 0;
      if (t % 8 == 6) row[i] = static_cast<float>(i % 3) - 1;
    }
  }
  return rows;
}

template <class F>
void expect_same_bytes(std::size_t dim, std::size_t value_dim, std::size_t page_tokens, std::uint8_t center_bits) {
  const LayerShape shape{.kv_heads = 2,
                         .head_dim = static_cast<std::uint32_t>(dim),
                         .value_dim = static_cast<std::uint32_t>(value_dim),
                         .center_bits = center_bits};
  const PageCodec<F> portable(shape, page_tokens, 3, Isa::portable);
  for (const Isa isa : others()) {
    const PageCodec<F> codec(shape, page_tokens, 3, isa);
    std::vector<std::byte> expected(codec.page_bytes(), std::byte{1}), found(codec.page_bytes(), std::byte{2}),
        workspace(codec.workspace_bytes() + 64);
    void* aligned = workspace.data();
    std::size_t space = workspace.size();
    auto* scratch = static_cast<std::byte*>(std::align(64, codec.workspace_bytes(), aligned, space));
    for (const std::size_t tokens : {page_tokens, page_tokens / 2 + 3, std::size_t{1}}) {
      for (const bool ordinary : {true, false}) {
        const Block keys = ordinary ? gaussian_block(dim, tokens, 2, dim) : rows_of(dim, tokens, 2, dim),
                    values = ordinary ? gaussian_block(7, tokens, 2, value_dim) : rows_of(7, tokens, 2, value_dim);
        ASSERT_OK(portable.encode_page(keys.rows(), values.rows(), expected.data(), scratch));
        ASSERT_OK(codec.encode_page(keys.rows(), values.rows(), found.data(), scratch));
        EXPECT_EQ(expected, found) << to_string(isa) << " dim " << dim << " tokens " << tokens << " page "
                                   << page_tokens;
      }
    }
  }
}

template <class F>
class PerFormat : public testing::Test {};
using Formats = testing::Types<TQ2, TQ3, TQ4, TQ8, Format<PolarQuant<1>, PolarQuant<1>>,
                               Format<PolarQuant<2>, ScalarQuant<2>>, Format<PolarQuant<3>, ScalarQuant<3>>,
                               Format<PolarQuant<3>, PolarQuant<3>>, Format<TrellisQuant<4>, TrellisQuant<4>>,
                               Format<PolarQuant<8>, ScalarQuant<8>>, Format<PolarQuant<4>, ScalarQuant<4>>>;
TYPED_TEST_SUITE(PerFormat, Formats);

TYPED_TEST(PerFormat, BytesAreThoseOfThePortableKernels) {
  for (const std::size_t dim : {32U, 48U, 80U, 128U, 144U, 256U}) {
    if (!is_supported_dim(dim)) continue;
    expect_same_bytes<TypeParam>(dim, 96, 32, 8);
  }
  expect_same_bytes<TypeParam>(64, 1024, 16, 16);
  expect_same_bytes<TypeParam>(576, 64, 64, 0);
}

TYPED_TEST(PerFormat, AttentionIsThatOfThePortableKernels) {
  for (const std::size_t dim : {32U, 80U, 128U, 1024U}) {
    CacheConfig config;
    config.layers = {{.kv_heads = 2, .head_dim = static_cast<std::uint32_t>(dim), .value_dim = 64}};
    config.page_tokens = 48;
    config.recent_tokens = 20;
    KVCache<TypeParam> portable(config, Isa::portable);
    const Block keys = gaussian_block(1, 200, 2, dim), values = gaussian_block(2, 200, 2, 64, 3);
    const SequenceId id = tests::new_sequence(portable);
    ASSERT_OK(tests::append_only(portable, 0, id, keys, values));
    for (const Isa isa : others()) {
      KVCache<TypeParam> cache(config, isa);
      const SequenceId twin = tests::new_sequence(cache);
      ASSERT_OK(tests::append_only(cache, 0, twin, keys, values));
      for (const std::size_t heads : {2U, 4U, 6U, 8U, 10U, 14U, 34U}) {  // groups of 1 to 17
        const Block queries = gaussian_block(heads, 3, heads, dim);
        const tests::Outcome expected = tests::attend_only(portable, 0, id, queries),
                             found = tests::attend_only(cache, 0, twin, queries);
        ASSERT_OK(expected.status);
        ASSERT_OK(found.status);
        // Sums of integers are equal; float sums differ in their order, by 2^-24 of their terms a few dozen times, and
        // where a compiler may fuse their products, in rounding: that is the bound between any two sets.
        for (std::size_t r = 0; r < 3 * heads; ++r) {
          const auto a = expected.out.exact(), b = found.out.exact();
          EXPECT_LE(oracle::distance(a.numbers.data() + r * 64, b.numbers.data() + r * 64, 64),
                    tolerance_of(isa) * oracle::norm(a.numbers.data() + r * 64, 64))
              << to_string(isa) << " dim " << dim << " row " << r << " of " << heads;
          EXPECT_NEAR(expected.lse[r], found.lse[r], 2e-6F * (1 + std::fabs(expected.lse[r])));
        }
        std::vector<float> all(3 * heads * 200), twins(all.size());
        ASSERT_OK(logits(portable, id, 0, queries.rows(), all.data()));
        ASSERT_OK(logits(cache, twin, 0, queries.rows(), twins.data()));
        for (std::size_t i = 0; i < all.size(); ++i)
          ASSERT_NEAR(all[i], twins[i], 1e-5F * std::sqrt(static_cast<float>(dim)) * 3) << i;
      }
    }
  }
}

}  // namespace
