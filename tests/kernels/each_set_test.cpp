// Kernels of each set called by themselves, against the portable ones. A set that this machine lacks is skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
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
    if (!is_supported(S::isa)) GTEST_SKIP() << "this CPU has no " << to_string(S::isa);
  }
  // Numbers that both sets round alike, or one of them once more than the other. Of a power of e the exponent may be
  // off by one rounding of it.
  static void expect_same(float portable, float found) {
    if (S::fuses) {
      const float exponent = portable > 0 ? std::fabs(std::log(portable)) : 0;
      EXPECT_NEAR(portable, found, (1e-6F + 0x1p-24F * exponent) * std::fabs(portable));
    } else {
      EXPECT_EQ(portable, found);
    }
  }
};
// Those that this build has: TURBOQUANT_ISA leaves out all but one.
template <class Found, class... Rest>
struct Built {
  using Sets = Found;
};
template <class... Found, class First, class... Rest>
struct Built<testing::Types<Found...>, First, Rest...>
    : Built<std::conditional_t<is_built(First::isa), testing::Types<Found..., First>, testing::Types<Found...>>,
            Rest...> {};
using Sets = Built<testing::Types<>, Set<Isa::portable, kernels::Portable, false>
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
                   >::Sets;
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

// Scales and zero points of the parts of a step, which together have 256 columns.
struct Step {
  Step(std::uint64_t seed, std::size_t page_tokens, bool has_zero_points) : scales(256), zero_points(256) {
    const Block others = gaussian_block(seed, 2, 1, 256);
    for (std::size_t c = 0; c < 256; ++c) {
      scales[c] = to_bfloat16(std::fabs(others.row(0)[c]));
      zero_points[c] = to_bfloat16(others.row(1)[c]);
    }
    for (std::size_t first = 0; first + page_tokens <= 256; first += page_tokens) {
      kernels::CodedPart part;
      part.page_tokens = page_tokens;
      part.scales = scales.data() + first;
      if (has_zero_points) part.zero_points = zero_points.data() + first;
      parts.push_back(part);
    }
  }
  // The parts that the columns [begin, end) begin and end in, and all between; begin and end then count from the first.
  std::span<const kernels::CodedPart> between(std::size_t& begin, std::size_t& end) const {
    const std::size_t tokens = parts[0].page_tokens, first = begin / tokens;
    const std::size_t count = (end + tokens - 1) / tokens - first;
    begin -= first * tokens, end -= first * tokens;
    return {parts.data() + first, count};
  }
  std::vector<bfloat16> scales, zero_points;
  std::vector<kernels::CodedPart> parts;
};
constexpr std::size_t kPageTokens[] = {16, 48, 64, 128, 256};

TYPED_TEST(PerSet, WeightsAreThePortableOnes) {
  for (std::size_t round = 0; round < 200; ++round) {
    Block p = gaussian_block(round, 1, 1, 256);
    for (std::size_t c = 0; c < 256; ++c) p.row(0)[c] = round == 0 ? 0 : std::exp(-std::fabs(p.row(0)[c]));
    const Step step(round + 1000, kPageTokens[round % 5], round % 2 == 0);
    std::size_t begin = round % 7 * 16, end = begin + 16 + round % 9 * 16;
    const auto parts = step.between(begin, end);
    std::vector<std::int16_t> a(256), b(256);
    std::vector<kernels::WeightSums> x(2 * parts.size()), y = x;
    kernels::Portable::weigh(parts, p.row(0), begin, end, a.data(), x.data(), 2);
    TypeParam::Kernels::weigh(parts, p.row(0), begin, end, b.data(), y.data(), 2);
    for (std::size_t k = 0; k < x.size(); ++k) {
      EXPECT_EQ(x[k].coefficient, x[k % 2].coefficient);
      EXPECT_EQ(x[k].coefficient, y[k].coefficient);
      EXPECT_EQ(x[k].probability, y[k].probability);
      EXPECT_NEAR(x[k].zero_point, y[k].zero_point, TypeParam::fuses ? 1e-5F : 0);
    }
    for (std::size_t t = 0; t < 256; ++t) EXPECT_NEAR(a[t], b[t], TypeParam::fuses ? 1 : 0) << t;
  }
}

