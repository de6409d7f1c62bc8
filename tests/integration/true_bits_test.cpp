// What a context really costs, raw tail and all: the table of docs/accuracy.md.
#include <gtest/gtest.h>

#include <turboquant/turboquant.hpp>
#include <vector>

#include "oracle/random.hpp"

namespace {

using namespace turboquant;

template <class F>
double bits_at(std::size_t tokens) {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 2, .head_dim = 128}};
  KVCache<F> cache(config);
  BatchItem step;
  EXPECT_EQ(cache.create_sequence(step.sequence), Status::ok);
  constexpr std::size_t kChunk = 1024;
  std::vector<float> rows(kChunk * 256);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(oracle::gaussian(1, 1, i));
  for (std::size_t done = 0; done < tokens; done += kChunk) {
    step.keys = step.values = ConstRows(rows.data(), kChunk, 2, 128);
    EXPECT_EQ(attend(cache, 0, std::span(&step, 1)), Status::ok);
  }
  const MemoryUse use = cache.memory();
  return 8.0 * static_cast<double>(use.page_bytes + use.tail_bytes) / (static_cast<double>(tokens) * 2 * 2 * 128);
}

template <class F>
void expect_bits(double at_1k, double at_8k, double at_32k) {
  EXPECT_NEAR(bits_at<F>(1024), at_1k, 0.01);
  EXPECT_NEAR(bits_at<F>(8192), at_8k, 0.01);
  EXPECT_NEAR(bits_at<F>(32768), at_32k, 0.01);
}

TEST(TrueBits, OfWholeContexts) {
  expect_bits<TQ8>(9.75, 8.45, 8.31);
  expect_bits<TQ4>(6.00, 4.48, 4.32);
  expect_bits<Format<PolarQuant<3>, PolarQuant<3>>>(5.06, 3.49, 3.32);  // the bytes of TQ3, faster to write
  expect_bits<Format<PolarQuant<2>, PolarQuant<2>>>(4.12, 2.50, 2.33);  // the bytes of TQ2
}

TEST(TrueBits, TrellisCodesTakeTheBytesOfPlainOnes) {
  EXPECT_EQ((bits_at<TQ3>(1024)), (bits_at<Format<PolarQuant<3>, PolarQuant<3>>>(1024)));
  EXPECT_EQ((bits_at<TQ2>(1024)), (bits_at<Format<PolarQuant<2>, PolarQuant<2>>>(1024)));
}

}  // namespace
