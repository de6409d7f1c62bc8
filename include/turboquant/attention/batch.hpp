// What an engine hands over for one layer of a step: parameters, items, and the default executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <turboquant/cache/sequence.hpp>
#include <turboquant/core/rows.hpp>
#include <turboquant/core/status.hpp>

namespace turboquant {

/// How logits are formed, in this order: scale, soft cap, + alibi_slope * (j - p), mask, sink.
/// Query head h reads KV head h / (heads / kv_heads).
struct AttentionParams {
  float scale = 0;                        ///< 0: 1 / sqrt(head_dim)
  bool causal = true;                     ///< a query at position p sees keys j <= p
  float softcap = 0;                      ///< logit -> softcap tanh(logit / softcap); 0: none
  std::span<const float> alibi_slopes{};  ///< one per query head, or none
  std::span<const float>
      sink_logits{};  ///< one per query head, or none: a logit after scaling that takes part in the sum only
};

/// One sequence's part of a step.
struct BatchItem {
  SequenceId sequence{};
  ConstRows keys{},
      values{};         ///< new tokens [tokens][kv_heads][dim]; none: attend only (shared layers, cross-attention)
  ConstRows queries{};  ///< [tokens][heads][head_dim]; none: append only
  Rows out{};           ///< [tokens][heads][value_dim]
  float* lse =
      nullptr;  ///< [tokens][heads] log-sum-exp; with it the result is a partial and sinks are left to the merge
  std::size_t position = npos;  ///< of query 0; npos: length after the append - queries.tokens
  const std::uint64_t* tree =
      nullptr;  ///< [tokens]: the last queries.tokens tokens are a tree of drafts, parents before
                ///< children; bit j of word i: query i sees token j of it (itself and all its
                ///< ancestors). Query i stands behind its ancestors: position is ignored
  std::size_t key_begin = 0, key_end = npos;  ///< attend to a part: split contexts, chunked attention, shifted spans
};

/// The default executor: a loop. An executor is any callable (tasks, body) that runs body(i) once for every i < tasks,
/// in any order, on any thread, and returns when all are done.
struct Serial {
  template <class Body>
  void operator()(std::size_t tasks, Body&& body) const {
    for (std::size_t i = 0; i < tasks; ++i) body(i);
  }
};

}  // namespace turboquant