// Rows together or one by one, with the same bits: results must not depend on how calls were split.
TYPED_TEST(PerSet, RowsAreSoftenedTogetherAsOneByOne) {
  using K = typename TypeParam::Kernels;
  constexpr std::size_t kDim = 48;
  for (std::size_t round = 0; round < 120; ++round) {
    const std::size_t rows = 1 + round % 13;
    std::size_t begin = round % 7 * 16, end = begin + 16 + round % 10 * 16;
    const Step step(round + 500, kPageTokens[round % 5], round % 2 == 0);
    const auto parts = step.between(begin, end);
    const Block logits = gaussian_block(round, rows, 1, 256, 4);
    Block a = logits, b = logits, c = gaussian_block(round + 900, rows, 1, kDim), d = c;
    std::vector<kernels::SoftmaxState> x(rows), y;
    // New rows, rows that stay below their largest logit, and others.
    for (std::size_t r = 0; r < rows; ++r)
      x[r] = {(r + round) % 4 == 1 ? 30.0F : 0.5F, (r + round) % 4 == 0 ? 0.0F : 2.0F};
    y = x;
    std::vector<std::int16_t> v(rows * 256, 7), w = v;
    std::vector<kernels::WeightSums> sums(rows * parts.size()), one(parts.size());
    K::soften_rows(parts, begin, end, rows, a.row(0), 256, x.data(), v.data(), sums.data(), c.row(0), kDim);
    for (std::size_t r = 0; r < rows; ++r) {
      const bool fresh = !(y[r].sum > 0);
      const float factor = K::softmax_step(b.row(r), begin, end, begin, end, y[r]);
      K::weigh(parts, b.row(r), begin, end, w.data() + r * 256, one.data(), 1);
      EXPECT_EQ(x[r].largest, y[r].largest);
      EXPECT_EQ(x[r].sum, y[r].sum);
      for (std::size_t k = 0; k < parts.size(); ++k) {
        EXPECT_EQ(sums[k * rows + r].coefficient, one[k].coefficient);
        EXPECT_EQ(sums[k * rows + r].probability, one[k].probability);
        EXPECT_EQ(sums[k * rows + r].zero_point, one[k].zero_point);
      }
      for (std::size_t i = 0; i < kDim; ++i) EXPECT_EQ(c.row(r)[i], d.row(r)[i] * (fresh ? 1.0F : factor)) << r;
    }
    EXPECT_EQ(v, w) << round;
  }
}

// Raw keys and values against double precision; rows and tokens together have the bits that each has alone, as results
// must not depend on how rows make blocks, nor on where the tokens of a call begin. What weighs nothing may be
// infinite.
TYPED_TEST(PerSet, RawRowsAreReadByTheFormula) {
  using K = typename TypeParam::Kernels;
  constexpr std::size_t kStride = 16;
  for (const std::size_t dim : {16U, 80U, 128U}) {
    for (const std::size_t rows : {1U, 2U, 3U, 7U, 8U, 13U}) {
      for (const std::size_t count : {1U, 2U, 5U, 16U}) {
        SCOPED_TRACE(testing::Message() << dim << " coordinates, " << rows << " rows, " << count << " tokens");
        Block queries = gaussian_block(dim, rows, 1, dim);
        const Block tokens = gaussian_block(count, count, 1, dim);
        std::vector<bfloat16> held(count * dim);
        for (std::size_t i = 0; i < held.size(); ++i) held[i] = to_bfloat16(tokens.numbers[i]);
        const auto number = [&](std::size_t t, std::size_t i) { return double{to_float(held[t * dim + i])}; };

        kernels::QueryBlock block;
        block.rows = rows, block.dim = dim, block.normal = queries.row(0);
        std::vector<float> factor(rows), logits(rows * kStride), p(rows * kStride);
        for (std::size_t r = 0; r < rows; ++r) factor[r] = 0.3F + static_cast<float>(r);
        K::score_raw(held.data(), count, block, 0, rows, factor.data(), logits.data(), kStride);
        for (std::size_t r = 0; r < rows; ++r) {
          for (std::size_t t = 0; t < count; ++t) {
            double sum = 0, size = 0;
            for (std::size_t i = 0; i < dim; ++i) {
              const double term = double{queries.row(r)[i]} * number(t, i) * double{factor[r]};
              sum += term, size += std::fabs(term);
            }
            EXPECT_NEAR(logits[r * kStride + t], sum, 0x1p-24 * static_cast<double>(dim) * size);
            float alone = 0;
            K::score_raw(held.data() + t * dim, 1, block, r, r + 1, factor.data(), &alone, 1);
            EXPECT_EQ(logits[r * kStride + t], alone);
          }
        }

        const std::size_t unseen = count > 1 ? count - 1 : count;
        for (std::size_t i = 0; i < dim && unseen < count; ++i) held[unseen * dim + i] = to_bfloat16(INFINITY);
        for (std::size_t r = 0; r < rows; ++r) {
          for (std::size_t t = 0; t < count; ++t)
            p[r * kStride + t] = t == unseen || (r + t) % 5 == 4 ? 0 : std::fabs(tokens.row(t)[r]);
        }
        const Block before = gaussian_block(rows, rows, 1, dim);
        Block together = before, alone = before;
        K::accumulate_raw(held.data(), count, dim, rows, p.data(), kStride, together.row(0), dim);
        for (std::size_t r = 0; r < rows; ++r) {
          for (std::size_t t = 0; t < count; ++t)
            K::accumulate_raw(held.data() + t * dim, 1, dim, 1, &p[r * kStride + t], kStride, alone.row(r), dim);
          for (std::size_t i = 0; i < dim; ++i) {
            double sum = double{before.row(r)[i]}, size = std::fabs(sum);
            for (std::size_t t = 0; t < count; ++t) {
              if (!(p[r * kStride + t] > 0)) continue;
              const double term = double{p[r * kStride + t]} * number(t, i);
              sum += term, size += std::fabs(term);
            }
            EXPECT_NEAR(together.row(r)[i], sum, 0x1p-24 * static_cast<double>(2 * count) * size);
            EXPECT_EQ(together.row(r)[i], alone.row(r)[i]);
          }
        }
      }
    }
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
      std::vector<std::int32_t> sums(rows * with.query_planes);
      kernels::QueryBlock block{rows,           kDim,          normal.data(),
                                rotated.data(), planes.data(), with.query_planes,
                                step.data(),    unit.data(),   sums.data()};
      std::copy_n(queries.row(0), normal.size(), normal.begin());
      with.prepare_queries(detail::view_of(rotation), block);
      std::vector<float> together(rows * kStride, 7), single = together;
      with.score_pages(parts, block, factor.data(), together.data(), kStride);
      for (std::size_t p = 0; p < kPages; ++p) {
        with.score(parts[p], 0, kTokens / 16, block, 0, rows, factor.data(), single.data() + p * kTokens, kStride);
      }
      EXPECT_EQ(together, single) << format << ", " << rows << " rows";
    }
  }
}

