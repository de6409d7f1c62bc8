// Numeric faults from public bug reports that concern codes: what rows of every kind are read as. Where a report names
// side data, files or instruction sets that this library does not have, the test takes the nearest thing that it has.
// Those that concern queries, logits and weights are in cases_attention_test. N13 and N15 concern the one-bit sketch:
// codec/qjl.
#include <gtest/gtest.h>

#include <array>
#include <cfenv>
#include <cmath>
#include <cstddef>
#include <limits>
#include <turboquant/transform/rotation.hpp>
#include <type_traits>
#include <vector>

#include "cache/block.hpp"
#include "cache/coded_rows.hpp"
#include "cache/mirror.hpp"
#include "cache/sanitized.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::SequenceId;
using turboquant::TQ2;
using turboquant::TQ3;
using turboquant::TQ4;
using turboquant::TQ8;

TEST(NumericCases, N01_ZeroVectors) {
  for_each_format([](auto tag, unsigned) {
    using F = typename decltype(tag)::type;
    for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}})
      for (const float zero : {0.0F, -0.0F}) {
        std::feclearexcept(FE_ALL_EXCEPT);
        CodedRows<F> rows(coded_config(1, 128, 0, center_bits), Block(20, 1, 128, zero), Block(20, 1, 128, zero));
        const Block query(1, 1, 128, 1.0F);
        const std::vector<float> logits = rows.logits(query);
        const Outcome outcome = rows.attend(query);
        EXPECT_EQ(std::fetestexcept(FE_INVALID | FE_DIVBYZERO), 0);
        for (const float x : rows.decoded_keys.numbers) ASSERT_EQ(x, 0.0F);
        for (const float x : rows.decoded_values.numbers) ASSERT_EQ(x, 0.0F);
        for (const float x : logits) ASSERT_EQ(x, 0.0F);
        for (const float x : outcome.out.numbers) ASSERT_EQ(x, 0.0F);
        EXPECT_NEAR(outcome.lse[0], std::log(20.0F), 1e-6F);
      }
  });
  // One zero row among others.
  Block keys = gaussian_block(1, 16, 1, 128), values = gaussian_block(2, 16, 1, 128);
  for (std::size_t i = 0; i < 128; ++i) keys.row(7)[i] = values.row(7)[i] = 0;
  CodedRows<TQ4> rows(coded_config(1, 128, 0, 0), keys, values);
  for (std::size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(rows.decoded_keys.row(7)[i], 0.0F);
    EXPECT_EQ(rows.decoded_values.row(7)[i], 0.0F);
  }
}

TEST(NumericCases, N02_TinyVectors) {
  for_each_format([](auto tag, unsigned bits) {
    using F = typename decltype(tag)::type;
    for (const float m : {1.4e-45F, 1e-40F, 1e-38F, 1e-30F, 1e-24F, 1e-20F, 1e-8F, 6e-8F, 1e-7F})
      for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}}) {
        std::vector<float> row(128);
        for (std::size_t i = 0; i < 128; ++i)
          row[i] = m * (i % 2 == 0 ? 1.0F : -1.0F) * (1 + static_cast<float>(i) / 128);
        const Block block = repeated(row, 16);
        CodedRows<F> rows(coded_config(1, 128, 0, center_bits), block, block);
        const Block query(1, 1, 128, 1.0F);
        const oracle::Tensor truth = block.bfloat16_rounded();
        const double size = oracle::norm(truth.row(0, 0), 128);
        // Scales are bfloat16. Below 2^-126 * 127 a scale loses bits and then vanishes: there only "no larger than the
        // vector" is asked. A single row scatters around the codec's mean error: twice the bound; half as much again
        // for the min-max grid.
        const double allowed = size < 1e-35 ? size * 1.1 : size * std::sqrt(3 * distortion_bound(bits));
        for (const Block* decoded : {&rows.decoded_keys, &rows.decoded_values}) {
          ASSERT_TRUE(all_finite(*decoded));
          for (std::size_t t = 0; t < 16; ++t)
            ASSERT_LE(oracle::distance(decoded->exact().row(t, 0), truth.row(t, 0), 128), allowed)
                << m << " bits " << bits;
        }
        for (const float x : rows.logits(query))
          ASSERT_LE(std::fabs(static_cast<double>(x)), std::sqrt(128.0) * (size + allowed));
        ASSERT_TRUE(all_finite(rows.attend(query).out));
      }
  });
}

