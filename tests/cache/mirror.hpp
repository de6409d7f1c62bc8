// A plain model of one layer of one sequence: what attention over it must give, and how far the library may be off.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "cache/block.hpp"

namespace tests {

using oracle::Tensor;

/// What the tests assume of a format: an upper bound for the squared error of a coded row over its squared norm, and
/// the number of steps in which a query's largest rotated coordinate is expressed.
struct Codes {
  double key_distortion = 0, value_distortion = 0;
  double query_steps = 127;
};

/// Lloyd-Max distortion of the normal distribution at 1-4 bits; the uniform grid at 8 bits. Unbiased scales turn D into
/// D / (1 - D), and a page's average over some dozen rows scatters by a few per cent: hence the margin of a quarter.
constexpr double distortion_bound(unsigned bits) {
  const double d = bits == 1 ? 0.3634 : bits == 2 ? 0.1175 : bits == 3 ? 0.03455 : bits == 4 ? 0.0095 : 1e-4;
  return 1.25 * d / (1 - d);
}
/// The codes of TQ<bits>. 8-bit keys are scored with a query in two int8 planes, the others in one.
constexpr Codes codes_of(unsigned key_bits, unsigned value_bits) {
  return {distortion_bound(key_bits), distortion_bound(value_bits), key_bits == 8 ? 127.0 * 128.0 : 127.0};
}
constexpr Codes codes_of(unsigned bits) { return codes_of(bits, bits); }

inline oracle::Options oracle_options(const turboquant::AttentionParams& params, std::size_t window, bool with_sinks) {
  oracle::Options options;
  options.scale = static_cast<double>(params.scale);
  options.causal = params.causal;
  options.softcap = static_cast<double>(params.softcap);
  options.alibi_slopes.assign(params.alibi_slopes.begin(), params.alibi_slopes.end());
  if (with_sinks) options.sink_logits.assign(params.sink_logits.begin(), params.sink_logits.end());
  options.window = window;
  return options;
}

/// How a set of queries came to the cache.
struct QueryContext {
  std::size_t position = 0;  // of the first
  bool own_call = true;      // they came with the tokens at their positions; false: in a later call
  std::size_t key_begin = 0, key_end = oracle::kAllKeys;
};

class Mirror {
 public:
  Mirror(const turboquant::CacheConfig& config, std::size_t layer, Codes codes)
      : codes_(codes),
        shape_(config.layers[layer]),
        layer_(layer),
        configured_first_(config.first_tokens),
        first_(config.first_tokens),
        base_(config.first_tokens),
        raw_begin_(config.first_tokens),
        page_(config.page_tokens),
        recent_(config.recent_tokens),
        rollback_(config.rollback_tokens) {}

  std::size_t length() const { return raw_keys_.tokens; }
  /// The tokens below this are seen as codes, the first ones excepted, with `present` tokens there.
  std::size_t coded(std::size_t present) const { return oracle::coded_tokens(present, base_, page_, recent_); }

  void append(const Block& keys, const Block& values) {
    if (keys.tokens == 0) return;
    raw_keys_.append(keys.bfloat16_rounded());
    raw_values_.append(values.bfloat16_rounded());
    raw_begin_ = std::max(raw_begin_, kept_raw(length()));
    if (shape_.window != 0) gone_ = std::max(gone_, out_of_sight());
  }
  /// While the raw rows that the shorter sequence needs are there, no trace stays. Deeper, what was coded stays coded.
  void truncate(std::size_t length) {
    raw_keys_.truncate(length);
    raw_values_.truncate(length);
    if (length <= first_) {
      start_anew();
    } else if (length < base_ || coded(length) < raw_begin_) {
      base_ = raw_begin_ = std::min(length, raw_begin_);
    }
    forget(coded(length));
  }
  void seal() {
    if (length() > first_) base_ = raw_begin_ = length();
  }
  /// True if erasing from `begin` on, down to `left` tokens, is as if the erased tokens had never come.
  bool is_traceless(std::size_t begin, std::size_t left) const {
    const bool all_raw = coded(length()) <= first_ && raw_begin_ == first_ && held() == first_;
    return (all_raw || begin >= raw_begin_) && (left <= first_ || coded(left) >= raw_begin_) &&
           coded(left) <= std::max(begin, first_);
  }
  void erase(std::size_t begin, std::size_t end) {
    const std::size_t left = length() - (end - begin), codes = std::max(coded(length()), held());
    const auto erased_before = [&](std::size_t at) { return std::min(end, at) - std::min(begin, at); };
    if (end == length()) return truncate(begin);
    gone_ -= erased_before(gone_);
    if (is_traceless(begin, left)) {
      forget(std::min(coded(left), begin));
      held_ = std::min(held_, coded(left));
      if (left <= first_) start_anew();
    } else {
      // What is coded stays coded, and the next page begins behind it.
      const std::size_t known = decoded_keys_.tokens;
      for (Tensor* rows : {&decoded_keys_, &decoded_values_, &centered_keys_, &centered_values_})
        if (begin < known) rows->erase(begin, std::min(end, known));
      base_ = raw_begin_ = codes - erased_before(codes);
      held_ -= erased_before(held_);
      first_ -= erased_before(first_);
    }
    raw_keys_.erase(begin, end);
    raw_values_.erase(begin, end);
  }
  /// Keeps begin + tokens[i] of the tokens from `begin` on, all of them raw.
  void keep(std::size_t begin, const std::vector<std::uint32_t>& tokens) {
    for (std::size_t at = length(); at-- > begin;) {
      if (std::binary_search(tokens.begin(), tokens.end(), at - begin)) continue;
      raw_keys_.erase(at, at + 1);
      raw_values_.erase(at, at + 1);
    }
    forget(std::min(coded(length()), begin));
    if (length() <= first_) start_anew();
  }

