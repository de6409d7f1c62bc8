// The loops that the library is measured against compute what they claim: compared with double loops on every
// instruction set here.
#include "baseline.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace {

using baseline::Isa;
constexpr Isa kIsas[] = {Isa::portable, Isa::avx2, Isa::avx512};
constexpr std::size_t kDims[] = {16, 64, 80, 128, 144, 256};
constexpr std::size_t kTokens[] = {1, 7, 8, 31, 32, 33, 200, 300};

// The definition of binary16, finite values.
double widen(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Random rows in both types with the same values.
struct Rows {
  std::vector<std::uint16_t> f16;
  std::vector<float> f32;
  Rows(std::size_t count, unsigned seed) : f16(count), f32(count) {
    std::mt19937 random(seed);
    for (std::size_t k = 0; k < count; ++k) {
      // Exponents from subnormal (0) to 2 (16).
      f16[k] = static_cast<std::uint16_t>((random() & 0x83FFU) | (random() % 17U << 10));
      f32[k] = static_cast<float>(widen(f16[k]));
    }
  }
};

double dot(const float* a, const float* b, std::size_t dim) {
  double sum = 0;
  for (std::size_t i = 0; i < dim; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

// Sums of `dim` products below 4, in float.
constexpr double kLogitTolerance = 256 * 4 * 1e-6;

TEST(Baseline, LogitsMatchTheDoubleLoop) {
  for (const Isa isa : kIsas) {
    if (!baseline::is_supported(isa)) continue;
    for (const std::size_t dim : kDims) {
      for (const std::size_t tokens : kTokens) {
        const Rows keys(tokens * dim, 1), query(dim, 2);
        std::vector<float> f32(tokens), f16(tokens), eigen(tokens);
        baseline::compute_logits_f32(isa, query.f32.data(), keys.f32.data(), tokens, dim, f32.data());
        baseline::compute_logits_f16(isa, query.f32.data(), keys.f16.data(), tokens, dim, f16.data());
        baseline::compute_logits_eigen(isa, query.f32.data(), keys.f32.data(), tokens, dim, eigen.data());
        for (std::size_t t = 0; t < tokens; ++t) {
          const double expected = dot(query.f32.data(), keys.f32.data() + t * dim, dim);
          ASSERT_NEAR(f32[t], expected, kLogitTolerance)
              << to_string(isa) << " dim " << dim << " token " << t << " of " << tokens;
          ASSERT_NEAR(f16[t], expected, kLogitTolerance)
              << to_string(isa) << " dim " << dim << " token " << t << " of " << tokens;
          ASSERT_NEAR(eigen[t], expected, kLogitTolerance)
              << to_string(isa) << " dim " << dim << " token " << t << " of " << tokens;
        }
      }
    }
  }
}

TEST(Baseline, AttentionMatchesTheDoubleLoop) {
  for (const Isa isa : kIsas) {
    if (!baseline::is_supported(isa)) continue;
    for (const std::size_t heads : {1U, 2U, 4U, 8U}) {
      ASSERT_TRUE(baseline::is_supported_group(heads));
      for (const std::size_t dim : kDims) {
        for (const std::size_t tokens : kTokens) {
          const Rows keys(tokens * dim, 3), values(tokens * dim, 4), queries(heads * dim, 5);
          const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
          std::vector<float> f32(heads * dim), f16(heads * dim), eigen(heads * dim);
          baseline::prefill_eigen(isa, queries.f32.data(), heads, keys.f32.data(), values.f32.data(), tokens, dim,
                                  scale, eigen.data());
          baseline::attend_f32(isa, queries.f32.data(), heads, keys.f32.data(), values.f32.data(), tokens, dim, scale,
                               f32.data());
          baseline::attend_f16(isa, queries.f32.data(), heads, keys.f16.data(), values.f16.data(), tokens, dim, scale,
                               f16.data());
          for (std::size_t h = 0; h < heads; ++h) {
            std::vector<double> expected(dim);
            double total = 0;
            for (std::size_t t = 0; t < tokens; ++t) {
              const double weight = std::exp(static_cast<double>(scale) *
                                             dot(queries.f32.data() + h * dim, keys.f32.data() + t * dim, dim));
              total += weight;
              for (std::size_t i = 0; i < dim; ++i)
                expected[i] += weight * static_cast<double>(values.f32[t * dim + i]);
            }
            for (std::size_t i = 0; i < dim; ++i) {
              ASSERT_NEAR(f32[h * dim + i], expected[i] / total, 2e-5)
                  << to_string(isa) << " heads " << heads << " dim " << dim << " tokens " << tokens;
              ASSERT_NEAR(f16[h * dim + i], expected[i] / total, 2e-5)
                  << to_string(isa) << " heads " << heads << " dim " << dim << " tokens " << tokens;
              ASSERT_NEAR(eigen[h * dim + i], expected[i] / total, 2e-5)
                  << to_string(isa) << " queries " << heads << " dim " << dim << " tokens " << tokens;
            }
          }
        }
      }
    }
  }
}

TEST(Baseline, LargeLogitsNeitherOverflowNorVanish) {
  constexpr std::size_t kDim = 128, kCount = 100;
  for (const Isa isa : kIsas) {
    if (!baseline::is_supported(isa)) continue;
    std::vector<float> query(kDim, 100.0F), keys(kCount * kDim, -3.0F), values(kCount * kDim, 1.0F), out(kDim);
    for (std::size_t i = 0; i < kDim; ++i) keys[70 * kDim + i] = 3.0F;
    for (std::size_t i = 0; i < kDim; ++i) values[70 * kDim + i] = 7.0F;
    baseline::attend_f32(isa, query.data(), 1, keys.data(), values.data(), kCount, kDim, 1.0F, out.data());
    for (const float x : out) ASSERT_NEAR(x, 7.0F, 1e-5F) << to_string(isa);
  }
}

TEST(Baseline, ReadMemoryDependsOnEveryWord) {
  alignas(64) static std::uint32_t memory[256];
  for (const Isa isa : kIsas) {
    if (!baseline::is_supported(isa)) continue;
    ASSERT_EQ(baseline::read_memory(isa, memory, sizeof memory), 0U);
    bool all_found = true;
    for (std::size_t k = 0; k < 256; k += 16) {  // first word of each register's lane 0 is what comes back
      memory[k] = 1;
      all_found = all_found && baseline::read_memory(isa, memory, sizeof memory) == 1U;
      memory[k] = 0;
    }
    EXPECT_TRUE(all_found) << to_string(isa);
  }
}

}  // namespace
