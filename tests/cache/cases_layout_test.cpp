// Layout faults from public bug reports, L01 to L20. What belongs to the fragment layout, the transform or one kernel
// alone is tested there too; here the same faults are looked for through the cache. L16, L17, L18 and L20 are
// in cases_addresses_test; L03 needs saved files and comes with them.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cache/block.hpp"
#include "cache/coded_rows.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::Format;
using turboquant::KVCache;
using turboquant::PolarQuant;
using turboquant::ScalarQuant;
using turboquant::SequenceId;
using turboquant::TQ2;
using turboquant::TQ3;
using turboquant::TQ4;
using turboquant::TQ8;

template <class Body>
void for_each_width(const Body& body) {
  body(std::type_identity<TQ2>{}, 2U);
  body(std::type_identity<TQ3>{}, 3U);
  body(std::type_identity<TQ4>{}, 4U);
  body(std::type_identity<TQ8>{}, 8U);
}

TEST(LayoutCases, L01_EnergyInTheLastCoordinates) {
  for (const std::size_t dim : {128U, 192U, 576U})
    for_each_width([&](auto tag, unsigned bits) {
      using F = typename decltype(tag)::type;
      Block keys = gaussian_block(dim, 64, 1, dim);
      const double factor = std::sqrt(9 * (static_cast<double>(dim) - 64) / 64);  // nine tenths of the energy in 64
      for (std::size_t t = 0; t < 64; ++t)
        for (std::size_t i = dim - 64; i < dim; ++i) keys.row(t)[i] *= static_cast<float>(factor);
      const CodedRows<F> rows(coded_config(1, dim, 0, 0), keys, keys);
      const Block queries = gaussian_block(3, 8, 1, dim);
      const std::vector<float> logits = rows.logits(queries);
      for (std::size_t q = 0; q < 8; ++q)
        for (std::size_t t = 0; t < 64; ++t)
          EXPECT_LE(std::fabs(static_cast<double>(logits[q * 64 + t]) - product_of(queries.row(q), keys.row(t), dim)),
                    (six_sigma(bits, dim) + 0.005) * norm_of(queries.row(q), dim) * norm_of(keys.row(t), dim));
      // No padding to a power of two: the bits are those of the width, one bf16 scale per row and the layout's 64
      // bytes.
      EXPECT_LE(rows.cache.memory().bits_per_coordinate,
                bits + 16.0 / static_cast<double>(dim) + 64.0 * 8 / (16.0 * static_cast<double>(dim)));
    });
}

TEST(LayoutCases, L02_L11_UnitVectorsStayOrthonormal) {
  for (const std::uint32_t dim : {40U, 72U, 100U}) EXPECT_NE(turboquant::why_invalid(coded_config(1, dim), 1), "");
  for (const std::size_t dim : {32U, 48U, 80U, 96U, 112U, 144U, 160U, 192U}) {
    Block units(dim, 1, dim);
    for (std::size_t i = 0; i < dim; ++i) units.row(i)[i] = 1;
    const CodedRows<TQ8> rows(coded_config(1, dim, 0, 0), units, units);
    const std::vector<float> logits = rows.logits(units);
    // All rotated coordinates of a unit vector that has only ones in its row of H are of one size; other sizes mix:
    // 8-bit codes are good to 2^-8 of the largest coordinate.
    for (std::size_t i = 0; i < dim; ++i)
      for (std::size_t j = 0; j < dim; ++j) {
        ASSERT_NEAR(logits[i * dim + j], i == j ? 1.0F : 0.0F, 0.02F) << dim << ' ' << i << ' ' << j;
        ASSERT_NEAR(rows.decoded_values.row(i)[j], i == j ? 1.0F : 0.0F, 0.02F) << dim << ' ' << i << ' ' << j;
      }
  }
}