TEST(NumericCases, N03_ConstantVectors) {
  for_each_format([](auto tag, unsigned bits) {
    using F = typename decltype(tag)::type;
    std::vector<float> one_ulp(128, 1.0F);
    one_ulp[127] = std::nextafter(1.0F, 2.0F);
    for (const std::vector<float>& row : {std::vector<float>(128, 3.25F), std::vector<float>(128, -65504.0F), one_ulp})
      for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}}) {
        const Block block = repeated(row, 16);
        CodedRows<F> rows(coded_config(1, 128, 0, center_bits), block, block);
        // Rotated, constants are not constant: the codec's bound, tripled for a single row. With a centre nearly all of
        // a page of equal rows is in the centre, whose own rounding is 0.0114 of it.
        const double relative = std::sqrt(3 * distortion_bound(bits)) * (center_bits == 0   ? 1
                                                                         : center_bits == 8 ? 0.0114
                                                                                            : 1e-3) +
                                1e-5;
        const oracle::Tensor truth = block.bfloat16_rounded();
        const double size = oracle::norm(truth.row(0, 0), 128);
        for (std::size_t t = 0; t < 16; ++t) {
          EXPECT_LE(oracle::distance(rows.decoded_values.exact().row(t, 0), truth.row(t, 0), 128), relative * size)
              << bits << " center " << int{center_bits};
          EXPECT_LE(oracle::distance(rows.decoded_keys.exact().row(t, 0), truth.row(t, 0), 128), relative * size)
              << bits << " center " << int{center_bits};
        }
        const Outcome outcome = rows.attend(Block(1, 1, 128, 0.5F), 1e-6F);
        EXPECT_LE(oracle::distance(outcome.out.exact().row(0, 0), truth.row(0, 0), 128), (relative + 1e-4) * size);
      }
  });
}

TEST(NumericCases, N04_OutlierBeyondTheRangeOfHalf) {
  for_each_format([](auto tag, unsigned bits) {
    using F = typename decltype(tag)::type;
    std::vector<float> row(128);
    row[0] = -125000;
    for (std::size_t i = 1; i < 128; ++i) row[i] = -1 + 5 * static_cast<float>(i) / 127;
    const Block block = repeated(row, 1);
    for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}}) {
      CodedRows<F> rows(coded_config(1, 128, 0, center_bits), block, block);
      const Outcome outcome = rows.attend(gaussian_block(1, 1, 1, 128));
      const oracle::Tensor truth = block.bfloat16_rounded();
      const double allowed = std::sqrt(3 * distortion_bound(bits)) * 125000;
      EXPECT_TRUE(all_finite(rows.decoded_values));
      EXPECT_LE(oracle::distance(rows.decoded_values.exact().row(0, 0), truth.row(0, 0), 128), allowed);
      // A single token has weight 1: the output is its decoded row.
      EXPECT_LE(oracle::distance(outcome.out.exact().row(0, 0), rows.decoded_values.exact().row(0, 0), 128),
                125000 * 0x1p-13);
    }
  });
}

TEST(NumericCases, N05_SumsBeyondTheRangeOfHalf) {
  std::vector<float> value(128);
  for (std::size_t i = 0; i < 128; ++i) value[i] = 4000 + static_cast<float>(i);
  for_each_format([&](auto tag, unsigned bits) {
    using F = typename decltype(tag)::type;
    for (const std::size_t tokens : {1U, 64U})
      for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}}) {
        CodedRows<F> rows(coded_config(1, 128, 0, center_bits, 64), gaussian_block(1, tokens, 1, 128),
                          repeated(value, tokens));
        const Outcome outcome = rows.attend(Block(1, 1, 128, 600.0F));
        const oracle::Tensor truth = repeated(value, 1).bfloat16_rounded();
        const double size = oracle::norm(truth.row(0, 0), 128);
        EXPECT_LE(oracle::distance(outcome.out.exact().row(0, 0), truth.row(0, 0), 128),
                  (std::sqrt(3 * distortion_bound(bits)) + 0x1p-10) * size);
        EXPECT_TRUE(turboquant::is_finite(outcome.lse[0]));
      }
  });
}

