// Exact attention in double precision, written from its definition: the truth that the library's outputs are held to.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace oracle {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
inline constexpr std::size_t kAllKeys = static_cast<std::size_t>(-1);

/// Numbers in the order [tokens][heads][dim].
struct Tensor {
  std::size_t tokens = 0, heads = 0, dim = 0;
  std::vector<double> numbers;

  Tensor() = default;
  Tensor(std::size_t tokens_, std::size_t heads_, std::size_t dim_)
      : tokens(tokens_), heads(heads_), dim(dim_), numbers(tokens_ * heads_ * dim_, 0.0) {}

  double* row(std::size_t token, std::size_t head) { return numbers.data() + (token * heads + head) * dim; }
  const double* row(std::size_t token, std::size_t head) const { return numbers.data() + (token * heads + head) * dim; }

  /// Appends the tokens of `more`, whose heads and dim are equal (or this is empty).
  void append(const Tensor& more) {
    heads = more.heads;
    dim = more.dim;
    tokens += more.tokens;
    numbers.insert(numbers.end(), more.numbers.begin(), more.numbers.end());
  }
  /// Keeps the first `count` tokens.
  void truncate(std::size_t count) {
    tokens = count;
    numbers.resize(count * heads * dim);
  }
  /// Removes the tokens [begin, end).
  void erase(std::size_t begin, std::size_t end) {
    const auto at = [&](std::size_t token) {
      return numbers.begin() + static_cast<std::ptrdiff_t>(token * heads * dim);
    };
    numbers.erase(at(begin), at(end));
    tokens -= end - begin;
  }
};

struct Options {
  double scale = 0;  // 0: 1 / sqrt(dim)
  bool causal = true;
  double softcap = 0;                  // 0: none
  std::vector<double> alibi_slopes{};  // per query head; empty: none
  std::vector<double> sink_logits{};   // per query head; empty: none
  std::size_t window = 0;              // 0: all
  std::size_t key_begin = 0, key_end = kAllKeys;
};

double dot(const double* a, const double* b, std::size_t dim);
double distance(const double* a, const double* b, std::size_t dim);
inline double norm(const double* a, std::size_t dim) { return std::sqrt(dot(a, a, dim)); }
/// Adds factor * row to `to`.
void add_scaled(double* to, double factor, const double* row, std::size_t dim);

/// Attention of one query head at one position.
struct Row {
  std::vector<double> out;
  std::vector<double> logits;   // per key: after scale, cap and bias; -infinity where masked
  std::vector<double> weights;  // per key: softmax, sinks included in the sum
  double lse = kMinusInfinity;  // log of the sum of exp(logits), sinks included
};

/// `key(j)` and `value(j)` return the rows of key j, 0 <= j < keys, as `const double*`.
template <class KeyRow, class ValueRow>
Row attend_row(const double* query, std::size_t dim, std::size_t value_dim, std::size_t keys, const KeyRow& key,
               const ValueRow& value, std::size_t position, std::size_t head, const Options& options) {
  Row row;
  row.out.assign(value_dim, 0.0);
  row.logits.assign(keys, kMinusInfinity);
  row.weights.assign(keys, 0.0);
  const double scale = options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(dim));
  const auto p = static_cast<std::int64_t>(position);
  double maximum = kMinusInfinity;
  for (std::size_t j = 0; j < keys; ++j) {
    const auto back = p - static_cast<std::int64_t>(j);
    if (j < options.key_begin || j >= options.key_end) continue;
    if (options.causal && back < 0) continue;
    if (options.window != 0 && back >= static_cast<std::int64_t>(options.window)) continue;
    double logit = scale * dot(query, key(j), dim);
    if (options.softcap != 0) logit = options.softcap * std::tanh(logit / options.softcap);
    if (!options.alibi_slopes.empty()) logit -= options.alibi_slopes[head] * static_cast<double>(back);
    row.logits[j] = logit;
    if (logit > maximum) maximum = logit;
  }
  const bool has_sink = !options.sink_logits.empty();
  if (has_sink && options.sink_logits[head] > maximum) maximum = options.sink_logits[head];
  if (maximum == kMinusInfinity) return row;
  double sum = has_sink ? std::exp(options.sink_logits[head] - maximum) : 0.0;
  for (std::size_t j = 0; j < keys; ++j) sum += std::exp(row.logits[j] - maximum);
  for (std::size_t j = 0; j < keys; ++j) {
    row.weights[j] = std::exp(row.logits[j] - maximum) / sum;
    if (row.weights[j] == 0) continue;
    add_scaled(row.out.data(), row.weights[j], value(j), value_dim);
  }
  row.lse = maximum + std::log(sum);
  return row;
}