// A step over several pages against the formula in double precision, cut at both ends, one row without weight. Rows
// together have the bits of rows one by one, and parts that a row does not see change nothing.
TYPED_TEST(PerSet, StepsAreAccumulatedByTheFormula) {
  constexpr std::size_t kDim = 80, kTokens = 48, kPages = 4, kStride = 256;
  for (const std::uint32_t format : {TQ3::id, TQ4::id, TQ8::id}) {
    const detail::Operations& with = *tests::find_operations(format, TypeParam::isa);
    const layout::SideShape side{.dim = kDim, .code_bits = with.value_bits, .zero_points = with.value_zero_points};
    const layout::PageLayout page = layout::page_layout({.tokens = kTokens, .kv_heads = 1, .key = side, .value = side});
    std::vector<std::uint8_t> bytes(kPages * page.bytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(oracle::hash(format, i, 2));
    Step step(format, kTokens, with.value_zero_points);
    step.parts.resize(kPages);
    for (std::size_t k = 0; k < kPages; ++k) {
      const std::uint8_t* head = bytes.data() + k * page.bytes + page.head_offset(0);
      step.parts[k].dim = kDim;
      step.parts[k].center_bits = 8;
      step.parts[k].center_scale = 0.03F * static_cast<float>(k + 1);
      step.parts[k].center = head + page.value.center;
      step.parts[k].fragments = head + page.value.fragments;
    }
    const std::size_t begin = 16, end = 3 * kTokens + 32;
    for (const std::size_t rows : {1U, 2U, 3U, 4U, 8U, 19U}) {
      Block p = gaussian_block(rows, rows, 1, kStride);
      std::vector<std::int16_t> weights(rows * kStride);
      std::vector<kernels::WeightSums> sums(kPages * rows);
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t c = 0; c < kStride; ++c) {
          // Every other row sees two of the pages only.
          const bool sees = r != 2 && (r % 2 == 0 || (c >= kTokens && c < 3 * kTokens));
          p.row(r)[c] = sees ? std::exp(-std::fabs(p.row(r)[c])) : 0;
        }
        with.weigh(step.parts, p.row(r), begin, end, weights.data() + r * kStride, sums.data() + r, rows);
      }
      const Block before = gaussian_block(rows + 1, rows, 1, kDim);
      Block together = before, single = before, fewer = before;
      with.accumulate(step.parts, begin, end, rows, weights.data(), kStride, sums.data(), rows, together.row(0), kDim);
      for (std::size_t r = 0; r < rows; ++r) {
        with.accumulate(step.parts, begin, end, 1, weights.data() + r * kStride, kStride, sums.data() + r, rows,
                        single.row(r), kDim);
        EXPECT_EQ(std::vector<float>(together.row(r), together.row(r) + kDim),
                  std::vector<float>(single.row(r), single.row(r) + kDim))
            << format << ", row " << r << " of " << rows;
        if (r % 2 == 0) continue;
        with.accumulate(std::span(step.parts).subspan(1, 2), 0, 2 * kTokens, 1, weights.data() + r * kStride + kTokens,
                        kStride, sums.data() + rows + r, rows, fewer.row(r), kDim);
        EXPECT_EQ(std::vector<float>(fewer.row(r), fewer.row(r) + kDim),
                  std::vector<float>(single.row(r), single.row(r) + kDim))
            << format << ", row " << r << " of " << rows;
      }
      std::vector<float> decoded(kDim);
      for (std::size_t r = 0; r < rows; ++r) {
        std::vector<double> expected(before.row(r), before.row(r) + kDim), magnitude(kDim);
        for (std::size_t c = begin; c < end; ++c) {
          const kernels::CodedPart& part = step.parts[c / kTokens];
          with.decode_row(layout::Side::value, part, c % kTokens, decoded.data());
          for (std::size_t i = 0; i < kDim; ++i) {
            const double term = static_cast<double>(p.row(r)[c]) * static_cast<double>(decoded[i]);
            expected[i] += term;
            magnitude[i] += std::fabs(term);
          }
        }
        for (std::size_t i = 0; i < kDim; ++i) {
          // Weights are rounded to 1/32766 of the largest, which is that of few tokens.
          EXPECT_NEAR(together.row(r)[i], expected[i], 1e-6 + 3e-4 * magnitude[i]) << format << ", row " << r;
          if (r == 2) {
            EXPECT_EQ(together.row(r)[i], before.row(r)[i]) << "a row without weight was touched";
          }
        }
      }
    }
  }
}