/// Values of head h are h + 1 in every coordinate; raw rows, so that outputs are exact.
void expect_heads(std::size_t kv_heads, std::size_t query_heads, std::size_t head_dim, std::size_t value_dim,
                  bool coded) {
  SCOPED_TRACE(testing::Message() << query_heads << " over " << kv_heads << (coded ? " coded" : " raw"));
  CacheConfig config = coded_config(kv_heads, head_dim, value_dim);
  if (!coded) config.recent_tokens = 100;
  KVCache<TQ4> cache(config);
  const SequenceId id = new_sequence(cache);
  const std::size_t tokens = coded ? 16 : 5;
  Block values(tokens, kv_heads, value_dim);
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t h = 0; h < kv_heads; ++h)
      for (std::size_t i = 0; i < value_dim; ++i) values.row(t, h)[i] = static_cast<float>(h + 1);
  const Block queries = gaussian_block(2, 1, query_heads, head_dim);
  std::vector<float> out(query_heads * value_dim + 64, kNaN);
  for (std::size_t i = query_heads * value_dim; i < out.size(); ++i) out[i] = 7;
  const Block keys = gaussian_block(1, tokens, kv_heads, head_dim);
  BatchItem item;
  item.sequence = id;
  item.keys = keys.rows();
  item.values = values.rows();
  item.queries = queries.rows();
  item.out = turboquant::Rows(out.data(), 1, query_heads, value_dim);
  ASSERT_OK(turboquant::attend(cache, 0, std::span<const BatchItem>(&item, 1)));
  for (std::size_t h = 0; h < query_heads; ++h) {
    const float wanted = static_cast<float>(h / (query_heads / kv_heads) + 1);
    // Coded: what codes in a centred page of equal rows cost per coordinate.
    for (std::size_t i = 0; i < value_dim; ++i)
      ASSERT_NEAR(out[h * value_dim + i], wanted, coded ? 0.02F * wanted : 1e-6F * wanted) << h << ' ' << i;
  }
  for (std::size_t i = query_heads * value_dim; i < out.size(); ++i) ASSERT_EQ(out[i], 7.0F);
}
TEST(LayoutCases, L04_ValuesNarrowerThanKeys) {
  for (const bool coded : {false, true}) expect_heads(4, 28, 128, 96, coded);
}
TEST(LayoutCases, L13_L14_HeadGroups) {
  for (const bool coded : {false, true}) {
    expect_heads(1, 1, 64, 64, coded);
    expect_heads(1, 6, 64, 64, coded);
    expect_heads(4, 28, 64, 64, coded);
    expect_heads(1, 48, 64, 64, coded);
    expect_heads(1, 24, 64, 64, coded);
    expect_heads(2, 48, 64, 64, coded);
    expect_heads(1, 40, 64, 64, coded);
    expect_heads(8, 8, 64, 64, coded);
  }
  EXPECT_NE(turboquant::why_invalid(coded_config(0, 64), 1), "");
  KVCache<TQ4> cache(coded_config(2, 64));
  const SequenceId id = new_sequence(cache);
  for (const std::size_t heads : {33U, 3U, 1U}) {
    const Block queries = gaussian_block(1, 1, heads, 64);
    const Outcome outcome = attend_one(cache, 0, id, gaussian_block(2, 1, 2, 64), gaussian_block(3, 1, 2, 64), queries);
    EXPECT_STATUS(bad_shape, outcome.status);
    for (const float x : outcome.out.numbers) ASSERT_TRUE(std::isnan(x));
    EXPECT_EQ(cache.length(id), 0U);
  }
}

