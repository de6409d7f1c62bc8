// Performance cliffs, as ratios of times that are taken in turns within one run, in processor time, the best of several
// rounds each. The limits leave room for a busy machine; what is wrong by kind misses them by far.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <functional>
#include <memory>
#include <vector>

#include "cache/block.hpp"
#include "cache/coded_rows.hpp"
#include "cache/sanitized.hpp"
#include "formats/formats.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::Isa;
using turboquant::KVCache;
using turboquant::SequenceId;
using turboquant::TQ3;
using turboquant::TQ4;

constexpr std::size_t kDim = 128;

#define SKIP_IF_SLOWED_DOWN() \
  if (kSanitized) GTEST_SKIP() << "a sanitizer or an emulator costs more than any cliff"

double seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// Seconds of one call of each, the best of `rounds` rounds of at least 4 ms.
std::vector<double> times_of(const std::vector<std::function<void()>>& contenders, std::size_t rounds = 7) {
  std::vector<double> best(contenders.size(), 1e9);
  for (const auto& work : contenders) work();
  for (std::size_t round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      const double begin = seconds();
      double elapsed = 0;
      std::size_t calls = 0;
      for (; elapsed < 0.004; elapsed = seconds() - begin, ++calls) contenders[i]();
      best[i] = std::min(best[i], elapsed / static_cast<double>(calls));
    }
  }
  return best;
}

/// One sequence of one KV head, all coded, of `tokens` tokens whose rows repeat.
template <class F>
struct Filled {
  KVCache<F> cache;
  SequenceId id;

  explicit Filled(std::size_t tokens, double size = 1, Isa isa = turboquant::best_isa())
      : cache(coded_config(1, kDim, 0, 8, 64), isa), id(new_sequence(cache)) {
    const Block keys = gaussian_block(1, 2048, 1, kDim, size), values = gaussian_block(2, 2048, 1, kDim, size);
    for (std::size_t done = 0; done < tokens; done += 2048) {
      const std::size_t count = std::min<std::size_t>(2048, tokens - done);
      EXPECT_OK(append_only(cache, 0, id, keys.slice(0, count), values.slice(0, count)));
    }
  }
  void attend(const Block& queries, float scale = 0) { attend_to(id, queries, scale); }
  void attend_to(SequenceId sequence, const Block& queries, float scale = 0) {
    CallOptions options;
    options.params.scale = scale;
    EXPECT_OK(attend_only(cache, 0, sequence, queries, options).status);
  }
};

template <class F>
void expect_flat() {
  const std::vector<std::size_t> lengths = {512, 2048, 8192, 32768};
  Filled<F> filled(lengths.back());
  const Block query = gaussian_block(3, 1, 1, kDim);
  std::vector<std::function<void()>> contenders;
  for (const std::size_t length : lengths) {
    SequenceId part;
    ASSERT_OK(filled.cache.fork(filled.id, length, part));
    contenders.emplace_back([&filled, &query, part] { filled.attend_to(part, query); });
  }
  // Decoding rows and rotating them back, as attention never does.
  Block keys(512, 1, kDim), values(512, 1, kDim);
  contenders.emplace_back([&] { EXPECT_OK(filled.cache.read(filled.id, 0, 0, keys.rows(), values.rows())); });
  const std::vector<double> times = times_of(contenders);
  double least = times[0] / static_cast<double>(lengths[0]);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const double per_token = times[i] / static_cast<double>(lengths[i]);
    // The longest lies in a slower cache than the shortest; work that grows with the length would be 64 times as much.
    EXPECT_LE(per_token, 3 * least) << "of " << lengths[i] << " tokens";
    EXPECT_LE(per_token, times.back() / 512 / 4) << "of " << lengths[i] << " tokens, against reading them";
    least = std::min(least, per_token);
  }
}
TEST(Cliffs, R01_AttentionPerTokenDoesNotGrowTq4) {
  SKIP_IF_SLOWED_DOWN();
  expect_flat<TQ4>();
}
TEST(Cliffs, R01_AttentionPerTokenDoesNotGrowTq3) {
  SKIP_IF_SLOWED_DOWN();
  expect_flat<TQ3>();
}

// Times of appending `step` tokens, from the beginning to `tokens`, in calls of `call` tokens.
std::vector<double> append_times(std::size_t tokens, std::size_t step, std::size_t call) {
  KVCache<TQ4> cache(coded_config(1, kDim, 0, 8, 64));
  const SequenceId id = new_sequence(cache);
  const Block keys = gaussian_block(1, call, 1, kDim), values = gaussian_block(2, call, 1, kDim);
  std::vector<double> times;
  for (std::size_t done = 0; done < tokens; done += step) {
    const double begin = seconds();
    for (std::size_t at = 0; at < step; at += call) EXPECT_OK(append_only(cache, 0, id, keys, values));
    times.push_back(seconds() - begin);
  }
  return times;
}

