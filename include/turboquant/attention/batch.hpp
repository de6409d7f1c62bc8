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
/// Query head h reads KV head h / (heads / kv_heads). All numbers are finite, or refused;
/// a sink may be minus infinity.
struct AttentionParams {
  float scale = 0;                        ///< 0: 1 / sqrt(head_dim)
  bool causal = true;                     ///< a query at position p sees keys j <= p
  float softcap = 0;                      ///< logit -> softcap tanh(logit / softcap), not negative; 0: none
  std::span<const float> alibi_slopes{};  ///< one per query head, or none
  std::span<const float> sink_logits{};   ///< one per query head, or none: a logit after scaling that takes part in the
                                          ///< sum only; minus infinity: no sink for this head
};

/// One sequence's part of a step. `out` and `lse` overlap no other rows of the batch. An output beyond the range of the
/// type of `out`, 65504 for f16, becomes infinite there.
struct BatchItem {
  SequenceId sequence{};  ///< whose tokens
  ConstRows keys{};       ///< new tokens [tokens][kv_heads][head_dim], after rotary embedding; none: attend only
  ConstRows values{};     ///< [tokens][kv_heads][value_dim], as many tokens as keys
  ConstRows queries{};    ///< [tokens][heads][head_dim]; none: append only
  Rows out{};             ///< [tokens][heads][value_dim]
  float* lse =
      nullptr;  ///< [tokens][heads] log-sum-exp; with it the result is a partial and sinks are left to the merge
  std::size_t position = npos;          ///< of query 0; npos: length after the append - queries.tokens
  const std::uint64_t* tree = nullptr;  ///< [tokens]: the last queries.tokens tokens are a tree of drafts, parents
                                        ///< before children; bit j of word i: query i sees token j of it (itself and
                                        ///< all its ancestors). Query i stands behind its ancestors: position is
                                        ///< ignored. All of it must be raw still: at most recent_tokens, and not sealed
  std::size_t key_begin = 0;   ///< attend to the positions [key_begin, key_end) only: split contexts, shifted spans
  std::size_t key_end = npos;  ///< npos: all behind key_begin
};

/// Tokens of one coded page that the caller owns: its tokens [first, first + count).
struct PageSpan {
  const std::byte* page = nullptr;  ///< page_bytes() of the PageCodec, aligned to 64
  std::uint32_t first = 0;          ///< token of the page
  std::uint32_t count = 0;          ///< tokens
};

/// One sequence's part of a step over pages that the caller owns (attend_pages): its tokens are those of `pages`, in
/// this order, and behind them raw rows.
struct PageItem {
  std::span<const PageSpan> pages{};  ///< coded tokens, in order
  ConstRows keys{};                   ///< raw rows behind them [tokens][kv_heads][head_dim], or none
  ConstRows values{};                 ///< [tokens][kv_heads][value_dim], as many tokens as keys
  ConstRows queries{};                ///< [tokens][heads][head_dim]
  Rows out{};                         ///< [tokens][heads][value_dim]
  float* lse = nullptr;               ///< as in BatchItem
  std::size_t position = npos;        ///< of query 0; npos: all tokens - queries.tokens
  std::size_t key_begin = 0;          ///< as in BatchItem
  std::size_t key_end = npos;         ///< as in BatchItem
};

/// The default executor: a loop. An executor is any callable (tasks, body) that runs body(i) once for every i < tasks,
/// in any order, on any thread, and returns when all are done.
struct Serial {
  /// body(0), body(1), ..., body(tasks - 1), on the calling thread.
  template <class Body>
  void operator()(std::size_t tasks, Body&& body) const {
    for (std::size_t i = 0; i < tasks; ++i) body(i);
  }
};

}  // namespace turboquant
