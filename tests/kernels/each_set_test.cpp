// Kernels of each set called by themselves, against the portable ones. A set that this machine lacks is skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "formats/formats.hpp"

#include "cache/block.hpp"

namespace {

using namespace turboquant;
using tests::Block;
using tests::gaussian_block;

// One set of kernels, and whether it fuses products with sums where the portable one need not.
template <Isa kIsa, class KernelSet, bool kFuses>
struct Set {
  static constexpr Isa isa = kIsa;
  using Kernels = KernelSet;
  static constexpr bool fuses = kFuses;
};

template <class S>
class PerSet : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_supported(S::isa)) GTEST_SKIP() << "this CPU has no " << to_string(S::isa) << ", or it is not built";
  }
  // Numbers that both sets round alike, or one of them once more than the other.
  static void expect_same(float portable, float found) {
    if (S::fuses) {
      EXPECT_NEAR(portable, found, 1e-6F * std::fabs(portable));
    } else {
      EXPECT_EQ(portable, found);
    }
  }
};
using Sets = testing::Types<Set<Isa::portable, kernels::Portable, false>
#if defined(TURBOQUANT_HAS_AVX2)
                            ,
                            Set<Isa::avx2, kernels::Avx2, false>
#endif
#if defined(TURBOQUANT_HAS_AVX512)
                            ,
                            Set<Isa::avx512, kernels::Avx512, true>
#endif
#if defined(TURBOQUANT_HAS_NEON)
                            ,
                            Set<Isa::neon, kernels::Neon, true>
#endif
                            >;
struct SetNames {
  template <class S>
  static std::string GetName(int) {
    return to_string(S::isa);
  }
};
TYPED_TEST_SUITE(PerSet, Sets, SetNames);

// A weight and a sum have their bits wherever the range begins and ends: results must not depend on how calls were
// split.
TYPED_TEST(PerSet, SoftmaxIsThePortableOneWhateverItsRange) {
  using K = typename TypeParam::Kernels;
  for (std::size_t round = 0; round < 400; ++round) {
    const auto pick = [&](std::size_t k, std::size_t n) { return oracle::hash(round, k, 9) % n; };
    const std::size_t begin = pick(1, 40), low = begin + pick(2, 20), high = low + 1 + pick(3, 190),
                      end = high + pick(4, 6);
    const Block logits = gaussian_block(round, 1, 1, 256, round % 3 == 0 ? 40 : 3);
    Block a = logits, b = logits, c = logits;
    kernels::SoftmaxState x{1.5F, round % 2 == 0 ? 2.0F : 0.0F}, y = x, z = x;
    const float f = kernels::Portable::softmax_step(a.row(0), begin, end, low, high, x);
    const float g = K::softmax_step(b.row(0), begin, end, low, high, y);
    const float h = K::softmax_step(c.row(0), low, high, low, high, z);
    EXPECT_EQ(x.largest, y.largest);
    this->expect_same(f, g);
    this->expect_same(x.sum, y.sum);
    for (std::size_t t = 0; t < 256; ++t) {
      SCOPED_TRACE(t);
      if (t < begin || t >= end) {
        EXPECT_EQ(logits.row(0)[t], b.row(0)[t]);
      } else {
        this->expect_same(a.row(0)[t], b.row(0)[t]);
      }
    }
    EXPECT_EQ(g, h);
    EXPECT_EQ(y.sum, z.sum) << round;
    EXPECT_EQ(y.largest, z.largest);
    for (std::size_t t = low; t < high; ++t) EXPECT_EQ(b.row(0)[t], c.row(0)[t]) << t;
    // A part of the range, below a largest logit that no part changes.
    b = logits, c = logits;
    kernels::SoftmaxState whole{*std::max_element(b.row(0), b.row(0) + 256), 1}, part = whole;
    const std::size_t middle = low + pick(5, high - low);
    K::softmax_step(b.row(0), begin, end, low, high, whole);
    K::softmax_step(c.row(0), begin, end, middle, high, part);
    for (std::size_t t = middle; t < high; ++t) EXPECT_EQ(b.row(0)[t], c.row(0)[t]) << t;
  }
}

