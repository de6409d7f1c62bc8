// The functions an engine calls: attend, plan, logits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <type_traits>

#include <turboquant/attention/plan_builder.hpp>
#include <turboquant/cache/kv_cache.hpp>

namespace turboquant {

/// Prepares one layer of a step for a whole batch: validates everything (shapes, finite keys, values and queries),
/// reserves all memory, changes no length. Until the plan has run or is dropped its appending sequences accept no other
/// non-const call. Errors: unknown_sequence, bad_layer, bad_shape, non_finite_input, behind_window, out_of_memory;
/// Status::item is the item. Of "queries.heads" any multiple of `expected` will do; of "tree", `expected` may be the
/// query whose word `found` is wrong.
template <class... F>
Status plan(KVCache<F...>& cache, std::size_t layer, std::span<const BatchItem> batch, const AttentionParams& params,
            AttentionPlan& plan) {
  return detail::PlanAccess::plan(detail::CacheAccess::core(cache), layer, batch, params, plan);
}

namespace detail {

// Of work space that ends with slots, what is used by tasks that run one after the other: one slot.
template <class E>
std::size_t needed_slots(std::size_t slots) {
  return std::is_same_v<std::remove_cvref_t<E>, Serial> ? (std::min)(slots, std::size_t{1}) : slots;
}

template <class E>
Status run_plan(AttentionPlan& step, E&& executor) {
  std::byte* workspace = PlanAccess::scratch(step, PlanAccess::limit_slots(step, needed_slots<E>(Slots::kMost)));
  if (workspace == nullptr) return {Status::out_of_memory, "workspace"};
  const std::size_t phases = step.phases();
  for (std::size_t phase = 0; phase < phases; ++phase) {
    executor(step.tasks(phase), [&, phase](std::size_t task) { step.run(phase, task, workspace); });
  }
  return {};
}

}  // namespace detail

/// Appends the new tokens of all items to one layer and computes the attention of all queries, on the codes. All items
/// or, on failure, none. All appends precede all reads; a sequence has at most one appending item, attend-only items
/// may repeat it. What a query sees depends on its position, the tokens and the configuration alone, not on how calls
/// were split. Up to 1 MiB of work space stays with the cache, so that a call which is like the one before it, and
/// begins no page, allocates nothing. Errors as for plan; out_of_memory also if there is no memory for the workspace.
template <class... F, class E = Serial>
Status attend(KVCache<F...>& cache, std::size_t layer, std::span<const BatchItem> batch,
              const AttentionParams& params = {}, E&& executor = {}) {
  const detail::CacheCore& core = detail::CacheAccess::core(cache);
  AttentionPlan step = detail::PlanAccess::take(core);
  Status status = plan(cache, layer, batch, params, step);
  if (status.code == Status::ok) status = detail::run_plan(step, executor);
  detail::PlanAccess::keep(core, step);
  return status;
}

namespace detail {

// Logits of one query and one KV head against all tokens of the sequence; see turboquant::logits.
inline void score_all(const AttentionJob& job, RowBlock& block, std::size_t kv_head, std::size_t token, float* out) {
  (void)job.prepare(block, kv_head, token, token + 1);
  const SequenceView& view = job.view;
  const Layer& layer = *view.layer;
  const std::size_t length = view.after;
  float* rows = out + (token * job.item->queries.heads + kv_head * job.group) * length;
  const auto put = [&](std::size_t position, std::size_t column, std::size_t count) {
    for (std::size_t r = 0; r < block.rows; ++r) {
      std::copy_n(block.logits + r * RowBlock::kChunk + column, count, rows + r * length + position);
    }
  };
  const std::size_t coded = length == 0 ? 0 : (std::max)(view.coded_for(length - 1), view.first_tokens);
  for (std::size_t r = 0; r < block.rows; ++r) {
    for (std::size_t j = view.first_tokens; j < (std::min)(view.state->held_begin, length); ++j) {
      rows[r * length + j] = -std::numeric_limits<float>::infinity();
    }
  }
  // Whole pages, which lie one behind the other in `rows` too, go to the kernels several at a time.
  constexpr std::size_t kMostPages = 8;
  CodedPart pages[kMostPages];
  std::size_t held = 0, held_begin = 0;  // pages, position of the first one
  const auto score_held = [&] {
    if (held == 0) return;
    layer.operations->score_pages({pages, held}, block.query, block.factor, rows + held_begin, length);
    held = 0;
  };
  const std::size_t end_entry = view.end_entry();
  for (std::size_t e = view.first_entry(); e < end_entry; ++e) {
    const PageView entry = view.entry(e);
    if (entry.begin >= coded) break;
    const std::size_t count = (std::min)(entry.end(), coded) - entry.begin;
    const bool whole = entry.first == 0 && count == layer.page_shape.tokens;
    if (!whole) score_held();
    CodedPart& part = pages[held];
    layer.find_part(entry.memory, Side::key, kv_head, part);
    part.next = layer.part_ahead(e + 1 < end_entry ? view.entry(e + 1).memory : nullptr, Side::key, kv_head);
    // Kernels multiply the centres of all pages that they are given at once, long before they come to the last one.
    const std::size_t later = e + kMostPages;
    if (later < end_entry) layer.fetch_center(view.entry(later).memory, Side::key, kv_head);
    if (whole) {
      if (held == 0) held_begin = entry.begin;
      if (++held == kMostPages) score_held();
      continue;
    }
    layer.operations->score(part, entry.first / 16, (entry.first + count + 15) / 16, block.query, 0, block.rows,
                            block.factor, block.logits, RowBlock::kChunk);
    put(entry.begin, entry.first, count);
  }
  score_held();
  const auto raw = [&](std::size_t begin, std::size_t end, std::size_t origin) {
    while (begin < end) {
      const std::size_t until = (std::min)(end, origin + ((begin - origin) / 16 + 1) * 16);
      const bfloat16* keys = view.raw_rows(Side::key, kv_head, begin, until - begin, block.staging);
      layer.operations->score_raw(keys, until - begin, block.query, 0, block.rows, block.factor, block.logits,
                                  RowBlock::kChunk);
      put(begin, 0, until - begin);
      begin = until;
    }
  };
  raw(0, (std::min)(view.first_tokens, length), 0);
  raw(coded, length, view.state->base);
}

template <class E>
Status logits(const CacheCore& core, SequenceId id, std::size_t layer_index, const ConstRows& queries, float* out,
              E&& executor) {
  const Sequence* sequence = core.find(id);
  if (sequence == nullptr) return {Status::unknown_sequence, "sequence"};
  if (layer_index >= core.layer_count()) {
    return {Status::bad_layer, "layer", CacheCore::as_signed(core.layer_count()), CacheCore::as_signed(layer_index)};
  }
  const Layer& layer = core.layer(layer_index);
  if (queries.tokens == 0) return {};
  if (queries.heads == 0 || queries.heads % layer.shape.kv_heads != 0) {
    return CacheCore::bad_shape("queries.heads", layer.shape.kv_heads, queries.heads);
  }
  const Status rows = check_rows(queries, kQueryFields, queries.heads, layer.shape.head_dim);
  if (rows.code != Status::ok) return rows;
  const LayerState& state = sequence->layers[layer_index];
  if (state.length == 0) return {};
  if (out == nullptr) return {Status::bad_shape, "out"};
  for (std::size_t t = 0; t < queries.tokens; ++t) {
    for (std::size_t h = 0; h < queries.heads; ++h) {
      if (!is_finite_row(queries, t, h)) return {Status::non_finite_input, "queries", 0, CacheCore::as_signed(t)};
    }
  }
  BatchItem item;
  item.queries = queries;
  const AttentionParams params;
  AttentionJob job;
  job.item = &item;
  job.params = &params;
  job.group = queries.heads / layer.shape.kv_heads;
  job.view.layer = &layer;
  job.view.state = &state;
  job.view.rule = &core.rule();
  job.view.first_tokens = state.first;
  job.view.before = job.view.after = state.length;
  job.view.coded_end = state.coded_end();
  job.view.tail_begin = state.tail_begin;
  const std::size_t tasks = queries.tokens * layer.shape.kv_heads;
  Carver measure(nullptr);
  (void)RowBlock::carve(layer, job.group, 0, measure);
  const std::size_t slot_count = needed_slots<E>((std::min)(tasks, Slots::kMost));
  AttentionPlan memory = PlanAccess::take(core);
  std::byte* workspace = PlanAccess::scratch(memory, measure.used() * slot_count);
  if (workspace == nullptr) return {Status::out_of_memory, "workspace"};
  Slots& slots = PlanAccess::slots(memory);
  slots.reset(slot_count);
  executor(tasks, [&](std::size_t task) {
    const std::size_t slot = slots.claim();
    Carver carver(workspace + slot * measure.used());
    RowBlock block = RowBlock::carve(layer, job.group, 0, carver);
    score_all(job, block, task % layer.shape.kv_heads, task / layer.shape.kv_heads, out);
    slots.release(slot);
  });
  PlanAccess::keep(core, memory);
  return {};
}

}  // namespace detail

/// out[t][h][j] = q_th . k_j, unscaled and unmasked, for all tokens j of the layer as the newest position sees them:
/// from codes, or raw for the first and the newest tokens. queries: [tokens][heads][head_dim]; out:
/// [tokens][heads][length of the layer]. Positions freed behind a window are -infinity. Errors: unknown_sequence,
/// bad_layer, bad_shape, non_finite_input, out_of_memory.
template <class... F, class E = Serial>
Status logits(const KVCache<F...>& cache, SequenceId sequence, std::size_t layer, ConstRows queries, float* out,
              E&& executor = {}) {
  return detail::logits(detail::CacheAccess::core(cache), sequence, layer, queries, out, executor);
}

}  // namespace turboquant
