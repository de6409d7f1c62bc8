// Hadamard matrices: exact orthogonality in integers for every supported size, refusal of all others in words.
#include <turboquant/transform/hadamard.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

namespace tq = turboquant;

namespace {

const std::vector<std::size_t> kSizes = {32,  48,  64,  80,  96,  112, 128, 144, 160, 192, 224,
                                         256, 288, 320, 384, 448, 512, 576, 640, 768, 896, 1024};
constexpr std::size_t kOrders[] = {1, 12, 20, 28, 36};

bool is_listed(std::size_t dim) { return std::find(kSizes.begin(), kSizes.end(), dim) != kSizes.end(); }

/// H(dim) over base(order) by the entry formula: 1 where the entry is -1, rows packed into 64-bit words.
std::vector<std::vector<std::uint64_t>> packed_rows(std::size_t dim, std::size_t order) {
  const float* base = tq::base_matrix(order);
  const std::size_t inner = dim / order;
  std::vector<std::vector<std::uint64_t>> rows(dim, std::vector<std::uint64_t>((dim + 63) / 64));
  for (std::size_t r = 0; r < dim; ++r) {
    for (std::size_t c = 0; c < dim; ++c) {
      const bool outer_negative = base[r / inner * order + c / inner] < 0;
      const bool inner_negative = std::popcount((r % inner) & (c % inner)) % 2 != 0;
      if (outer_negative != inner_negative) rows[r][c / 64] |= std::uint64_t(1) << (c % 64);
    }
  }
  return rows;
}

/// H(dim) x by the fast algorithm, in integers: butterflies inside the blocks, the base matrix across them.
std::vector<int> transform(std::vector<int> x, std::size_t order) {
  const float* base = tq::base_matrix(order);
  const std::size_t inner = x.size() / order;
  for (std::size_t half = 1; half < inner; half *= 2) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if ((i % inner & half) != 0) continue;
      const int a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  std::vector<int> y(x.size());
  for (std::size_t r = 0; r < order; ++r) {
    for (std::size_t c = 0; c < order; ++c) {
      for (std::size_t i = 0; i < inner; ++i) y[r * inner + i] += int(base[r * order + c]) * x[c * inner + i];
    }
  }
  return y;
}

std::uint64_t fnv1a(const std::vector<unsigned char>& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

}  // namespace

TEST(Hadamard, SupportedSizesAreTheListedOnes) {
  for (std::size_t dim = 0; dim <= 5000; ++dim) EXPECT_EQ(tq::is_supported_dim(dim), is_listed(dim)) << dim;
  EXPECT_FALSE(tq::is_supported_dim(std::size_t(-1)));
  EXPECT_FALSE(tq::is_supported_dim(std::size_t(1) << 40));
  static_assert(tq::is_supported_dim(128) && !tq::is_supported_dim(100));
}

TEST(Hadamard, BaseOrdersFollowTheOddPart) {
  EXPECT_EQ(tq::base_order(128), 1u);
  EXPECT_EQ(tq::base_order(96), 12u);
  EXPECT_EQ(tq::base_order(80), 20u);
  EXPECT_EQ(tq::base_order(112), 28u);
  EXPECT_EQ(tq::base_order(576), 36u);
  for (std::size_t dim = 0; dim <= 2100; ++dim) {
    const std::size_t order = tq::base_order(dim);
    EXPECT_EQ(order != 0, is_listed(dim)) << dim;
    if (order == 0) continue;
    EXPECT_EQ(dim % order, 0u) << dim;
    EXPECT_TRUE(std::has_single_bit(dim / order)) << dim;
    EXPECT_NE(tq::base_matrix(order), nullptr) << dim;
  }
}

TEST(Hadamard, BaseMatricesAreOrthogonalInIntegers) {
  for (const std::size_t order : kOrders) {
    const float* base = tq::base_matrix(order);
    ASSERT_NE(base, nullptr) << order;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(base) % 64, 0u);
    for (std::size_t i = 0; i < order * order; ++i)
      ASSERT_TRUE(base[i] == 1.0f || base[i] == -1.0f) << order << ' ' << i;
    for (std::size_t a = 0; a < order; ++a) {
      for (std::size_t b = 0; b < order; ++b) {
        int rows = 0, columns = 0;
        for (std::size_t i = 0; i < order; ++i) {
          rows += int(base[a * order + i]) * int(base[b * order + i]);
          columns += int(base[i * order + a]) * int(base[i * order + b]);
        }
        ASSERT_EQ(rows, a == b ? int(order) : 0) << order << ' ' << a << ' ' << b;
        ASSERT_EQ(columns, a == b ? int(order) : 0) << order << ' ' << a << ' ' << b;
      }
    }
  }
}

