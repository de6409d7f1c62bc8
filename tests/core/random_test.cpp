// Counter-based random bits: frozen values, and that every argument bit matters.
#include <turboquant/core/random.hpp>

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <set>

namespace tq = turboquant;

// Computed by a separate program from the formula in the docstring. A change breaks every saved file.
TEST(Random, FrozenValues) {
  constexpr std::uint64_t kAll = ~std::uint64_t(0);
  static_assert(tq::random_bits(0, 0, 0) == 0x568a9b0b1a2c05ecu);
  EXPECT_EQ(tq::random_bits(0, 0, 0), 0x568a9b0b1a2c05ecu);
  EXPECT_EQ(tq::random_bits(42, 0, 0), 0xc5a57e8172f0a9d2u);
  EXPECT_EQ(tq::random_bits(42, 0, 1), 0x61b3e514f002fd8bu);
  EXPECT_EQ(tq::random_bits(42, 1, 0), 0x7b002510c76aceacu);
  EXPECT_EQ(tq::random_bits(1, 2, 3), 0xe44fab56efa387cau);
  EXPECT_EQ(tq::random_bits(kAll, kAll, kAll), 0xdd48de5b91a3fa85u);
}

// The first outputs of the published SplitMix64 for seed 1234567.
TEST(Random, MixerIsSplitMix64) {
  const std::uint64_t published[] = {6457827717110365317u, 3203168211198807973u, 9817491932198370423u};
  std::uint64_t state = 1234567;
  for (const std::uint64_t expected : published) {
    state += tq::detail::kGoldenGamma;
    EXPECT_EQ(tq::detail::mix_bits(state), expected);
  }
}

TEST(Random, CountersOfOneStreamNeverRepeat) {
  for (const std::uint64_t seed : {std::uint64_t(0), std::uint64_t(42)}) {
    std::set<std::uint64_t> seen;
    for (std::uint64_t counter = 0; counter < 20000; ++counter) {
      ASSERT_TRUE(seen.insert(tq::random_bits(seed, 7, counter)).second) << counter;
    }
  }
}

TEST(Random, FlippingAnyInputBitFlipsHalfOfTheOutput) {
  for (int argument = 0; argument < 3; ++argument) {
    for (int bit = 0; bit < 64; ++bit) {
      int flipped = 0;
      constexpr int kTrials = 256;
      for (std::uint64_t trial = 0; trial < kTrials; ++trial) {
        std::uint64_t in[3] = {trial, trial % 5, trial * 3};
        const std::uint64_t before = tq::random_bits(in[0], in[1], in[2]);
        in[argument] ^= std::uint64_t(1) << bit;
        flipped += std::popcount(before ^ tq::random_bits(in[0], in[1], in[2]));
      }
      // 16,384 fair bits have a standard deviation of 64: 8,192 +- 8 of them.
      EXPECT_NEAR(flipped, 32 * kTrials, 512) << "argument " << argument << " bit " << bit;
    }
  }
}

TEST(Random, EveryOutputBitIsFair) {
  for (int bit = 0; bit < 64; ++bit) {
    int ones = 0;
    for (std::uint64_t counter = 0; counter < 16384; ++counter) {
      ones += int(tq::random_bits(0, 0, counter) >> bit & 1u);
    }
    EXPECT_NEAR(ones, 8192, 512) << bit;  // 8 standard deviations
  }
}