TEST(Cliffs, R02_AppendingDoesNotDependOnTheLength) {
  SKIP_IF_SLOWED_DOWN();
  for (const std::size_t call : {std::size_t{1}, std::size_t{512}}) {
    double early = 1e9, late = 1e9;
    for (std::size_t round = 0; round < 3; ++round) {
      const std::vector<double> times = append_times(65536, 2048, call);
      early = std::min(early, *std::min_element(times.begin(), times.begin() + 8));
      late = std::min(late, *std::min_element(times.end() - 8, times.end()));
    }
    EXPECT_LE(late, 1.5 * early) << "calls of " << call;
  }
}

// An append is the coding of its pages and little more: with a trellis, next to which all else is small.
TEST(Cliffs, R02_AppendingCodesOnce) {
  SKIP_IF_SLOWED_DOWN();
  constexpr std::size_t kTokens = 512;
  const CacheConfig config = coded_config(1, kDim, 0, 8, 64);
  KVCache<TQ3> cache(config);
  const turboquant::PageCodec<TQ3> codec(config.layers[0], 64);
  const turboquant::Scratch page(codec.page_bytes()), workspace(codec.workspace_bytes());
  const Block keys = gaussian_block(1, kTokens, 1, kDim), values = gaussian_block(2, kTokens, 1, kDim);
  const std::vector<double> times = times_of({[&] {
                                                const SequenceId id = new_sequence(cache);
                                                EXPECT_OK(append_only(cache, 0, id, keys, values));
                                                cache.release(id);
                                              },
                                              [&] {
                                                for (std::size_t t = 0; t < kTokens; t += 64) {
                                                  const turboquant::ConstRows k(keys.row(t), 64, 1, kDim),
                                                      v(values.row(t), 64, 1, kDim);
                                                  EXPECT_OK(codec.encode_page(k, v, page.get(), workspace.get()));
                                                }
                                              }});
  EXPECT_LE(times[0], 1.5 * times[1]);
}

// What best_isa() chooses, and what else a caller may ask for instead.
TEST(Cliffs, R03_TheBestKernelsAreTheFastest) {
  SKIP_IF_SLOWED_DOWN();
  if (tested_isa() != turboquant::best_isa()) GTEST_SKIP() << "another set stands for the best one";
  std::vector<std::unique_ptr<Filled<TQ4>>> caches;
  std::vector<std::function<void()>> logits, attention, appends;
  const Block query = gaussian_block(3, 1, 4, kDim), rows = gaussian_block(4, 256, 1, kDim);
  std::vector<float> out(4 * 2048);
  std::size_t best = 0;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (!turboquant::is_supported(isa)) continue;
    if (isa == turboquant::best_isa()) best = caches.size();
    Filled<TQ4>& with = *caches.emplace_back(std::make_unique<Filled<TQ4>>(2048, 1, isa));
    logits.emplace_back([&] { EXPECT_OK(turboquant::logits(with.cache, with.id, 0, query.rows(), out.data())); });
    attention.emplace_back([&] { with.attend(query); });
    appends.emplace_back([&] {
      const SequenceId id = new_sequence(with.cache);
      EXPECT_OK(append_only(with.cache, 0, id, rows, rows));
      with.cache.release(id);
    });
  }
  for (const auto* work : {&logits, &attention, &appends}) {
    const std::vector<double> times = times_of(*work);
    EXPECT_LE(times[best], 2 * *std::min_element(times.begin(), times.end()));
  }
}

// Products and scales that are subnormal, and weights that vanish.
TEST(Cliffs, R04_SmallNumbersAreNotSlow) {
  SKIP_IF_SLOWED_DOWN();
  const Block query = gaussian_block(3, 1, 4, kDim), small_query = gaussian_block(3, 1, 4, kDim, 1e-4),
              rows = gaussian_block(1, 512, 1, kDim);
  Filled<TQ4> plain(2048);
  const auto append = [](Filled<TQ4>& to, const Block& appended) {
    const SequenceId id = new_sequence(to.cache);
    EXPECT_OK(append_only(to.cache, 0, id, appended, appended));
    to.cache.release(id);
  };
  for (const double size : {1e-20, 1e-37, 1e-38, 1e-39, 1e-41}) {
    Filled<TQ4> small(2048, size);
    const Block small_rows = gaussian_block(1, 512, 1, kDim, size);
    const std::vector<double> reads = times_of({[&] { plain.attend(query); }, [&] { small.attend(query); },
                                                [&] { small.attend(small_query); }, [&] { plain.attend(query, 8); }});
    for (std::size_t i = 1; i < reads.size(); ++i) EXPECT_LE(reads[i], 3 * reads[0]) << size << " way " << i;
    const std::vector<double> writes = times_of({[&] { append(plain, rows); }, [&] { append(small, small_rows); }});
    EXPECT_LE(writes[1], 3 * writes[0]) << size;
  }
}

}  // namespace