TYPED_TEST(PerSet, WeightsAreThePortableOnes) {
  for (std::size_t round = 0; round < 200; ++round) {
    Block p = gaussian_block(round, 1, 1, 256);
    const Block others = gaussian_block(round + 1000, 2, 1, 256);
    std::vector<bfloat16> scales(256), zero_points(256);
    for (std::size_t t = 0; t < 256; ++t) {
      p.row(0)[t] = round == 0 ? 0 : std::exp(-std::fabs(p.row(0)[t]));
      scales[t] = to_bfloat16(std::fabs(others.row(0)[t]));
      zero_points[t] = to_bfloat16(others.row(1)[t]);
    }
    kernels::CodedPart part;
    part.scales = scales.data();
    if (round % 2 == 0) part.zero_points = zero_points.data();
    const std::size_t begin = round % 7 * 16, end = begin + 16 + round % 9 * 16;
    std::vector<std::int16_t> a(256), b(256);
    const kernels::WeightSums x = kernels::Portable::weigh(part, p.row(0), begin, end, a.data()),
                              y = TypeParam::Kernels::weigh(part, p.row(0), begin, end, b.data());
    EXPECT_EQ(x.coefficient, y.coefficient);
    EXPECT_EQ(x.probability, y.probability);
    EXPECT_NEAR(x.zero_point, y.zero_point, TypeParam::fuses ? 1e-5F : 0);
    for (std::size_t t = 0; t < 256; ++t) EXPECT_NEAR(a[t], b[t], TypeParam::fuses ? 1 : 0) << t;
  }
}

// Rows together or one by one, with the same bits: results must not depend on how calls were split.
TYPED_TEST(PerSet, RowsAreSoftenedTogetherAsOneByOne) {
  using K = typename TypeParam::Kernels;
  constexpr std::size_t kDim = 48;
  for (std::size_t round = 0; round < 120; ++round) {
    const std::size_t rows = 1 + round % 13, begin = round % 5 * 16, end = begin + 16 + round % 8 * 16;
    const Block logits = gaussian_block(round, rows, 1, 256, 4), others = gaussian_block(round + 500, 2, 1, 256);
    std::vector<bfloat16> scales(256), zero_points(256);
    for (std::size_t t = 0; t < 256; ++t) {
      scales[t] = to_bfloat16(std::fabs(others.row(0)[t]));
      zero_points[t] = to_bfloat16(others.row(1)[t]);
    }
    kernels::CodedPart part;
    part.scales = scales.data();
    if (round % 2 == 0) part.zero_points = zero_points.data();
    Block a = logits, b = logits, c = gaussian_block(round + 900, rows, 1, kDim), d = c;
    std::vector<kernels::SoftmaxState> x(rows), y;
    // New rows, rows that stay below their largest logit, and others.
    for (std::size_t r = 0; r < rows; ++r)
      x[r] = {(r + round) % 4 == 1 ? 30.0F : 0.5F, (r + round) % 4 == 0 ? 0.0F : 2.0F};
    y = x;
    std::vector<std::int16_t> v(rows * 256, 7), w = v;
    std::vector<kernels::WeightSums> sums(rows);
    K::soften_rows(part, begin, end, rows, a.row(0), 256, x.data(), v.data(), sums.data(), c.row(0), kDim);
    for (std::size_t r = 0; r < rows; ++r) {
      const bool fresh = !(y[r].sum > 0);
      const float factor = K::softmax_step(b.row(r), begin, end, begin, end, y[r]);
      const kernels::WeightSums sum = K::weigh(part, b.row(r), begin, end, w.data() + r * 256);
      EXPECT_EQ(x[r].largest, y[r].largest);
      EXPECT_EQ(x[r].sum, y[r].sum);
      EXPECT_EQ(sums[r].coefficient, sum.coefficient);
      EXPECT_EQ(sums[r].probability, sum.probability);
      EXPECT_EQ(sums[r].zero_point, sum.zero_point);
      for (std::size_t i = 0; i < kDim; ++i) EXPECT_EQ(c.row(r)[i], d.row(r)[i] * (fresh ? 1.0F : factor)) << r;
    }
    EXPECT_EQ(v, w) << round;
  }
}