template <class F>
void check_pair(unsigned key_bits, double value_bound) {
  SCOPED_TRACE(testing::Message() << "key bits " << key_bits << " value bound " << value_bound);
  CacheConfig config = coded_config(2, 64, 96, 8, 32);
  KVCache<F> cache(config);
  const SequenceId id = new_sequence(cache);
  Codes codes = codes_of(key_bits);
  codes.value_distortion = value_bound;
  Mirror mirror(config, 0, codes);
  for (const std::size_t n : {40U, 30U}) {
    const Block keys = gaussian_block(1, n, 2, 64, 1, mirror.length()),
                values = gaussian_block(2, n, 2, 96, 1, mirror.length()),
                queries = gaussian_block(3, n, 4, 64, 1, mirror.length());
    const std::size_t first = mirror.length();
    const Outcome outcome = attend_one(cache, 0, id, keys, values, queries);
    mirror.append(keys, values);
    mirror.learn(cache, id);
    mirror.check(queries, outcome, {}, {.position = first});
  }
}
// A min-max grid over d = 96 normal coordinates spans about 5 sigma in 2^B - 1 steps: (5 / (2^B - 1))^2 / 12, half more
// for rows with a longer range.
constexpr double scalar_bound(unsigned bits) {
  const double steps = static_cast<double>((1U << bits) - 1);
  return 1.5 * 25 / (steps * steps * 12) + 1e-4;
}
template <class Key>
void check_pairs_of_key(unsigned key_bits) {
  check_pair<Format<Key, PolarQuant<1>>>(key_bits, distortion_bound(1));
  check_pair<Format<Key, PolarQuant<2>>>(key_bits, distortion_bound(2));
  check_pair<Format<Key, PolarQuant<3>>>(key_bits, distortion_bound(3));
  check_pair<Format<Key, PolarQuant<4>>>(key_bits, distortion_bound(4));
  check_pair<Format<Key, PolarQuant<8>>>(key_bits, distortion_bound(8));
  check_pair<Format<Key, ScalarQuant<2>>>(key_bits, scalar_bound(2));
  check_pair<Format<Key, ScalarQuant<3>>>(key_bits, scalar_bound(3));
  check_pair<Format<Key, ScalarQuant<4>>>(key_bits, scalar_bound(4));
  check_pair<Format<Key, ScalarQuant<8>>>(key_bits, scalar_bound(8));
}
TEST(LayoutCases, L05_AllPairsWith1BitKeys) { check_pairs_of_key<PolarQuant<1>>(1); }
TEST(LayoutCases, L05_AllPairsWith2BitKeys) { check_pairs_of_key<PolarQuant<2>>(2); }
TEST(LayoutCases, L05_AllPairsWith3BitKeys) { check_pairs_of_key<PolarQuant<3>>(3); }
TEST(LayoutCases, L05_AllPairsWith4BitKeys) { check_pairs_of_key<PolarQuant<4>>(4); }
TEST(LayoutCases, L05_AllPairsWith8BitKeys) { check_pairs_of_key<PolarQuant<8>>(8); }
// Trellis codes have less error than nearest levels of as many bits, so their bounds hold.
TEST(LayoutCases, L05_PairsWithTrellisCodes) {
  using turboquant::TrellisQuant;
  check_pair<Format<TrellisQuant<2>, TrellisQuant<2>>>(2, distortion_bound(2));
  check_pair<Format<TrellisQuant<3>, TrellisQuant<3>>>(3, distortion_bound(3));
  check_pair<Format<TrellisQuant<4>, TrellisQuant<4>>>(4, distortion_bound(4));
  check_pair<Format<PolarQuant<4>, TrellisQuant<3>>>(4, distortion_bound(3));
  check_pair<Format<TrellisQuant<3>, ScalarQuant<4>>>(3, scalar_bound(4));
}

