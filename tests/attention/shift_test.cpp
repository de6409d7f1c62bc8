// A context that shifts: after erase the span behind the gap is asked with a query turned back by the shift, and
// nothing is coded again.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>

#include "cache/block.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::SequenceId;

constexpr std::size_t kDim = 64, kHeads = 2, kFirst = 16;

/// Rotary embedding for position `position`, of pairs (i, i + dim / 2). x: [dim].
template <class T>
void rotate_to(T* x, double position) {
  for (std::size_t i = 0; i < kDim / 2; ++i) {
    const double angle = position * std::pow(10000.0, -2.0 * static_cast<double>(i) / kDim);
    const auto a = static_cast<double>(x[i]), b = static_cast<double>(x[i + kDim / 2]);
    x[i] = static_cast<T>(a * std::cos(angle) - b * std::sin(angle));
    x[i + kDim / 2] = static_cast<T>(a * std::sin(angle) + b * std::cos(angle));
  }
}
Block rotated(Block rows, std::size_t first_position) {
  for (std::size_t t = 0; t < rows.tokens; ++t)
    for (std::size_t h = 0; h < rows.heads; ++h) rotate_to(rows.row(t, h), static_cast<double>(first_position + t));
  return rows;
}

double relative_distance(const oracle::Tensor& a, const oracle::Tensor& b) {
  return oracle::distance(a.numbers.data(), b.numbers.data(), a.numbers.size()) /
         oracle::norm(b.numbers.data(), b.numbers.size());
}

/// A cache whose window of `kKept` tokens behind the first `kFirst` moves on by `kStep` per round.
template <class F>
void expect_shifts_cost_nothing() {
  constexpr std::size_t kKept = 160, kStep = 32, kRounds = 10, kAll = kFirst + kKept + kStep * kRounds;
  CacheConfig config;
  config.layers = {{.kv_heads = 1, .head_dim = kDim}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  KVCache<F> cache(config);
  const Block keys = gaussian_block(1, kAll, 1, kDim), values = gaussian_block(2, kAll, 1, kDim);
  const SequenceId id = new_sequence(cache);
  ASSERT_OK(append_only(cache, 0, id, rotated(keys.slice(0, kFirst + kKept), 0), values.slice(0, kFirst + kKept)));
  Block kept_keys = keys.slice(0, kFirst + kKept), kept_values = values.slice(0, kFirst + kKept);
  double fresh_error = 0, shifted_error = 0;
  for (std::size_t round = 1; round <= kRounds; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    ASSERT_OK(cache.erase(id, kFirst, kFirst + kStep));
    const std::size_t shift = kStep * round, begin = kFirst + kKept + shift - kStep;
    // New keys are turned on from where the old ones stopped.
    const Block new_keys = rotated(keys.slice(begin, begin + kStep), begin),
                new_values = values.slice(begin, begin + kStep);
    const std::size_t at = kFirst + kKept - 1;  // position of the newest token, and of the query
    const Block query = gaussian_block(50 + round, 1, kHeads, kDim, 1.5);
    const Block near_query = rotated(query, at + shift), far_query = rotated(query, at);
    Outcome near{{}, Block(1, kHeads, kDim, kNaN), std::vector<float>(kHeads)}, far = near;
    std::array<BatchItem, 2> items;
    items[0].sequence = items[1].sequence = id;
    items[0].keys = new_keys.rows();
    items[0].values = new_values.rows();
    items[0].queries = far_query.rows();
    items[0].key_end = kFirst;
    items[0].out = far.out.rows();
    items[0].lse = far.lse.data();
    items[1].queries = near_query.rows();
    items[1].key_begin = kFirst;
    items[1].out = near.out.rows();
    items[1].lse = near.lse.data();
    ASSERT_OK(turboquant::attend(cache, 0, items));
    turboquant::merge_partials(far.out.rows(), far.lse.data(), near.out.rows(), near.lse.data());

    // What the cache holds, turned to where the tokens now stand.
    Block held_keys, held_values;
    ASSERT_OK(read_rows(cache, id, 0, 0, at + 1, held_keys, held_values));
    oracle::Tensor turned = held_keys.exact();
    for (std::size_t t = kFirst; t <= at; ++t) rotate_to(turned.row(t, 0), -static_cast<double>(shift));
    const oracle::Tensor same_codes = oracle::attend(turned, held_values.exact(), far_query.exact(), at, {});
    // The query's int8 rounding: 5 / 127 / sqrt(12) of |q| per coordinate, times |k|: a deviation of 0.017 per logit of
    // deviation 1.5, which averages out over 176 keys.
    EXPECT_LT(relative_distance(far.out.exact(), same_codes), 0.02);

    // The same tokens in a cache that got them at these positions.
    Block all_keys = kept_keys.slice(0, kFirst), all_values = kept_values.slice(0, kFirst);
    all_keys.append(keys.slice(kFirst + shift, begin + kStep));
    all_values.append(values.slice(kFirst + shift, begin + kStep));
    const oracle::Tensor truth =
        oracle::attend(rotated(all_keys, 0).exact(), all_values.exact(), far_query.exact(), at, {});
    const SequenceId fresh = new_sequence(cache);
    ASSERT_OK(append_only(cache, 0, fresh, rotated(all_keys, 0), all_values));
    const Outcome direct = attend_only(cache, 0, fresh, far_query);
    ASSERT_OK(direct.status);
    fresh_error += relative_distance(direct.out.exact(), truth);
    shifted_error += relative_distance(far.out.exact(), truth);
    cache.release(fresh);
  }
  // Two draws of the same error: each is the mean of 10 rounds x 2 heads x 64 coordinates that share few keys of
  // weight, and scatters by some ten per cent.
  EXPECT_LT(shifted_error, 1.5 * fresh_error);
  EXPECT_LT(fresh_error, 1.5 * shifted_error);
  EXPECT_GT(fresh_error, 0.01);  // there is something to compare
}

TEST(Shift, F12_TenShiftsErrNoMoreThanFreshKeysTq4) { expect_shifts_cost_nothing<turboquant::TQ4>(); }
TEST(Shift, F12_TenShiftsErrNoMoreThanFreshKeysTq3) { expect_shifts_cost_nothing<turboquant::TQ3>(); }

}  // namespace