TEST(NumericCases, N06_HugeVectors) {
  const auto one_hot = [](float first, float rest) {
    std::vector<float> row(128, rest);
    row[0] = first;
    return row;
  };
  const float limit = 0x1p96F;
  for_each_format([&](auto tag, unsigned bits) {
    using F = typename decltype(tag)::type;
    for (const std::uint8_t center_bits : {std::uint8_t{0}, std::uint8_t{8}, std::uint8_t{16}}) {
      const CacheConfig config = coded_config(1, 128, 0, center_bits);
      for (const std::vector<float>& row : {one_hot(7e28F, 0), std::vector<float>(128, 7e28F), one_hot(65504, 1),
                                            std::vector<float>(128, limit), std::vector<float>(128, -limit)}) {
        // Other signs in every other row: the centre is zero, then the residual is as large as a row can be.
        Block block = repeated(row, 16);
        for (std::size_t t = 1; t < 16; t += 2)
          for (std::size_t i = 0; i < 128; ++i) block.row(t)[i] = -block.row(t)[i];
        CodedRows<F> rows(config, block, block);
        ASSERT_TRUE(all_finite(rows.decoded_keys));
        ASSERT_TRUE(all_finite(rows.decoded_values));
        const oracle::Tensor truth = block.bfloat16_rounded();
        std::vector<double> scaled(128), decoded(128);
        for (std::size_t t = 0; t < 16; ++t)
          EXPECT_LE(oracle::distance(rows.decoded_keys.exact().row(t, 0), truth.row(t, 0), 128),
                    std::sqrt(3 * distortion_bound(bits)) * oracle::norm(truth.row(t, 0), 128));
        Block query(1, 1, 128);
        query.row(0)[0] = 1;
        const std::vector<float> logits = rows.logits(query);
        for (std::size_t t = 0; t < 16; ++t)
          EXPECT_LE(std::fabs(static_cast<double>(logits[t]) - truth.row(t, 0)[0]),
                    std::sqrt(3 * distortion_bound(bits)) * oracle::norm(truth.row(t, 0), 128));
        query.row(0)[0] = 1e-38F;
        ASSERT_TRUE(all_finite(rows.attend(query).out));
      }
      KVCache<F> cache(config);
      const SequenceId id = new_sequence(cache);
      const Block good(1, 1, 128, 1.0F);
      for (const std::vector<float>& row : {std::vector<float>(128, std::numeric_limits<float>::max()),
                                            one_hot(limit * 1.01F, 0), one_hot(-limit * 1.01F, 0)}) {
        EXPECT_STATUS(non_finite_input, append_only(cache, 0, id, repeated(row, 1), good));
        EXPECT_STATUS(non_finite_input, append_only(cache, 0, id, good, repeated(row, 1)));
      }
      // What rounds to the limit is accepted.
      EXPECT_OK(append_only(cache, 0, id, repeated(one_hot(std::nextafter(limit, 2 * limit), 0), 1), good));
      EXPECT_EQ(cache.length(id), 1U);
    }
  });
}

template <class F>
void n09(unsigned bits) {
  // A page has no shared scale: without centring, whose mean the largest rows would rule.
  const CacheConfig config = coded_config(1, 128, 0, 0, 64);
  const std::array<double, 4> norms{1e-2, 1, 1e2, 1e4};
  Block keys = gaussian_block(1, 256, 1, 128);
  for (std::size_t t = 0; t < 256; ++t) {
    const double factor = norms[t % 4] / norm_of(keys.row(t), 128);
    for (std::size_t i = 0; i < 128; ++i)
      keys.row(t)[i] = static_cast<float>(factor * static_cast<double>(keys.row(t)[i]));
  }
  CodedRows<F> rows(config, keys, gaussian_block(2, 256, 1, 128));
  const Block queries = gaussian_block(3, 8, 1, 128);
  const std::vector<float> logits = rows.logits(queries);
  std::array<double, 4> squares{};
  for (std::size_t q = 0; q < 8; ++q)
    for (std::size_t t = 0; t < 256; ++t) {
      const double error = (static_cast<double>(logits[q * 256 + t]) - product_of(queries.row(q), keys.row(t), 128)) /
                           (norm_of(queries.row(q), 128) * norm_of(keys.row(t), 128));
      EXPECT_LE(std::fabs(error), six_sigma(bits, 128));
      squares[t % 4] += error * error / (8 * 64);
    }
  // The same distribution at every norm: 512 samples, a variance good to 6 %, five of these.
  for (const double square : squares) EXPECT_NEAR(square / squares[1], 1, 0.45);

  // Massive channels: the error follows the centred norm.
  Block outliers = gaussian_block(4, 64, 1, 128);
  for (std::size_t t = 0; t < 64; ++t)
    for (std::size_t i = 0; i < 26; ++i) outliers.row(t)[i * 4] *= 160;
  CodedRows<F> massive(coded_config(1, 128, 0, 8, 64), outliers, gaussian_block(2, 64, 1, 128));
  const std::vector<float> massive_logits = massive.logits(queries);
  for (std::size_t q = 0; q < 8; ++q)
    for (std::size_t t = 0; t < 64; ++t)
      EXPECT_LE(
          std::fabs(static_cast<double>(massive_logits[q * 64 + t]) - product_of(queries.row(q), outliers.row(t), 128)),
          1.1 * six_sigma(bits, 128) * norm_of(queries.row(q), 128) * norm_of(outliers.row(t), 128));
}
TEST(NumericCases, N09_NormsOfManySizesTq3) { n09<TQ3>(3); }
TEST(NumericCases, N09_NormsOfManySizesTq4) { n09<TQ4>(4); }