TEST(LayoutCases, L06_EveryTokenCountsOnce) {
  std::array<double, 4> errors{};
  std::size_t width = 0;
  for_each_width([&](auto tag, unsigned bits) {
    using F = typename decltype(tag)::type;
    for (std::size_t n = 1; n <= 33; ++n) {
      Block values(n, 1, 64);
      for (std::size_t i = 0; i < values.numbers.size(); ++i) values.numbers[i] = static_cast<float>(i / 64 + 1);
      CodedRows<F> rows(coded_config(1, 64), Block(n, 1, 64), values);
      const Outcome outcome = rows.attend(gaussian_block(1, 1, 1, 64));
      // Uniform weights: the mean of the decoded rows, and near the true mean. A lost or doubled token moves it by 1
      // / 2.
      std::vector<double> mean(64, 0.0);
      for (std::size_t t = 0; t < n; ++t)
        for (std::size_t i = 0; i < 64; ++i)
          mean[i] += static_cast<double>(rows.decoded_values.row(t)[i]) / static_cast<double>(n);
      double total = 0;
      for (std::size_t i = 0; i < 64; ++i) {
        ASSERT_NEAR(static_cast<double>(outcome.out.row(0)[i]), mean[i], 2e-3) << n << " bits " << bits;
        total += static_cast<double>(outcome.out.row(0)[i]) / 64;
      }
      ASSERT_NEAR(total, static_cast<double>(n + 1) / 2, bits == 2 ? 0.25 * static_cast<double>(n) / 4 : 0.3)
          << n << " bits " << bits;
    }
    const Block keys = gaussian_block(1, 64, 1, 64), values = gaussian_block(2, 64, 1, 64),
                queries = gaussian_block(3, 16, 1, 64);
    CodedRows<F> rows(coded_config(1, 64), keys, values);
    oracle::Options options;
    options.causal = false;
    const Tensor truth =
        oracle::attend(keys.bfloat16_rounded(), values.bfloat16_rounded(), queries.exact(), 0, options);
    const Tensor found = rows.attend(queries).out.exact();
    errors[width++] = oracle::distance(found.numbers.data(), truth.numbers.data(), truth.numbers.size());
  });
  EXPECT_LT(errors[1], errors[0]);
  EXPECT_LT(errors[2], errors[1]);
  EXPECT_LT(errors[3], errors[2]);
}

TEST(LayoutCases, L07_ARowDecodesAlikeInEverySlot) {
  // Rows of Gaussian numbers hit every code; the same row in every slot, page and head must come back the same.
  for (const std::size_t dim : {32U, 48U, 80U, 96U, 112U, 128U, 576U})
    for_each_width([&](auto tag, unsigned) {
      using F = typename decltype(tag)::type;
      const CacheConfig config = coded_config(3, dim, 0, 0, 32);
      const Block rows = gaussian_block(1, 40, 3, dim);
      const CodedRows<F> plain(config, rows, rows);
      Block shuffled = rows;
      const auto place = [](std::size_t t, std::size_t h) {
        return std::pair<std::size_t, std::size_t>{(t * 7 + 11 * h) % 40, (h + 1) % 3};
      };
      for (std::size_t t = 0; t < 40; ++t)
        for (std::size_t h = 0; h < 3; ++h)
          std::memcpy(shuffled.row(place(t, h).first, place(t, h).second), rows.row(t, h), dim * sizeof(float));
      const CodedRows<F> moved(config, shuffled, shuffled);
      const Block query = gaussian_block(2, 1, 3, dim);
      for (std::size_t t = 0; t < 40; ++t)
        for (std::size_t h = 0; h < 3; ++h) {
          const auto [to, to_head] = place(t, h);
          ASSERT_EQ(std::memcmp(plain.decoded_keys.row(t, h), moved.decoded_keys.row(to, to_head), dim * sizeof(float)),
                    0)
              << dim << ' ' << t;
          // Values may be coded along tokens; then only the error is the same.
          ASSERT_NEAR(distance_of(plain.decoded_values.row(t, h), rows.row(t, h), dim),
                      distance_of(moved.decoded_values.row(to, to_head), rows.row(t, h), dim),
                      0.3 * norm_of(rows.row(t, h), dim));
        }
    });
}