  /// What a window may not refuse. Whole pages are let go of, so that more than this may be possible.
  /// @{
  bool may_shorten(std::size_t length) const { return length <= first_ || is_held(length, first_, gone_); }
  bool may_erase(std::size_t begin, std::size_t end) const {
    const auto left = [&](std::size_t at) { return at - (std::min(end, at) - std::min(begin, at)); };
    return end == length() ? may_shorten(begin) : is_held(left(length()), left(first_), left(gone_));
  }
  bool may_look_back(std::size_t position, std::size_t key_begin) const {
    return shape_.window == 0 ||
           std::max({key_begin, first_, position + 1 - std::min(position + 1, window())}) >= gone_;
  }
  /// @}
  /// Rows before this, the first ones excepted, have been let go of, as far as `learn` knows.
  std::size_t held() const { return shape_.window == 0 ? first_ : std::max(first_, held_); }

  /// Takes over the decoded rows that have become readable since the last call and checks that they are near the rows
  /// that came in; checks that rows not coded yet are read back exactly.
  template <class Cache>
  void learn(const Cache& cache, turboquant::SequenceId id) {
    const std::size_t present = length(), now = coded(present);
    if (shape_.window != 0) {
      held_ = turboquant::detail::CacheAccess::core(cache).find(id)->layers[layer_].held_begin;
      ASSERT_LE(held(), std::max(first_, gone_)) << "let go of too early";
      ASSERT_GT(held() + page_, std::min(now, out_of_sight())) << "held for nobody";
    }
    if (decoded_keys_.tokens == 0) {
      decoded_keys_ = Tensor(0, raw_keys_.heads, raw_keys_.dim);
      decoded_values_ = Tensor(0, raw_values_.heads, raw_values_.dim);
      centered_keys_ = centered_values_ = Tensor(0, raw_keys_.heads, 1);
    }
    const std::size_t raw = std::max(decoded_keys_.tokens, std::min(first_, now));
    const std::size_t begin = std::max(raw, std::min(held(), now));
    if (begin > decoded_keys_.tokens) {
      decoded_keys_.append(tokens_of(raw_keys_, decoded_keys_.tokens, raw));
      decoded_values_.append(tokens_of(raw_values_, decoded_values_.tokens, raw));
      decoded_keys_.append(unknown_rows(begin - raw, raw_keys_));
      decoded_values_.append(unknown_rows(begin - raw, raw_values_));
      centered_keys_.append(Tensor(begin - centered_keys_.tokens, raw_keys_.heads, 1));
      centered_values_.append(Tensor(begin - centered_values_.tokens, raw_keys_.heads, 1));
    }
    Block keys, values;
    if (now > begin) {
      ASSERT_OK(read_rows(cache, id, layer_, begin, now, keys, values));
      decoded_keys_.append(keys.exact());
      decoded_values_.append(values.exact());
      center(raw_keys_, begin, now, centered_keys_);
      center(raw_values_, begin, now, centered_values_);
      expect_near(raw_keys_, decoded_keys_, centered_keys_, begin, codes_.key_distortion, "keys");
      expect_near(raw_values_, decoded_values_, centered_values_, begin, codes_.value_distortion, "values");
    }
    std::size_t visible = now;
    if (shape_.window != 0 && present > shape_.window) visible = std::max(visible, present - shape_.window);
    expect_exact(cache, id, std::max(visible, held()), present);
    expect_exact(cache, id, 0, std::min(first_, present));
  }

