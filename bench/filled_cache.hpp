// A cache of one KV head filled with random tokens, all of them coded, as the benchmarks read it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <vector>

#include <turboquant/turboquant.hpp>

/// `count` standard normal numbers.
inline std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> floats(count);
  for (float& x : floats) x = normal(bits);
  return floats;
}

/// Ends the program with the status in words unless it is ok: a benchmark of a refused call would mean nothing.
inline void require_ok(const turboquant::Status& status, const char* call) {
  if (status == turboquant::Status::ok) return;
  std::fprintf(stderr, "%s: %s, %s: expected %lld, found %lld\n", call, turboquant::to_string(status.code),
               status.field, static_cast<long long>(status.expected), static_cast<long long>(status.found));
  std::exit(1);
}

/// Random keys and values, [tokens][1][dim]. The same ones serve over and over: encoding and reading do not depend on
/// what they are.
struct RandomTokens {
  std::size_t tokens, dim;
  std::vector<float> keys, values;

  RandomTokens(std::size_t token_count, std::size_t head_dim)
      : tokens(token_count),
        dim(head_dim),
        keys(random_floats(token_count * head_dim, 1)),
        values(random_floats(token_count * head_dim, 2)) {}

  template <class Cache>
  void append_to(Cache& cache, turboquant::SequenceId sequence, std::size_t count) const {
    turboquant::BatchItem item;
    item.sequence = sequence;
    item.keys = turboquant::ConstRows(keys.data(), count, 1, dim);
    item.values = turboquant::ConstRows(values.data(), count, 1, dim);
    require_ok(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1)), "append");
  }
};

template <class F>
class FilledCache {
 public:
  /// `tokens`: rounded up to whole pages.
  FilledCache(std::size_t tokens, std::size_t dim) : dim_(dim), cache_(config(dim)) {
    const std::size_t page = cache_.config().page_tokens;
    tokens_ = (tokens + page - 1) / page * page;
    require_ok(cache_.create_sequence(sequence_), "create_sequence");
    const RandomTokens source((std::min)(tokens_, std::size_t{8192}), dim);
    for (std::size_t left = tokens_; left > 0;) {
      const std::size_t count = (std::min)(left, source.tokens);
      source.append_to(cache_, sequence_, count);
      left -= count;
    }
  }

  std::size_t tokens() const { return tokens_; }

  /// out: [heads][tokens()].
  void compute_logits(const float* queries, std::size_t heads, float* out) const {
    require_ok(turboquant::logits(cache_, sequence_, 0, turboquant::ConstRows(queries, 1, heads, dim_), out), "logits");
  }
  /// One decode step that appends nothing. queries, out: [heads][dim].
  void attend(const float* queries, std::size_t heads, float* out) {
    turboquant::BatchItem item;
    item.sequence = sequence_;
    item.queries = turboquant::ConstRows(queries, 1, heads, dim_);
    item.out = turboquant::Rows(out, 1, heads, dim_);
    require_ok(turboquant::attend(cache_, 0, std::span<const turboquant::BatchItem>(&item, 1)), "attend");
  }

 private:
  static turboquant::CacheConfig config(std::size_t dim) {
    turboquant::CacheConfig config;
    config.layers[0].head_dim = static_cast<std::uint32_t>(dim);
    config.recent_tokens = 0;
    config.rollback_tokens = 0;
    return config;
  }

  std::size_t dim_, tokens_ = 0;
  turboquant::KVCache<F> cache_;
  turboquant::SequenceId sequence_;
};