TEST(LayoutCases, L08_ScalesOfManyPagesAndHeads) {
  CacheConfig config = coded_config(3, 80, 0, 0, 16);
  KVCache<TQ4> cache(config);
  const SequenceId id = new_sequence(cache), gap = new_sequence(cache);
  const auto norm_at = [](std::size_t t, std::size_t h) {
    return 100.0 * static_cast<double>(t / 16 + 1) + 10.0 * static_cast<double>(t % 16) + static_cast<double>(h + 1);
  };
  Block rows = gaussian_block(1, 80, 3, 80);
  for (std::size_t t = 0; t < 80; ++t)
    for (std::size_t h = 0; h < 3; ++h) {
      const double factor = norm_at(t, h) / norm_of(rows.row(t, h), 80);
      for (std::size_t i = 0; i < 80; ++i)
        rows.row(t, h)[i] = static_cast<float>(factor * static_cast<double>(rows.row(t, h)[i]));
    }
  // Pages of another sequence lie between; then they go and others take their places.
  for (std::size_t page = 0; page < 5; ++page) {
    if (page == 3) cache.release(gap);
    if (page < 3)
      ASSERT_OK(append_only(cache, 0, gap, gaussian_block(9, 16, 3, 80, 1e3), gaussian_block(9, 16, 3, 80, 1e3)));
    ASSERT_OK(append_only(cache, 0, id, rows.slice(16 * page, 16 * page + 16), rows.slice(16 * page, 16 * page + 16)));
  }
  Block keys, values;
  ASSERT_OK(read_rows(cache, id, 0, 0, 80, keys, values));
  // Norms differ by at least 0.1 %; the codes' error turns them by up to 3 % at 4 bits, so the whole row is compared.
  for (std::size_t t = 0; t < 80; ++t)
    for (std::size_t h = 0; h < 3; ++h)
      for (const Block* decoded : {&keys, &values}) {
        EXPECT_LE(distance_of(decoded->row(t, h), rows.row(t, h), 80),
                  std::sqrt(2 * distortion_bound(4)) * norm_at(t, h));
        EXPECT_NEAR(norm_of(decoded->row(t, h), 80) / norm_at(t, h), 1, 0.03);
      }
}

TEST(LayoutCases, L09_MoreSequencesDisturbNoOlderOnes) {
  KVCache<TQ4> cache(coded_config(2, 64));
  std::vector<SequenceId> ids;
  std::vector<std::pair<Block, Block>> before;
  for (std::size_t s = 0; s < 40; ++s) {
    ids.push_back(new_sequence(cache));
    const double scale = std::pow(10.0, static_cast<double>(s % 3));
    ASSERT_OK(
        append_only(cache, 0, ids[s], gaussian_block(s, 20, 2, 64, scale), gaussian_block(100 + s, 20, 2, 64, scale)));
    before.emplace_back();
    ASSERT_OK(read_rows(cache, ids[s], 0, 0, 20, before[s].first, before[s].second));
    for (std::size_t old = 0; old < s; ++old) {
      Block keys, values;
      ASSERT_OK(read_rows(cache, ids[old], 0, 0, 20, keys, values));
      ASSERT_TRUE(same_bits(keys, before[old].first) && same_bits(values, before[old].second)) << old << " after " << s;
    }
  }
}

TEST(LayoutCases, L10_EveryCoordinateOfWideHeads) {
  for (const std::size_t dim : {256U, 512U, 1024U}) {
    std::vector<float> ramp(dim);
    for (std::size_t i = 0; i < dim; ++i) ramp[i] = static_cast<float>(i);
    Block units(dim, 1, dim);
    for (std::size_t i = 0; i < dim; ++i) units.row(i)[i] = 1;
    std::vector<Outcome> outcomes;
    for (const std::uint32_t garbage : {0xaaaaaaaaU, 0x00000000U}) {
      CodedRows<TQ8> rows(coded_config(1, dim, 0, 0), units, repeated(ramp, dim));
      Outcome outcome{{}, Block(1, 1, dim), {}};
      for (float& x : outcome.out.numbers) std::memcpy(&x, &garbage, sizeof x);
      const Block query = gaussian_block(1, 1, 1, dim);
      BatchItem item;
      item.sequence = rows.id;
      item.queries = query.rows();
      item.out = outcome.out.rows();
      ASSERT_OK(turboquant::attend(rows.cache, 0, std::span<const BatchItem>(&item, 1)));
      // The grid's step is 2^-7 of the largest rotated coordinate, about 5 of their root mean square dim / sqrt(3).
      for (std::size_t i = 0; i < dim; ++i)
        ASSERT_NEAR(outcome.out.row(0)[i], static_cast<float>(i), 6 * 5 * static_cast<float>(dim) / 127 / 3.46F / 1.7F)
            << i;
      outcomes.push_back(outcome);
      const std::vector<float> logits = rows.logits(query);
      for (std::size_t i = 0; i < dim; ++i)
        ASSERT_NEAR(logits[i], query.row(0)[i], 0.02 * norm_of(query.row(0), dim) / 5) << i;
    }
    EXPECT_TRUE(same_bits(outcomes[0], outcomes[1]));
  }
}