  /// Decoded rows as another mirror of the same tokens knows them: for layers whose window has let go of pages.
  void learn_from(const Mirror& twin) {
    decoded_keys_ = twin.decoded_keys_;
    decoded_values_ = twin.decoded_values_;
    centered_keys_ = twin.centered_keys_;
    centered_values_ = twin.centered_values_;
  }

  /// Compares what attend wrote with the oracle on the rows that these queries must see.
  void check(const Block& queries, const Outcome& outcome, const turboquant::AttentionParams& params,
             const QueryContext& context, bool with_lse = true) const {
    ASSERT_OK(outcome.status);
    oracle::Options options = oracle_options(params, shape_.window, !with_lse);
    options.key_begin = context.key_begin;
    options.key_end = context.key_end;
    const Tensor exact_queries = queries.exact();
    const std::size_t group = queries.heads / shape_.kv_heads;
    for (std::size_t t = 0; t < queries.tokens; ++t) {
      const std::size_t position = context.position + t;
      const std::size_t seen = seen_as_codes(position, context.own_call, params.causal);
      ASSERT_LE(seen, decoded_keys_.tokens) << "the mirror has not learned these rows";
      if (context.own_call && sees_unknown(position, context.key_begin, seen)) continue;
      const auto is_code = [&](std::size_t j) { return j >= first_ && j < seen; };
      for (std::size_t h = 0; h < queries.heads; ++h) {
        const std::size_t kv = h / group;
        const auto key = [&](std::size_t j) { return (is_code(j) ? decoded_keys_ : raw_keys_).row(j, kv); };
        const auto value = [&](std::size_t j) { return (is_code(j) ? decoded_values_ : raw_values_).row(j, kv); };
        const double* query = exact_queries.row(t, h);
        const oracle::Row truth =
            oracle::attend_row(query, queries.dim, outcome.out.dim, length(), key, value, position, h, options);
        const Budget budget = budget_of(query, queries.dim, truth, options, kv, seen, key, value, outcome.out.dim);
        double error = 0;
        for (std::size_t i = 0; i < outcome.out.dim; ++i) {
          const double difference = static_cast<double>(outcome.out.row(t, h)[i]) - truth.out[i];
          error += difference * difference;
        }
        ASSERT_LE(std::sqrt(error), budget.out)
            << "query " << t << " at " << position << " head " << h << " of length " << length() << ", codes below "
            << seen << ", output norm " << oracle::norm(truth.out.data(), truth.out.size());
        if (!with_lse) continue;
        const auto lse = static_cast<double>(outcome.lse[t * queries.heads + h]);
        if (truth.lse == oracle::kMinusInfinity) {
          ASSERT_EQ(lse, truth.lse);
        } else {
          ASSERT_NEAR(lse, truth.lse, budget.lse) << "query " << t << " head " << h;
        }
      }
    }
  }

  /// Compares unscaled logits [tokens][heads][length] with the oracle. Keys outside the window may be -infinity.
  void check_logits(const Block& queries, const std::vector<float>& logits) const {
    const Tensor exact_queries = queries.exact();
    const std::size_t group = queries.heads / shape_.kv_heads, present = length();
    const std::size_t seen = coded(present);
    const std::size_t visible = shape_.window != 0 && present > shape_.window ? present - shape_.window : 0;
    ASSERT_EQ(logits.size(), queries.tokens * queries.heads * present);
    oracle::Options options;
    options.scale = 1;
    for (std::size_t t = 0; t < queries.tokens; ++t)
      for (std::size_t h = 0; h < queries.heads; ++h)
        for (std::size_t j = 0; j < present; ++j) {
          const bool code = j >= first_ && j < seen;
          const float found = logits[(t * queries.heads + h) * present + j];
          if (j < visible && std::isinf(found) && found < 0) continue;
          const double* query = exact_queries.row(t, h);
          const double* key = (code ? decoded_keys_ : raw_keys_).row(j, h / group);
          const double truth = oracle::dot(query, key, queries.dim);
          const double deviation =
              logit_deviation(query, queries.dim, key, truth, 1, code ? centered_keys_.row(j, h / group)[0] : 0);
          ASSERT_NEAR(static_cast<double>(found), truth, 6 * deviation)
              << "query " << t << " head " << h << " key " << j << " of " << present;
        }
  }

  std::size_t first() const { return first_; }
  const Tensor& raw_keys() const { return raw_keys_; }
  const Tensor& raw_values() const { return raw_values_; }
  const Tensor& decoded_keys() const { return decoded_keys_; }
  const Tensor& decoded_values() const { return decoded_values_; }

