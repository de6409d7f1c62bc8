// Buffers of floats that tests hand to the library, and one call of attend for one sequence.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <turboquant/turboquant.hpp>
#include <vector>

#include "oracle/attention.hpp"
#include "oracle/random.hpp"
#include "oracle/rounding.hpp"

namespace tests {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Floats in the order [tokens][heads][dim].
struct Block {
  std::size_t tokens = 0, heads = 0, dim = 0;
  std::vector<float> numbers;

  Block() = default;
  Block(std::size_t tokens_, std::size_t heads_, std::size_t dim_, float fill = 0)
      : tokens(tokens_), heads(heads_), dim(dim_), numbers(tokens_ * heads_ * dim_, fill) {}

  float* row(std::size_t token, std::size_t head = 0) { return numbers.data() + (token * heads + head) * dim; }
  const float* row(std::size_t token, std::size_t head = 0) const {
    return numbers.data() + (token * heads + head) * dim;
  }

  turboquant::ConstRows rows() const {
    return tokens == 0 ? turboquant::ConstRows() : turboquant::ConstRows(numbers.data(), tokens, heads, dim);
  }
  turboquant::Rows rows() {
    return tokens == 0 ? turboquant::Rows() : turboquant::Rows(numbers.data(), tokens, heads, dim);
  }

  /// The tokens [begin, end).
  Block slice(std::size_t begin, std::size_t end) const {
    Block part(end - begin, heads, dim);
    if (end > begin) std::memcpy(part.numbers.data(), row(begin), part.numbers.size() * sizeof(float));
    return part;
  }
  void append(const Block& more) {
    heads = more.heads;
    dim = more.dim;
    tokens += more.tokens;
    numbers.insert(numbers.end(), more.numbers.begin(), more.numbers.end());
  }
  /// Rounded to bfloat16, as the cache keeps its rows.
  oracle::Tensor bfloat16_rounded() const {
    oracle::Tensor tensor(tokens, heads, dim);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      tensor.numbers[i] = oracle::round_bfloat16(static_cast<double>(numbers[i]));
    return tensor;
  }
  oracle::Tensor exact() const {
    oracle::Tensor tensor(tokens, heads, dim);
    for (std::size_t i = 0; i < numbers.size(); ++i) tensor.numbers[i] = static_cast<double>(numbers[i]);
    return tensor;
  }
};

/// N(0, scale^2). The row of token t depends on (seed, first_token + t) alone, so that a stream can be made in pieces.
inline Block gaussian_block(std::uint64_t seed, std::size_t tokens, std::size_t heads, std::size_t dim,
                            double scale = 1, std::size_t first_token = 0) {
  Block block(tokens, heads, dim);
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t i = 0; i < heads * dim; ++i)
      block.numbers[t * heads * dim + i] = static_cast<float>(scale * oracle::gaussian(seed, first_token + t, i));
  return block;
}

/// What one call of attend wrote.
struct Outcome {
  turboquant::Status status;
  Block out;
  std::vector<float> lse;
};

struct CallOptions {
  turboquant::AttentionParams params{};
  bool with_lse = true;
  std::size_t position = turboquant::npos, key_begin = 0, key_end = turboquant::npos;
  const std::uint64_t* tree = nullptr;
};

/// One attend for one sequence. `keys`, `values` or `queries` may have no tokens. Outputs start as NaN.
template <class Cache>
Outcome attend_one(Cache& cache, std::size_t layer, turboquant::SequenceId id, const Block& keys, const Block& values,
                   const Block& queries, const CallOptions& options = {}) {
  const turboquant::LayerShape& shape = cache.config().layers[layer];
  const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
  Outcome outcome{{},
                  Block(queries.tokens, queries.heads, value_dim, kNaN),
                  std::vector<float>(queries.tokens * queries.heads, kNaN)};
  turboquant::BatchItem item;
  item.sequence = id;
  item.keys = keys.rows();
  item.values = values.rows();
  item.queries = queries.rows();
  item.out = outcome.out.rows();
  if (options.with_lse && queries.tokens != 0) item.lse = outcome.lse.data();
  item.position = options.position;
  item.tree = options.tree;
  item.key_begin = options.key_begin;
  item.key_end = options.key_end;
  outcome.status = turboquant::attend(cache, layer, std::span<const turboquant::BatchItem>(&item, 1), options.params);
  return outcome;
}