template <class F>
double mean_distortion(const Block& rows, const Block& decoded) {
  double error = 0, energy = 0;
  for (std::size_t t = 0; t < rows.tokens; ++t) {
    error += std::pow(distance_of(rows.row(t), decoded.row(t), rows.dim), 2);
    energy += std::pow(norm_of(rows.row(t), rows.dim), 2);
  }
  return error / energy;
}

template <class F>
void n11(unsigned bits) {
  // A codebook for another spread shows in norms and distortion, at every size and scale.
  const double lloyd_max = bits == 3 ? 0.03455 : 0.0095;
  constexpr std::size_t kRows = kSanitized ? 150 : 600;
  for (const std::size_t dim : {64U, 80U, 96U, 128U, 256U}) {
    std::vector<double> ratios;
    for (const double scale : {1.0, 1e-3, 1e3}) {
      const Block keys = gaussian_block(dim, kRows, 1, dim, scale),
                  values = gaussian_block(dim + 1, kRows, 1, dim, scale);
      const CodedRows<F> rows(coded_config(1, dim, 0, 0, 16), keys, values);
      double key_ratio = 0, value_ratio = 0;
      for (std::size_t t = 0; t < kRows; ++t) {
        key_ratio += norm_of(rows.decoded_keys.row(t), dim) / norm_of(keys.row(t), dim) / kRows;
        value_ratio += norm_of(rows.decoded_values.row(t), dim) / norm_of(values.row(t), dim) / kRows;
      }
      // Keys: unbiased scale, 1 / cos of the angle; values: least squares, the cosine.
      EXPECT_GE(key_ratio, 0.99);
      EXPECT_LE(key_ratio, 1.02);
      EXPECT_GE(value_ratio, 0.97);
      EXPECT_LE(value_ratio, 1.01);
      // 600 rows: a mean good to half a per cent or so (150: one per cent); nothing codes below the rate-distortion
      // bound 4^-bits.
      const double value_distortion = mean_distortion<F>(values, rows.decoded_values);
      EXPECT_LE(value_distortion, 1.05 * lloyd_max) << dim << " scale " << scale;
      EXPECT_GE(value_distortion, std::pow(4.0, -static_cast<double>(bits)));
      EXPECT_LE(mean_distortion<F>(keys, rows.decoded_keys), 1.05 * lloyd_max / (1 - lloyd_max));
      ratios.push_back(key_ratio);
    }
    EXPECT_NEAR(ratios[1] / ratios[0], 1, 0.01);
    EXPECT_NEAR(ratios[2] / ratios[0], 1, 0.01);
  }
}
TEST(NumericCases, N11_CodebookFitsTheRotationTq3) { n11<TQ3>(3); }
TEST(NumericCases, N11_CodebookFitsTheRotationTq4) { n11<TQ4>(4); }

TEST(NumericCases, N12_MoreBitsAreBetterForEverySeed) {
  for (std::uint64_t seed = 0; seed < (kSanitized ? 10 : 100); ++seed) {
    const Block rows = gaussian_block(100 + seed, 16, 1, 128);
    CacheConfig config = coded_config(1, 128, 0, 0);
    config.seed = seed;
    const double two = mean_distortion<TQ2>(rows, CodedRows<TQ2>(config, rows, rows).decoded_values),
                 three = mean_distortion<TQ3>(rows, CodedRows<TQ3>(config, rows, rows).decoded_values),
                 four = mean_distortion<TQ4>(rows, CodedRows<TQ4>(config, rows, rows).decoded_values),
                 eight = mean_distortion<TQ8>(rows, CodedRows<TQ8>(config, rows, rows).decoded_values);
    EXPECT_LT(three, two);
    EXPECT_LT(four, three);
    EXPECT_LT(eight, four);
  }
}

