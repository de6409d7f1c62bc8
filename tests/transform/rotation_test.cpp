// Signs of the rotation: frozen for every platform, a function of seed and dimension alone.
#include <turboquant/transform/rotation.hpp>

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <vector>

namespace tq = turboquant;

namespace {

std::uint64_t fnv1a(const std::vector<unsigned char>& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

std::vector<unsigned char> negatives(const tq::Rotation& rotation) {
  std::vector<unsigned char> negative;
  for (std::size_t i = 0; i < rotation.dim(); ++i) negative.push_back(rotation.signs()[i] < 0);
  return negative;
}

/// H diag(s), row-major: 1 where the entry is -1.
std::vector<unsigned char> negative_entries(const tq::Rotation& rotation) {
  const std::size_t dim = rotation.dim(), order = tq::base_order(dim), inner = dim / order;
  std::vector<unsigned char> negative;
  for (std::size_t r = 0; r < dim; ++r) {
    for (std::size_t c = 0; c < dim; ++c) {
      const bool base = tq::base_matrix(order)[r / inner * order + c / inner] < 0;
      const bool sylvester = std::popcount((r % inner) & (c % inner)) % 2 != 0;
      negative.push_back((base != sylvester) != (rotation.signs()[c] < 0));
    }
  }
  return negative;
}

constexpr std::size_t kSizes[] = {32,  48,  64,  80,  96,  112, 128, 144, 160, 192, 224,
                                  256, 288, 320, 384, 448, 512, 576, 640, 768, 896, 1024};

}  // namespace

// T01: one seed gives the same signs and the same matrix everywhere. FNV-1a over one byte per entry, 1 for -1, computed
// by a separate program.
TEST(Rotation, T01SignsAndMatrixAreFrozen) {
  struct Golden {
    std::size_t dim;
    std::uint64_t signs, matrix;
  };
  const Golden golden[] = {
      {64, 0x9a7141ba9e67d10bu, 0x134db83461ce3de5u},  {80, 0x291b81315422c161u, 0xb25978dad7267185u},
      {96, 0xc9d89a1c615ceab9u, 0xf4518905fac424c5u},  {112, 0x9caf8f09eb57e3f3u, 0x20b1c0b95ce7f5f5u},
      {128, 0xc5b158356cf7b952u, 0x778297154e44f225u}, {144, 0x0067428925c3a766u, 0x37f0b09f8350b285u},
      {256, 0x4af2dc765f7f1c1bu, 0x6950d97082cdee25u},
  };
  for (const Golden& g : golden) {
    const tq::Rotation rotation(42, g.dim);
    EXPECT_EQ(fnv1a(negatives(rotation)), g.signs) << g.dim;
    EXPECT_EQ(fnv1a(negative_entries(rotation)), g.matrix) << g.dim;
  }
}

TEST(Rotation, SignsAreOnesInAlignedMemory) {
  for (const std::size_t dim : kSizes) {
    const tq::Rotation original(9, dim);
    const std::vector<tq::Rotation> copies(3, original);
    for (const tq::Rotation& rotation : copies) {
      ASSERT_EQ(rotation.dim(), dim);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(rotation.signs()) % 64, 0u);
      for (std::size_t i = 0; i < dim; ++i) {
        ASSERT_TRUE(rotation.signs()[i] == 1.0f || rotation.signs()[i] == -1.0f) << dim << ' ' << i;
      }
    }
    EXPECT_EQ(negatives(copies[2]), negatives(original));
  }
}

TEST(Rotation, EverySeedIsBalancedIncludingZero) {
  int total = 0;
  constexpr int kSeeds = 64, kDim = 1024;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    int sum = 0;
    for (const unsigned char negative : negatives(tq::Rotation(seed, kDim))) sum += negative != 0 ? -1 : 1;
    EXPECT_LT(std::abs(sum), 6 * 32) << seed;  // six standard deviations of 1,024 fair signs
    total += sum;
  }
  EXPECT_LT(std::abs(total), 6 * 256);
}

TEST(Rotation, SeedAndDimensionBothMatter) {
  const auto agreements = [](const tq::Rotation& a, const tq::Rotation& b) {
    int agree = 0;
    for (std::size_t i = 0; i < 512; ++i) agree += a.signs()[i] == b.signs()[i];
    return agree;
  };
  // 512 fair coins have a standard deviation of 11.3: 256 +- 6 of them.
  EXPECT_NEAR(agreements(tq::Rotation(0, 512), tq::Rotation(1, 512)), 256, 68);
  EXPECT_NEAR(agreements(tq::Rotation(42, 512), tq::Rotation(42 + (std::uint64_t(1) << 63), 512)), 256, 68);
  EXPECT_NEAR(agreements(tq::Rotation(42, 512), tq::Rotation(42, 1024)), 256, 68);
  EXPECT_EQ(agreements(tq::Rotation(42, 512), tq::Rotation(42, 512)), 512);
}

TEST(Rotation, UnsupportedSizesRotateNothing) {
  for (const std::size_t dim :
       {std::size_t(0), std::size_t(12), std::size_t(100), std::size_t(2048), std::size_t(-1)}) {
    EXPECT_EQ(tq::Rotation(42, dim).dim(), 0u) << dim;
  }
}

TEST(Rotation, CannotFail) {
  EXPECT_TRUE((std::is_nothrow_constructible_v<tq::Rotation, std::uint64_t, std::size_t>));
  EXPECT_TRUE(std::is_trivially_copyable_v<tq::Rotation>);
  static_assert(tq::Rotation(42, 128).dim() == 128);
}