TEST(Hadamard, SymmetryIsAsDocumented) {
  for (const std::size_t order : kOrders) {
    const float* base = tq::base_matrix(order);
    bool symmetric = true;
    for (std::size_t a = 0; a < order; ++a) {
      for (std::size_t b = 0; b < order; ++b) symmetric &= base[a * order + b] == base[b * order + a];
    }
    EXPECT_EQ(symmetric, order != 12 && order != 20) << order;
  }
}

TEST(Hadamard, NoOtherBaseMatrices) {
  for (std::size_t order = 0; order <= 100; ++order) {
    const bool listed = std::find(std::begin(kOrders), std::end(kOrders), order) != std::end(kOrders);
    EXPECT_EQ(tq::base_matrix(order) != nullptr, listed) << order;
  }
}

TEST(Hadamard, EverySupportedSizeIsOrthogonalInIntegers) {
  for (const std::size_t dim : kSizes) {
    const auto rows = packed_rows(dim, tq::base_order(dim));
    for (std::size_t a = 0; a < dim; ++a) {
      for (std::size_t b = 0; b <= a; ++b) {
        int different = 0;
        for (std::size_t word = 0; word < rows[a].size(); ++word)
          different += std::popcount(rows[a][word] ^ rows[b][word]);
        ASSERT_EQ(int(dim) - 2 * different, a == b ? int(dim) : 0) << dim << ' ' << a << ' ' << b;
      }
    }
  }
}

TEST(Hadamard, FastAlgorithmGivesTheColumnsOfTheEntryFormula) {
  for (const std::size_t dim : kSizes) {
    const std::size_t order = tq::base_order(dim);
    const auto rows = packed_rows(dim, order);
    for (std::size_t c = 0; c < dim; c += dim / 16 + 1) {
      std::vector<int> unit(dim);
      unit[c] = 1;
      const std::vector<int> column = transform(unit, order);
      for (std::size_t r = 0; r < dim; ++r) {
        ASSERT_EQ(column[r], (rows[r][c / 64] >> (c % 64) & 1u) != 0 ? -1 : 1) << dim << ' ' << r << ' ' << c;
      }
    }
  }
}

// L11: the base-12 transform applied to all unit vectors; 12 and 24 are the small sizes that showed the reported fault.
TEST(Hadamard, L11BaseTwelveIsOrthogonalAtEverySize) {
  for (const std::size_t dim : {12u, 24u, 48u, 96u, 192u}) {
    std::vector<std::vector<int>> columns;
    for (std::size_t i = 0; i < dim; ++i) {
      std::vector<int> unit(dim);
      unit[i] = 1;
      columns.push_back(transform(unit, 12));
    }
    for (std::size_t a = 0; a < dim; ++a) {
      for (std::size_t b = 0; b < dim; ++b) {
        int dot = 0;
        for (std::size_t i = 0; i < dim; ++i) dot += columns[i][a] * columns[i][b];
        ASSERT_EQ(dot, a == b ? int(dim) : 0) << dim << ' ' << a << ' ' << b;
      }
    }
  }
}

// Computed by a separate program from Paley's definitions: one byte per entry, 1 for -1. A change breaks every file.
TEST(Hadamard, BaseMatricesAreFrozen) {
  const std::uint64_t expected[] = {0xaf63bd4c8601b7dfu, 0xc86487de9bddaa81u, 0x61f2379a6d18ba79u, 0x1ac8198321ab1a55u,
                                    0xd65531a4ce7f9935u};
  for (std::size_t i = 0; i < 5; ++i) {
    std::vector<unsigned char> bytes;
    for (std::size_t e = 0; e < kOrders[i] * kOrders[i]; ++e) bytes.push_back(tq::base_matrix(kOrders[i])[e] < 0);
    EXPECT_EQ(fnv1a(bytes), expected[i]) << kOrders[i];
  }
}

TEST(Hadamard, RefusalNamesTheRuleAndTheTwoNearestSizes) {
  const auto expect = [](std::size_t dim, std::size_t below, std::size_t above) {
    EXPECT_EQ(
        tq::why_unsupported_dim(dim),
        "head size " + std::to_string(dim) +
            " is not supported: it must be a multiple of 16 of the form 2^k * {1, 3, 5, 7, 9} from 32 to 1024; the "
            "nearest supported sizes are " +
            std::to_string(below) + " and " + std::to_string(above));
  };
  for (std::size_t dim = 0; dim <= 1100; ++dim) {
    if (is_listed(dim)) {
      EXPECT_EQ(tq::why_unsupported_dim(dim), "") << dim;
    } else if (dim < 32) {
      expect(dim, 32, 48);
    } else if (dim > 1024) {
      expect(dim, 896, 1024);
    } else {
      const auto above = std::upper_bound(kSizes.begin(), kSizes.end(), dim);
      expect(dim, *(above - 1), *above);
    }
  }
  expect(100, 96, 112);
  expect(std::size_t(-1), 896, 1024);
}
