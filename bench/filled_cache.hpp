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

/// Attention of every query over every token, whatever their positions.
inline turboquant::AttentionParams all_tokens() {
  turboquant::AttentionParams params;
  params.causal = false;
  return params;
}

template <class F>
class FilledCache {
 public:
  /// `tokens` of each of the `sequences`: rounded up to whole pages.
  FilledCache(std::size_t tokens, std::size_t dim, turboquant::Isa isa = turboquant::best_isa(),
              std::size_t sequences = 1)
      : dim_(dim), cache_(config(dim), isa), sequences_(sequences) {
    const std::size_t page = cache_.config().page_tokens;
    tokens_ = (tokens + page - 1) / page * page;
    const RandomTokens source((std::min)(tokens_, std::size_t{8192}), dim);
    for (turboquant::SequenceId& sequence : sequences_) {
      require_ok(cache_.create_sequence(sequence), "create_sequence");
      for (std::size_t left = tokens_; left > 0;) {
        const std::size_t count = (std::min)(left, source.tokens);
        source.append_to(cache_, sequence, count);
        left -= count;
      }
    }
  }

  /// Of one sequence.
  std::size_t tokens() const { return tokens_; }

  /// out: [heads][tokens()]. Of the first sequence.
  void compute_logits(const float* queries, std::size_t heads, float* out) const {
    require_ok(turboquant::logits(cache_, sequences_[0], 0, turboquant::ConstRows(queries, 1, heads, dim_), out),
               "logits");
  }
  /// One decode step that appends nothing, all sequences in one call. queries, out: [sequences][heads][dim].
  template <class E = turboquant::Serial>
  void attend(const float* queries, std::size_t heads, float* out, E&& executor = {}) {
    attend_all(queries, 1, heads, out, {}, executor);
  }
  /// `count` queries of one head against all tokens. queries, out: [sequences][count][dim].
  void prefill(const float* queries, std::size_t count, float* out) {
    attend_all(queries, count, 1, out, all_tokens(), turboquant::Serial());
  }

 private:
  static turboquant::CacheConfig config(std::size_t dim) {
    turboquant::CacheConfig config;
    config.layers[0].head_dim = static_cast<std::uint32_t>(dim);
    config.recent_tokens = 0;
    config.rollback_tokens = 0;
    return config;
  }

  template <class E>
  void attend_all(const float* queries, std::size_t count, std::size_t heads, float* out,
                  const turboquant::AttentionParams& params, E&& executor) {
    std::vector<turboquant::BatchItem> items(sequences_.size());
    for (std::size_t k = 0; k < items.size(); ++k) {
      items[k].sequence = sequences_[k];
      items[k].queries = turboquant::ConstRows(queries + k * count * heads * dim_, count, heads, dim_);
      items[k].out = turboquant::Rows(out + k * count * heads * dim_, count, heads, dim_);
    }
    require_ok(turboquant::attend(cache_, 0, std::span<const turboquant::BatchItem>(items), params, executor),
               "attend");
  }

  std::size_t dim_, tokens_ = 0;
  turboquant::KVCache<F> cache_;
  std::vector<turboquant::SequenceId> sequences_;
};