 private:
  struct Budget {
    double out = 0, lse = 0;
  };

  /// Rows that the window let go of before they could be read: nobody may see them.
  static Tensor unknown_rows(std::size_t tokens, const Tensor& like) {
    Tensor rows(tokens, like.heads, like.dim);
    std::fill(rows.numbers.begin(), rows.numbers.end(), std::numeric_limits<double>::quiet_NaN());
    return rows;
  }

  static Tensor tokens_of(const Tensor& tensor, std::size_t begin, std::size_t end) {
    Tensor part = tensor;
    part.truncate(end);
    part.erase(0, begin);
    return part;
  }

  /// Raw rows before this are let go with `present` tokens there: a sequence shortened by rollback_tokens reads codes.
  std::size_t kept_raw(std::size_t present) const {
    return oracle::coded_tokens(std::max(present > rollback_ ? present - rollback_ : 0, base_), base_, page_, recent_);
  }

  std::size_t window() const { return shape_.window; }
  /// No query of the sequence, shortened by rollback_tokens, sees the rows before this.
  std::size_t out_of_sight() const { return length() - std::min(length(), rollback_ + window()); }
  bool is_held(std::size_t length, std::size_t first, std::size_t gone) const {
    return shape_.window == 0 || std::max(length - std::min(length, window()), first) >= gone;
  }

  void start_anew() {
    first_ = base_ = raw_begin_ = configured_first_;
    held_ = gone_ = 0;
  }

  void forget(std::size_t known) {
    if (decoded_keys_.tokens <= known) return;
    decoded_keys_.truncate(known);
    decoded_values_.truncate(known);
    centered_keys_.truncate(known);
    centered_values_.truncate(known);
  }

  /// Whether a query sees codes that were made and let go of in its own call, so that nobody else ever could.
  bool sees_unknown(std::size_t position, std::size_t key_begin, std::size_t seen) const {
    if (shape_.window == 0) return false;
    const std::size_t low = std::max({position + 1 - std::min(position + 1, window()), key_begin, first_});
    for (std::size_t j = low; j < seen; ++j)
      if (std::isnan(decoded_keys_.row(j, 0)[0])) return true;
    return false;
  }

  std::size_t seen_as_codes(std::size_t position, bool own_call, bool causal) const {
    const std::size_t present = length();
    if (!causal) return coded(present);
    std::size_t seen = coded(std::min(position + 1, present));
    return own_call ? seen : std::max(seen, std::min(raw_begin_, coded(present)));
  }

  /// Appends to `norms` how long the rows [begin, end) are after their page's mean was taken off; pages start at
  /// `begin`. The centre is rounded, to steps of its largest coordinate over 127 (32,767): that leaves up to 5 |m| /
  /// (127 sqrt(12)) = 0.0114 |m| of it in the rows, with a largest coordinate of five times the average.
  void center(const Tensor& rows, std::size_t begin, std::size_t end, Tensor& norms) const {
    for (std::size_t page = begin; page < end; page += page_) {
      const std::size_t page_end = std::min(page + page_, end);
      Tensor lengths(page_end - page, rows.heads, 1);
      for (std::size_t h = 0; h < rows.heads; ++h) {
        std::vector<double> mean(rows.dim, 0.0);
        for (std::size_t t = page; t < page_end && shape_.center_bits != 0; ++t)
          for (std::size_t i = 0; i < rows.dim; ++i)
            mean[i] += rows.row(t, h)[i] / static_cast<double>(page_end - page);
        const double left = (shape_.center_bits == 8 ? 0.0114 : 5e-5) * oracle::norm(mean.data(), rows.dim);
        for (std::size_t t = page; t < page_end; ++t)
          lengths.row(t - page, h)[0] = std::hypot(oracle::distance(rows.row(t, h), mean.data(), rows.dim), left);
      }
      norms.append(lengths);
    }
  }

  /// Standard deviation of a logit. The rotated query is rounded to steps of max / 127, an error uniform in half a step
  /// either way per coordinate, which meets the centred key: step / sqrt(12) * |k - m|. The largest of d rotated
  /// coordinates is at most |q| and, for vectors not built against the signs, 5 |q| / sqrt(d) (5 sigma). A quarter more
  /// for the error of the decoded key. All fp32 sums: a few 2^-24 of |q||k|. `centered`: |k - m|, 0 for a raw key.
  double logit_deviation(const double* query, std::size_t dim, const double* key, double logit, double scale,
                         double centered) const {
    const double query_norm = oracle::norm(query, dim);
    const double rounding = 2e-7 * (std::fabs(logit) + scale * query_norm * oracle::norm(key, dim));
    const double largest = query_norm * std::min(1.0, 5 / std::sqrt(static_cast<double>(dim)));
    return rounding + 1.25 * scale * largest / codes_.query_steps / std::sqrt(12.0) * centered;
  }