// Pages together or one by one, with the same bits. Whatever the bytes, they are codes.
TYPED_TEST(PerSet, PagesAreScoredTogetherAsOneByOne) {
  constexpr std::size_t kDim = 80, kTokens = 48, kPages = 3, kStride = 256;
  for (const std::uint32_t format : {TQ3::id, TQ4::id, TQ8::id}) {
    const detail::Operations& with = *tests::find_operations(format, TypeParam::isa);
    const layout::SideShape side{.dim = kDim, .code_bits = with.key_bits};
    const layout::PageLayout page = layout::page_layout({.tokens = kTokens, .kv_heads = 1, .key = side, .value = side});
    std::vector<std::uint8_t> bytes(kPages * page.bytes);
    std::vector<bfloat16> scales(kPages * kTokens);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(oracle::hash(format, i, 1));
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = to_bfloat16(0.01F * static_cast<float>(1 + i % 17));
    std::vector<kernels::CodedPart> parts(kPages);
    for (std::size_t p = 0; p < kPages; ++p) {
      const std::uint8_t* head = bytes.data() + p * page.bytes + page.head_offset(0);
      parts[p].dim = kDim;
      parts[p].page_tokens = kTokens;
      parts[p].center_bits = 8;
      parts[p].center_scale = 0.03F * static_cast<float>(p + 1);
      parts[p].center = head + page.key.center;
      parts[p].scales = scales.data() + p * kTokens;
      parts[p].fragments = head + page.key.fragments;
    }
    for (const std::size_t rows : {1U, 3U, 4U, 8U, 19U}) {
      const Rotation rotation(1, kDim);
      const Block queries = gaussian_block(rows, rows, 1, kDim);
      std::vector<float> normal(rows * kDim), rotated(rows * kDim), step(rows), unit(rows), factor(rows, 0.1F);
      std::vector<std::int8_t> planes(rows * kDim * with.query_planes);
      kernels::QueryBlock block{
          rows, kDim, normal.data(), rotated.data(), planes.data(), with.query_planes, step.data(), unit.data()};
      for (std::size_t r = 0; r < rows; ++r) with.prepare_query(detail::view_of(rotation), queries.row(r), block, r);
      std::vector<float> together(rows * kStride, 7), single = together;
      with.score_pages(parts, block, factor.data(), together.data(), kStride);
      for (std::size_t p = 0; p < kPages; ++p) {
        with.score(parts[p], 0, kTokens / 16, block, 0, rows, factor.data(), single.data() + p * kTokens, kStride);
      }
      EXPECT_EQ(together, single) << format << ", " << rows << " rows";
    }
  }
}

// Rounded products are not fused with what rounds them: one step more or less of a query moves a logit by 2e-4.
// (As the container calls them: whether a compiler fuses differs from unit to unit.)
TYPED_TEST(PerSet, QueriesHaveThePortableBits) {
  const detail::Operations* portable = tests::find_operations(TQ8::id, Isa::portable);
  const detail::Operations* found = tests::find_operations(TQ8::id, TypeParam::isa);
  for (const std::size_t dim : {32U, 80U, 128U, 1024U}) {
    const Rotation rotation(dim, dim);
    const kernels::RotationView view = detail::view_of(rotation);
    const Block queries = gaussian_block(dim, 100, 1, dim, 5);
    for (const unsigned planes : {1U, 2U}) {
      struct Prepared {
        explicit Prepared(std::size_t dim, unsigned planes) : floats(2 * dim + 2), levels(2 * dim) {
          block.rows = 1;
          block.dim = dim;
          block.plane_count = planes;
          block.normal = floats.data();
          block.rotated = floats.data() + dim;
          block.step = floats.data() + 2 * dim;
          block.unit = block.step + 1;
          block.planes = levels.data();
        }
        std::vector<float> floats;
        std::vector<std::int8_t> levels;
        kernels::QueryBlock block;
      };
      Prepared a(dim, planes), b(dim, planes);
      for (std::size_t t = 0; t < 100; ++t) {
        portable->prepare_query(view, queries.row(t), a.block, 0);
        found->prepare_query(view, queries.row(t), b.block, 0);
        EXPECT_EQ(a.floats, b.floats) << dim << " query " << t;
        EXPECT_EQ(a.levels, b.levels) << dim << " query " << t;
      }
    }
  }
}

TYPED_TEST(PerSet, RotationsHaveThePortableBits) {
  using K = typename TypeParam::Kernels;
  for (std::size_t dim = 32; dim <= 1024; dim += 16) {
    if (!is_supported_dim(dim)) continue;
    const Rotation rotation(dim, dim);
    const kernels::RotationView view = detail::view_of(rotation);
    const Block x = gaussian_block(dim, 1, 1, dim, dim % 3 == 0 ? 1e30 : 1);
    Block a(1, 1, dim), b(1, 1, dim);
    kernels::Portable::rotate(view, x.row(0), a.row(0));
    K::rotate(view, x.row(0), b.row(0));
    EXPECT_TRUE(tests::same_bits(a, b)) << dim;
    kernels::Portable::rotate_back(view, x.row(0), a.row(0));
    K::rotate_back(view, x.row(0), b.row(0));
    EXPECT_TRUE(tests::same_bits(a, b)) << dim;
  }
}

}  // namespace