template <class F>
void n14(unsigned bits) {
  // Keys that point where the query points: shrinkage would show. 2,048 pairs a time: a standard error of
  // sqrt(D / (128 * 2048)), 3.7e-4 at 3 bits.
  (void)bits;
  for (const double t : {0.5, 0.8, 0.95}) {
    double sum = 0;
    constexpr std::size_t kPairs = kSanitized ? 512 : 2048;
    Block keys(kPairs, 1, 128), queries = gaussian_block(50, kPairs, 1, 128);
    const Block noise = gaussian_block(51, kPairs, 1, 128);
    for (std::size_t i = 0; i < keys.numbers.size(); ++i)
      keys.numbers[i] = static_cast<float>(oracle::round_bfloat16(
          t * static_cast<double>(queries.numbers[i]) + std::sqrt(1 - t * t) * static_cast<double>(noise.numbers[i])));
    const CodedRows<F> rows(coded_config(1, 128, 0, 0, 64), keys, noise);
    for (std::size_t i = 0; i < kPairs; ++i)
      sum +=
          (product_of(queries.row(i), rows.decoded_keys.row(i), 128) - product_of(queries.row(i), keys.row(i), 128)) /
          (norm_of(queries.row(i), 128) * norm_of(keys.row(i), 128));
    EXPECT_NEAR(sum / kPairs, 0, 0.002) << t;
  }
}
TEST(NumericCases, N14_CorrelatedPairsAreUnbiasedTq2) { n14<TQ2>(2); }
TEST(NumericCases, N14_CorrelatedPairsAreUnbiasedTq3) { n14<TQ3>(3); }
TEST(NumericCases, N14_CorrelatedPairsAreUnbiasedTq4) { n14<TQ4>(4); }

TEST(NumericCases, N17_SparseKeysAtEveryHeadSize) {
  for (const std::uint32_t dim : {72U, 104U, 136U})
    EXPECT_NE(turboquant::why_invalid(coded_config(1, dim), 1), "") << dim;
  constexpr std::size_t kQueries = kSanitized ? 100 : 200, kKeys = 5 * kQueries;
  std::vector<double> agreements;
  for (const std::size_t dim : {64U, 80U, 96U, 112U, 128U, 144U, 160U, 192U}) {
    Block keys(kKeys, 1, dim), queries(kQueries, 1, dim);
    for (std::size_t t = 0; t < kKeys; ++t)
      for (std::size_t i = 0; i < 10; ++i)
        keys.row(t)[oracle::hash(dim, t, i) % dim] = static_cast<float>(oracle::gaussian(dim, t, i));
    for (std::size_t q = 0; q < kQueries; ++q)
      for (std::size_t i = 0; i < dim; ++i)
        queries.row(q)[i] = keys.row(5 * q)[i] + static_cast<float>(0.3 * oracle::gaussian(dim + 1, q, i));
    const CodedRows<TQ4> rows(coded_config(1, dim, 0, 8, 64), keys, keys);
    const std::vector<float> logits = rows.logits(queries);
    std::size_t agreed = 0;
    for (std::size_t q = 0; q < kQueries; ++q) {
      std::size_t best = 0, best_exact = 0;
      double most = -1e30, most_exact = -1e30;
      for (std::size_t t = 0; t < kKeys; ++t) {
        const double exact = product_of(queries.row(q), keys.row(t), dim),
                     coded = static_cast<double>(logits[q * kKeys + t]);
        if (exact > most_exact) most_exact = exact, best_exact = t;
        if (coded > most) most = coded, best = t;
      }
      agreed += best == best_exact ? 1 : 0;
    }
    agreements.push_back(static_cast<double>(agreed) / kQueries);
  }
  // No cliff: five points, and the binomial scatter of two samples of 200 (two sigma: four more).
  for (const double agreement : agreements) EXPECT_GE(agreement, agreements[0] - 0.09);
  EXPECT_GT(agreements[0], 0.8);
}