  /// Output error to first order: sum of p_j e_j (v_j - out) with e_j the logit errors, independent between keys, so
  /// the squares add; six of the deviations that result. Softmax weights of a step, up to 256 tokens, are rounded to 14
  /// bits of the largest of the step, which lies in the token's 256 or beside them. The fp32 sums: 2e-6 of the sum of p
  /// |v|.
  template <class KeyRow, class ValueRow>
  Budget budget_of(const double* query, std::size_t dim, const oracle::Row& truth, const oracle::Options& options,
                   std::size_t kv, std::size_t seen, const KeyRow& key, const ValueRow& value,
                   std::size_t value_dim) const {
    const double scale = options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(dim));
    double squares = 0, weight_squares = 0, absolute = 0, lse_bias = 0;
    std::map<std::size_t, std::pair<double, double>> steps;
    for (std::size_t j = 0; j < truth.weights.size(); ++j) {
      const double p = truth.weights[j];
      if (p == 0) continue;
      const bool code = j >= first_ && j < seen;
      const double deviation =
          logit_deviation(query, dim, key(j), truth.logits[j], scale, code ? centered_keys_.row(j, kv)[0] : 0);
      const double off = oracle::distance(value(j), truth.out.data(), value_dim);
      squares += p * p * deviation * deviation * off * off;
      weight_squares += p * p * deviation * deviation;
      lse_bias += p * deviation * deviation;
      absolute += p * oracle::norm(value(j), value_dim);
      if (code) {
        auto& [largest, count] = steps[(j - first_) / 256];
        largest = std::max(largest, p * centered_values_.row(j, kv)[0]);
        count += 1;
      }
    }
    Budget budget;
    budget.out = 6 * std::sqrt(squares) + 2e-6 * absolute + 1e-37;
    for (const auto& [number, step] : steps) {
      double largest = step.first;
      for (const std::size_t beside : {number - 1, number + 1}) {
        if (const auto found = steps.find(beside); found != steps.end())
          largest = std::max(largest, found->second.first);
      }
      budget.out += 0x1p-14 * largest * std::sqrt(step.second);
    }
    budget.lse = 6 * std::sqrt(weight_squares) + lse_bias + 2e-6 * (1 + std::fabs(truth.lse));
    return budget;
  }

  static void expect_near(const Tensor& raw, const Tensor& decoded, const Tensor& centered, std::size_t begin,
                          double bound, const char* side) {
    double error = 0, energy = 0;
    for (std::size_t h = 0; h < raw.heads; ++h)
      for (std::size_t j = begin; j < decoded.tokens; ++j) {
        error += std::pow(oracle::distance(raw.row(j, h), decoded.row(j, h), raw.dim), 2);
        energy += std::pow(centered.row(j, h)[0], 2);
      }
    // Few coordinates scatter: their squared errors have a standard deviation of about their mean, outliers included.
    // The rows of a page sum to nothing once their mean is taken off, so that one of them is not independent.
    const std::size_t rows = std::max<std::size_t>(decoded.tokens - begin, 2) - 1;
    const double coordinates = static_cast<double>(rows * raw.heads * raw.dim);
    EXPECT_LE(error, bound * (1 + 8 / std::sqrt(coordinates)) * energy)
        << side << " [" << begin << ", " << decoded.tokens << ")";
  }

  template <class Cache>
  void expect_exact(const Cache& cache, turboquant::SequenceId id, std::size_t begin, std::size_t end) const {
    if (begin >= end) return;
    Block keys, values;
    ASSERT_OK(read_rows(cache, id, layer_, begin, end, keys, values));
    EXPECT_EQ(keys.exact().numbers, tokens_of(raw_keys_, begin, end).numbers)
        << "raw keys [" << begin << ", " << end << ")";
    EXPECT_EQ(values.exact().numbers, tokens_of(raw_values_, begin, end).numbers)
        << "raw values [" << begin << ", " << end << ")";
  }

  Codes codes_;
  turboquant::LayerShape shape_;
  std::size_t layer_, configured_first_, first_, base_, raw_begin_, page_, recent_, rollback_;
  std::size_t held_ = 0, gone_ = 0;  // what a window has let go of; what it may have let go of
  Tensor raw_keys_, raw_values_, decoded_keys_, decoded_values_;
  Tensor centered_keys_, centered_values_;  // [tokens][heads][1]: norms after centring
};

}  // namespace tests