/// Appends without queries.
template <class Cache>
turboquant::Status append_only(Cache& cache, std::size_t layer, turboquant::SequenceId id, const Block& keys,
                               const Block& values) {
  return attend_one(cache, layer, id, keys, values, Block()).status;
}

/// Attends without appending.
template <class Cache>
Outcome attend_only(Cache& cache, std::size_t layer, turboquant::SequenceId id, const Block& queries,
                    const CallOptions& options = {}) {
  return attend_one(cache, layer, id, Block(), Block(), queries, options);
}

template <class Cache>
turboquant::SequenceId new_sequence(Cache& cache) {
  turboquant::SequenceId id;
  EXPECT_TRUE(cache.create_sequence(id) == turboquant::Status::ok);
  return id;
}

/// The decoded rows [begin, end) of keys and values.
template <class Cache>
turboquant::Status read_rows(const Cache& cache, turboquant::SequenceId id, std::size_t layer, std::size_t begin,
                             std::size_t end, Block& keys, Block& values) {
  const turboquant::LayerShape& shape = cache.config().layers[layer];
  keys = Block(end - begin, shape.kv_heads, shape.head_dim, kNaN);
  values = Block(end - begin, shape.kv_heads, shape.value_dim != 0 ? shape.value_dim : shape.head_dim, kNaN);
  return cache.read(id, layer, begin, keys.rows(), values.rows());
}

/// Equal bit for bit: NaN equals itself, +0 and -0 differ.
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
inline bool same_bits(const Block& a, const Block& b) { return same_bits(a.numbers, b.numbers); }
inline bool same_bits(const Outcome& a, const Outcome& b) { return same_bits(a.out, b.out) && same_bits(a.lse, b.lse); }

/// Joins the outcomes of consecutive calls.
inline void append_outcome(Outcome& all, const Outcome& more) {
  if (!(more.status == turboquant::Status::ok)) all.status = more.status;
  if (more.out.tokens != 0) all.out.append(more.out);
  all.lse.insert(all.lse.end(), more.lse.begin(), more.lse.end());
}

inline bool all_finite(const Block& block) {
  for (const float x : block.numbers)
    if (!turboquant::is_finite(x)) return false;
  return true;
}

}  // namespace tests

#define EXPECT_OK(...)                                                                               \
  do {                                                                                               \
    const turboquant::Status checked_status = (__VA_ARGS__);                                         \
    EXPECT_TRUE(checked_status == turboquant::Status::ok)                                            \
        << turboquant::to_string(checked_status.code) << ' ' << checked_status.field << " expected " \
        << checked_status.expected << " found " << checked_status.found;                             \
  } while (false)
#define ASSERT_OK(...)                                                                               \
  do {                                                                                               \
    const turboquant::Status checked_status = (__VA_ARGS__);                                         \
    ASSERT_TRUE(checked_status == turboquant::Status::ok)                                            \
        << turboquant::to_string(checked_status.code) << ' ' << checked_status.field << " expected " \
        << checked_status.expected << " found " << checked_status.found;                             \
  } while (false)
#define EXPECT_STATUS(wanted, ...)                                                    \
  do {                                                                                \
    const turboquant::Status checked_status = (__VA_ARGS__);                          \
    EXPECT_TRUE(checked_status == turboquant::Status::wanted)                         \
        << turboquant::to_string(checked_status.code) << ' ' << checked_status.field; \
    EXPECT_STRNE(checked_status.field, "");                                           \
  } while (false)