// `plain`: nearest levels, which are all the same for such a row. A trellis has to change levels from coordinate to
// coordinate; it gets its own error, sqrt(1 - D) with D = 0.04 at 3 bits, twice that of random directions.
template <class F>
void n18(double spike_cosine, bool plain = true) {
  const CacheConfig config = coded_config(1, 128, 0, 0);
  Block one_hot(128, 1, 128);
  for (std::size_t i = 0; i < 128; ++i) one_hot.row(i)[i] = 7;
  const CodedRows<F> rows(config, one_hot, one_hot);
  for (std::size_t i = 0; i < 128; ++i)
    for (const Block* decoded : {&rows.decoded_keys, &rows.decoded_values}) {
      // Rotated, all coordinates are +-7 / sqrt(128): one level fits them all, up to the scale's 8 bits.
      const double size = norm_of(decoded->row(i), 128);
      if (!plain) {
        EXPECT_GE(static_cast<double>(decoded->row(i)[i]) / size, std::sqrt(1 - 0.04));
        continue;
      }
      EXPECT_NEAR(static_cast<double>(decoded->row(i)[i]) / size, 1, 1e-3);
      EXPECT_NEAR(size / 7, 1, 0x1p-8);
      EXPECT_EQ(size, norm_of(decoded->row(0), 128));
    }
  // The library's own signs rotate to a single spike of 11.3 sigma.
  const turboquant::Rotation rotation(config.seed, 128);
  const Block spike = repeated(std::vector<float>(rotation.signs(), rotation.signs() + 128), 16);
  const CodedRows<F> spikes(config, spike, spike);
  for (const Block* decoded : {&spikes.decoded_keys, &spikes.decoded_values}) {
    ASSERT_TRUE(all_finite(*decoded));
    EXPECT_GE(product_of(decoded->row(3), spike.row(3), 128) / (norm_of(decoded->row(3), 128) * std::sqrt(128.0)),
              spike_cosine);
  }
}
TEST(NumericCases, N18_OneHotAndSpikePolar3) {
  n18<turboquant::Format<turboquant::PolarQuant<3>, turboquant::PolarQuant<3>>>(0.61);
}
TEST(NumericCases, N18_OneHotAndSpikeTq3) { n18<TQ3>(0.61, false); }
// Theory for unrounded levels 0.8838; as integers up to 127 the smallest level is 6 instead of 5.97.
TEST(NumericCases, N18_OneHotAndSpikeTq4) { n18<TQ4>(0.875); }

TEST(NumericCases, N24_TiesAndSignedZeros) {
  // Rotated, a row with two entries of the same size lies on the border between two levels in half the places.
  const CacheConfig config = coded_config(2, 64, 0, 0, 32);
  const turboquant::Rotation rotation(config.seed, 64);
  for_each_format([&](auto tag, unsigned) {
    using F = typename decltype(tag)::type;
    std::vector<float> row(64, 0.0F), negative_zeros(64, -0.0F), ramp(64, 0.0F);
    row[0] = negative_zeros[0] = rotation.signs()[0];
    row[1] = negative_zeros[1] = rotation.signs()[1];
    for (std::size_t i = 0; i <= 30; ++i) ramp[i] = 0.5F * static_cast<float>(i);
    for (std::size_t i = 31; i < 64; i += 2) ramp[i] = 15;
    const Block plain = repeated(row, 50, 2), signed_zeros = repeated(negative_zeros, 50, 2),
                ramps = repeated(ramp, 50, 2);
    const CodedRows<F> a(config, plain, plain), b(config, signed_zeros, signed_zeros), c(config, ramps, ramps);
    EXPECT_TRUE(same_bits(a.decoded_keys, b.decoded_keys));
    EXPECT_TRUE(same_bits(a.decoded_values, b.decoded_values));
    // Equal rows have equal codes in every slot of every page and head, full or short.
    for (const auto* rows : {&a, &c})
      for (std::size_t t = 0; t < 50; ++t)
        for (std::size_t h = 0; h < 2; ++h)
          for (std::size_t i = 0; i < 64; ++i) {
            ASSERT_EQ(rows->decoded_keys.row(t, h)[i], rows->decoded_keys.row(0, 0)[i]) << t;
            if constexpr (std::is_same_v<F, TQ4> || std::is_same_v<F, TQ8> ||
                          std::is_same_v<F, TQ4Scalar>) {  // others may code along tokens
              ASSERT_EQ(rows->decoded_values.row(t, h)[i], rows->decoded_values.row(0, 0)[i]) << t;
            }
          }
  });
}

}  // namespace
