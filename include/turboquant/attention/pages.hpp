// Attention over pages without the container: plan_pages and attend_pages.
#pragma once

#include <cstddef>
#include <span>

#include <turboquant/attention/attend.hpp>
#include <turboquant/attention/plan_builder.hpp>
#include <turboquant/cache/page_codec.hpp>

namespace turboquant {

/// Prepares a step for a batch of sequences whose pages the caller owns. Tokens in pages are read as codes, the rows
/// behind them raw; positions count from the first token of the first page. A plan holds nothing: codec, pages and rows
/// must live until it has run. Once all its tasks have run it may run again, on what the buffers hold then. Errors:
/// bad_shape, non_finite_input, out_of_memory.
template <class F>
Status plan_pages(const PageCodec<F>& codec, std::span<const PageItem> batch, const AttentionParams& params,
                  AttentionPlan& plan) {
  return detail::PlanAccess::plan_pages(detail::CacheAccess::layer(codec), batch, params, plan);
}

/// Attention of all queries of a batch over pages that the caller owns: the same numbers as attend over a cache with
/// the same pages and raw rows. Errors as for plan_pages; out_of_memory also if there is no memory for the workspace.
template <class F, class E = Serial>
Status attend_pages(const PageCodec<F>& codec, std::span<const PageItem> batch, const AttentionParams& params = {},
                    E&& executor = {}) {
  AttentionPlan step;
  if (const Status status = plan_pages(codec, batch, params, step); status.code != Status::ok) return status;
  return detail::run_plan(step, executor);
}

}  // namespace turboquant