// Queries are rounded to their planes. Rounded products are not fused with what rounds them: one step more or less of a
// query moves a logit by 2e-4.
// (As the container calls them: whether a compiler fuses differs from unit to unit.)
TYPED_TEST(PerSet, QueriesHaveThePortableBits) {
  const detail::Operations* portable = tests::find_operations(TQ8::id, Isa::portable);
  const detail::Operations* found = tests::find_operations(TQ8::id, TypeParam::isa);
  constexpr std::size_t kRows = 101;
  for (const std::size_t dim : {32U, 64U, 80U, 128U, 256U, 1024U}) {
    const Rotation rotation(dim, dim);
    const kernels::RotationView view = detail::view_of(rotation);
    Block queries = gaussian_block(dim, kRows, 1, dim, 5);
    // Among them subnormal, huge and zero ones, whose scaling by powers of two must not show.
    for (std::size_t i = 0; i < dim; ++i) {
      queries.row(0)[i] *= 1e-41F, queries.row(1)[i] *= 1e-38F, queries.row(2)[i] *= 1e35F, queries.row(3)[i] = 0;
    }
    for (const unsigned planes : {1U, 2U}) {
      SCOPED_TRACE(testing::Message() << dim << " coordinates, " << planes << " planes");
      struct Prepared {
        Prepared(const Block& queries, std::size_t dim, unsigned planes)
            : normal(queries.numbers),
              rotated(kRows * dim),
              step(kRows),
              unit(kRows),
              levels(kRows * planes * dim),
              sums(kRows * planes) {
          block = {kRows,  dim,         normal.data(), rotated.data(), levels.data(),
                   planes, step.data(), unit.data(),   sums.data()};
        }
        std::vector<float> normal, rotated, step, unit;
        std::vector<std::int8_t> levels;
        std::vector<std::int32_t> sums;
        kernels::QueryBlock block;
      };
      Prepared a(queries, dim, planes), b(queries, dim, planes);
      portable->prepare_queries(view, a.block);
      found->prepare_queries(view, b.block);
      EXPECT_EQ(a.normal, b.normal);
      EXPECT_EQ(a.rotated, b.rotated);
      EXPECT_EQ(a.step, b.step);
      EXPECT_EQ(a.unit, b.unit);
      EXPECT_EQ(a.levels, b.levels);
      EXPECT_EQ(a.sums, b.sums);
      for (std::size_t t = 0; t < kRows; ++t) {
        const std::int8_t* plane = b.levels.data() + t * planes * dim;
        for (std::size_t p = 0; p < planes; ++p) {
          EXPECT_EQ(b.sums[t * planes + p], std::accumulate(plane + p * dim, plane + (p + 1) * dim, 0));
        }
        // Half a step, and what rounding adds to it.
        for (std::size_t i = 0; i < dim; ++i) {
          const int level = planes == 1 ? plane[i] : plane[i] * 128 + plane[dim + i];
          EXPECT_NEAR(b.step[t] * static_cast<float>(level), b.rotated[t * dim + i], 0.51F * b.step[t]) << t;
        }
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
