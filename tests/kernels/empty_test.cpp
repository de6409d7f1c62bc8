// Every kernel over nothing: no rows, no tokens, no queries, with null pointers where there is nothing to point to.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "cache/block.hpp"

namespace {

using namespace turboquant;
using detail::Operations;
using layout::Side;

constexpr std::size_t kDim = 32;  // the smallest

std::vector<Isa> all_sets() {
  std::vector<Isa> list;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (is_supported(isa)) list.push_back(isa);
  }
  return list;
}

/// Numbers that must not change.
struct Untouched {
  std::vector<float> numbers = std::vector<float>(256, 7.0F);
  ~Untouched() {
    EXPECT_TRUE(std::all_of(numbers.begin(), numbers.end(), [](float x) { return x == 7.0F; })) << "written to";
  }
  float* data() { return numbers.data(); }
};

template <class F>
class Nothing : public testing::Test {};
using Formats = testing::Types<TQ2, TQ3, TQ4, TQ8, Format<PolarQuant<1>, ScalarQuant<2>>,
                               Format<PolarQuant<2>, ScalarQuant<4>>, Format<PolarQuant<3>, ScalarQuant<8>>>;
TYPED_TEST_SUITE(Nothing, Formats);

// A page of which only the shape and room for codes exist.
kernels::CodedPart empty_part(unsigned center_bits) {
  static const std::array<std::uint8_t, 16 * kDim> codes{};
  kernels::CodedPart part;
  part.fragments = codes.data();
  part.dim = kDim;
  part.page_tokens = 16;
  part.center_bits = center_bits;
  return part;
}

TYPED_TEST(Nothing, T04_LogitsOfNoTokensOrNoQueries) {
  for (const Isa isa : all_sets()) {
    const Operations& with = *detail::OperationsOf<TypeParam>::on(isa);
    Untouched logits;
    kernels::QueryBlock block;
    block.dim = kDim;
    block.plane_count = with.query_planes;
    with.score(empty_part(0), 0, 0, block, 0, 0, nullptr, nullptr, 0);
    with.score(empty_part(0), 1, 1, block, 0, 0, nullptr, logits.data(), 16);
    with.score_raw(nullptr, 0, block, 0, 0, nullptr, nullptr, 0);
    with.soft_cap(nullptr, 0, 0, 2);
    with.soft_cap(logits.data(), 5, 5, 2);

    // Queries without tokens.
    const Rotation rotation(1, kDim);
    std::vector<float> normal(3 * kDim), rotated(3 * kDim), step(3), unit(3), factor(3, 1.0F);
    std::vector<std::int8_t> planes(3 * kDim * block.plane_count);
    std::vector<std::int32_t> sums(3 * block.plane_count);
    block.rows = 3;
    block.normal = normal.data(), block.rotated = rotated.data(), block.planes = planes.data();
    block.step = step.data(), block.unit = unit.data(), block.sums = sums.data();
    const tests::Block queries = tests::gaussian_block(1, 3, 1, kDim);
    std::copy_n(queries.row(0), normal.size(), normal.begin());
    with.prepare_queries(detail::view_of(rotation), block);
    with.score(empty_part(0), 0, 0, block, 0, 3, factor.data(), logits.data(), 16);
    with.score_raw(nullptr, 0, block, 0, 3, factor.data(), logits.data(), 16);

    // Tokens without queries.
    const std::vector<bfloat16> keys(16 * kDim);
    with.score_raw(keys.data(), 16, block, 1, 1, factor.data(), logits.data(), 16);
  }
}

TYPED_TEST(Nothing, T04_OutputsOfNoTokensOrNoRows) {
  for (const Isa isa : all_sets()) {
    const Operations& with = *detail::OperationsOf<TypeParam>::on(isa);
    Untouched out;
    const kernels::CodedPart part = empty_part(0);
    kernels::WeightSums none{1, 1, 1};
    with.weigh({&part, 1}, nullptr, 0, 0, nullptr, &none, 1);
    EXPECT_EQ(none.coefficient, 0.0F);
    EXPECT_EQ(none.probability, 0.0F);
    EXPECT_EQ(none.zero_point, 0.0F);
    std::array<float, 16> p{};
    std::array<std::int16_t, 16> weights{};
    with.weigh({&part, 1}, p.data(), 4, 4, weights.data(), &none, 1);
    with.accumulate({&part, 1}, 0, 0, 0, nullptr, 0, nullptr, 0, nullptr, 0);
    with.accumulate({&part, 1}, 0, 0, 0, nullptr, 0, nullptr, 0, out.data(), kDim);
    const std::array<kernels::WeightSums, 3> sums{};
    std::array<std::int16_t, 48> no_weights{};
    with.accumulate({&part, 1}, 0, 0, 3, no_weights.data(), 16, sums.data(), 3, out.data(), kDim);
    with.accumulate_raw(nullptr, 0, kDim, 0, nullptr, 0, nullptr, 0);
    with.accumulate_raw(nullptr, 0, kDim, 3, nullptr, 0, out.data(), kDim);
    const std::vector<bfloat16> values(16 * kDim);
    with.accumulate_raw(values.data(), 16, kDim, 0, nullptr, 0, out.data(), kDim);
    with.combine(nullptr, 1, nullptr, 1, 0);
    with.combine(out.data(), 2, nullptr, 1, 0);
  }
}

TYPED_TEST(Nothing, T04_CentresOfNoRows) {
  for (const Isa isa : all_sets()) {
    const Operations& with = *detail::OperationsOf<TypeParam>::on(isa);
    Untouched rows;
    for (const unsigned bits : {8U, 16U}) {
      std::array<std::uint8_t, 2 * kDim> center{};
      kernels::CodedPart part = empty_part(bits);
      part.center = center.data();
      with.subtract_center(nullptr, 0, part);
      with.subtract_center(rows.data(), 0, part);
    }
  }
}

}  // namespace