/// Attention of `queries` [tokens][heads][dim], the first of them at `position`, over [keys][kv_heads][dim] and
/// [keys][kv_heads][value_dim]; query head h reads key head h / (heads / kv_heads). `lse` gets [tokens][heads].
inline Tensor attend(const Tensor& keys, const Tensor& values, const Tensor& queries, std::size_t position,
                     const Options& options, std::vector<double>* lse = nullptr) {
  Tensor out(queries.tokens, queries.heads, values.dim);
  if (lse != nullptr) lse->assign(queries.tokens * queries.heads, kMinusInfinity);
  for (std::size_t t = 0; t < queries.tokens; ++t)
    for (std::size_t h = 0; h < queries.heads; ++h) {
      const std::size_t kv = h / (queries.heads / keys.heads);
      const Row row = attend_row(
          queries.row(t, h), queries.dim, values.dim, keys.tokens, [&](std::size_t j) { return keys.row(j, kv); },
          [&](std::size_t j) { return values.row(j, kv); }, position + t, h, options);
      for (std::size_t i = 0; i < values.dim; ++i) out.row(t, h)[i] = row.out[i];
      if (lse != nullptr) (*lse)[t * queries.heads + h] = row.lse;
    }
  return out;
}

/// Log of exp(a) + exp(b).
inline double log_add(double a, double b) {
  const double maximum = a > b ? a : b;
  return maximum == kMinusInfinity ? maximum : maximum + std::log(std::exp(a - maximum) + std::exp(b - maximum));
}

/// Joins the attention over two disjoint sets of keys: `out` and `lse` [tokens][heads] take in the other part.
inline void merge(Tensor& out, std::vector<double>& lse, const Tensor& other, const std::vector<double>& other_lse) {
  for (std::size_t r = 0; r < lse.size(); ++r) {
    const double joined = log_add(lse[r], other_lse[r]);
    if (joined == kMinusInfinity) continue;
    const double mine = std::exp(lse[r] - joined), others = std::exp(other_lse[r] - joined);
    for (std::size_t i = 0; i < out.dim; ++i)
      out.numbers[r * out.dim + i] = mine * out.numbers[r * out.dim + i] + others * other.numbers[r * out.dim + i];
    lse[r] = joined;
  }
}

/// Lets one sink logit per head take part in the sums of a finished attention.
inline void add_sinks(Tensor& out, std::vector<double>& lse, const std::vector<double>& sink_logits) {
  Tensor nothing(out.tokens, out.heads, out.dim);
  std::vector<double> sinks(lse.size());
  for (std::size_t r = 0; r < lse.size(); ++r) sinks[r] = sink_logits[r % out.heads];
  merge(out, lse, nothing, sinks);
}

/// The number of tokens that a query sees as codes (those below `first` excepted) with `present` tokens there:
/// first + page * floor(max(0, present - first - recent) / page), and at most `present`.
constexpr std::size_t coded_tokens(std::size_t present, std::size_t first, std::size_t page, std::size_t recent) {
  const std::size_t kept = first + recent;
  const std::size_t pages = present > kept ? (present - kept) / page : 0;
  const std::size_t coded = first + page * pages;
  return coded < present ? coded : present;
}

}  // namespace oracle