TEST(LayoutCases, L12_AnotherRotationBeforehandChangesLittle) {
  // The engine may rotate too: a Householder reflection of keys and queries leaves the true logits as they are.
  constexpr std::size_t kDim = 96;
  const Block axis = gaussian_block(9, 1, 1, kDim);
  const double squared = std::pow(norm_of(axis.row(0), kDim), 2);
  const auto reflect = [&](Block block) {
    for (std::size_t t = 0; t < block.tokens; ++t) {
      const double along = 2 * product_of(block.row(t), axis.row(0), kDim) / squared;
      for (std::size_t i = 0; i < kDim; ++i)
        block.row(t)[i] -= static_cast<float>(along * static_cast<double>(axis.row(0)[i]));
    }
    return block;
  };
  const Block keys = gaussian_block(1, 128, 1, kDim), queries = gaussian_block(2, 8, 1, kDim);
  const CodedRows<TQ4> plain(coded_config(1, kDim, 0, 0), keys, keys),
      turned(coded_config(1, kDim, 0, 0), reflect(keys), keys);
  const std::vector<float> plain_logits = plain.logits(queries), turned_logits = turned.logits(reflect(queries));
  for (std::size_t q = 0; q < 8; ++q)
    for (std::size_t t = 0; t < 128; ++t) {
      const double allowed = six_sigma(4, kDim) * norm_of(queries.row(q), kDim) * norm_of(keys.row(t), kDim);
      const double truth = product_of(queries.row(q), keys.row(t), kDim);
      EXPECT_NEAR(static_cast<double>(plain_logits[q * 128 + t]), truth, allowed);
      EXPECT_NEAR(static_cast<double>(turned_logits[q * 128 + t]), truth, allowed);
    }
}

TEST(LayoutCases, L15_KeysAndValuesOfDifferentWidth) {
  struct Dims {
    std::uint32_t key, value;
  };
  for (const Dims dims : {Dims{192, 128}, Dims{576, 512}, Dims{64, 256}, Dims{32, 1024}}) {
    CacheConfig config = coded_config(2, dims.key, dims.value, 8, 32);
    config.recent_tokens = 10;
    KVCache<TQ4> cache(config);
    const SequenceId id = new_sequence(cache);
    Mirror mirror(config, 0, codes_of(4));
    const Block keys = gaussian_block(1, 60, 2, dims.key), values = gaussian_block(2, 60, 2, dims.value),
                queries = gaussian_block(3, 60, 4, dims.key);
    const Outcome outcome = attend_one(cache, 0, id, keys, values, queries);
    mirror.append(keys, values);
    mirror.learn(cache, id);
    mirror.check(queries, outcome, {}, {.position = 0});
  }
}

TEST(LayoutCases, L19_ScalesOfEveryTile) {
  for (const std::size_t page : {16U, 32U, 64U, 128U, 256U})
    for_each_width([&](auto tag, unsigned) {
      using F = typename decltype(tag)::type;
      const Block row = gaussian_block(1, 1, 1, 64);
      Block keys(256, 1, 64), values(256, 1, 64);
      for (std::size_t t = 0; t < 256; ++t)
        for (std::size_t i = 0; i < 64; ++i)
          keys.row(t)[i] = values.row(t)[i] = std::ldexp(row.row(0)[i], static_cast<int>(t % 14));
      const CodedRows<F> rows(coded_config(1, 64, 0, 0, page), keys, values);
      const std::vector<float> logits = rows.logits(gaussian_block(2, 1, 1, 64));
      for (std::size_t t = 0; t < 256; ++t) {
        // One direction, powers of two: the same codes and scales that are exact multiples.
        ASSERT_EQ(logits[t], std::ldexp(logits[0], static_cast<int>(t % 14))) << t << " page " << page;
        for (std::size_t i = 0; i < 64; ++i)
          ASSERT_EQ(rows.decoded_keys.row(t)[i], std::ldexp(rows.decoded_keys.row(0)[i], static_cast<int>(t % 14)));
      }
    });
}

}  // namespace
