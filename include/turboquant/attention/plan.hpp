// The attention plan: one layer of a step, validated, with all memory reserved, as tasks in phases.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <turboquant/attention/plan_state.hpp>
#include <turboquant/core/owned.hpp>

namespace turboquant {
namespace detail {

struct PlanAccess;

}  // namespace detail

/// One layer of a step as tasks, for engines with their own thread pool: run every task of a phase, in any order on any
/// threads, then a barrier, then the next phase. Results do not depend on threads or order. `plan` fills it; the last
/// phase commits the appends and ends the plan: from then on `run` does nothing. At most 64 tasks code or attend at
/// once; threads beyond that sleep until one ends. Dropped or planned anew before its end, it changes nothing. Must not
/// outlive its cache; the buffers of the items must live until it has run. May be reused: it keeps its memory.
class AttentionPlan {
 public:
  AttentionPlan() noexcept = default;

  /// Bytes that `run` needs, aligned to 64; contents do not matter and need not survive the plan.
  std::size_t workspace_bytes() const noexcept { return state_ ? state_->workspace_bytes : 0; }

  /// Phases to run in this order, all tasks of one before any of the next; 0: nothing to do. A plan that has ended
  /// keeps its numbers.
  std::size_t phases() const noexcept {
    std::size_t count = 0;
    for (const Phase phase : kPhases) count += size(phase) > 0 ? 1u : 0u;
    return count;
  }

  /// Tasks of a phase; 0 for a phase that does not exist.
  std::size_t tasks(std::size_t phase) const noexcept {
    Phase which{};
    return find(phase, which) ? size(which) : 0;
  }

  /// Runs one task. Each task of each phase must run exactly once. workspace: workspace_bytes() bytes, the same for all
  /// tasks.
  void run(std::size_t phase, std::size_t task, std::byte* workspace) const noexcept {
    Phase which{};
    if (!find(phase, which) || task >= size(which) || has_ended()) return;
    switch (which) {
      case Phase::encode:
        run_encode(task, workspace);
        break;
      case Phase::attend:
        run_attend(task, workspace);
        break;
      case Phase::merge:
        run_merge(task, workspace);
        break;
      case Phase::commit:
        commit();
        break;
    }
  }

  /// Gives up what `plan` set aside, as if it had never been called, and keeps the memory. No task may be running.
  void drop() noexcept {
    if (state_) state_->drop();
  }

 private:
  friend struct detail::PlanAccess;
  using State = detail::PlanState;
  using PlannedItem = detail::PlannedItem;

  // encode: pages that become readable. attend: attention, and beside it what nobody reads yet: the tail's new rows and
  // pages coded ahead. merge: of split contexts. commit: one task, which also ends the plan.
  enum class Phase { encode, attend, merge, commit };
  static constexpr Phase kPhases[] = {Phase::encode, Phase::attend, Phase::merge, Phase::commit};

  std::size_t size(Phase phase) const noexcept {
    if (!state_) return 0;
    switch (phase) {
      case Phase::encode:
        return state_->encode_tasks;
      case Phase::attend:
        return state_->attend_tasks + state_->store_tasks + state_->ahead_tasks;
      case Phase::merge:
        return state_->merge_tasks;
      case Phase::commit:
        return state_->commit_tasks;
    }
    return 0;
  }

  // Plans over pages hold nothing and may run again.
  bool has_ended() const noexcept { return state_->commit_tasks != 0 && !state_->armed; }

  bool find(std::size_t index, Phase& phase) const noexcept {
    for (const Phase candidate : kPhases) {
      if (size(candidate) == 0) continue;
      if (index-- == 0) {
        phase = candidate;
        return true;
      }
    }
    return false;
  }

  // The item that owns a task, given each item's first task.
  const PlannedItem& item_of(std::size_t task, std::size_t PlannedItem::*first) const noexcept {
    const auto after = std::upper_bound(state_->items.begin(), state_->items.end(), task,
                                        [first](std::size_t t, const PlannedItem& item) { return t < item.*first; });
    return *(after - 1);
  }

  static detail::SequenceView view_of(const State& state, const PlannedItem& planned) noexcept {
    // An attend-only item of a sequence that another item appends to reads that item's rows.
    const PlannedItem* source = &planned;
    if (!planned.appends() && planned.sequence != nullptr && planned.sequence->pending == &state)
      source = &state.items[planned.sequence->pending_item];
    detail::SequenceView view;
    view.layer = state.layer;
    view.state = source->state;
    view.rule = &state.rule;
    view.first_tokens = source->state->first;
    view.before = source->before;
    view.after = source->after;
    view.coded_end = source->coded_end;
    view.tail_begin = source->tail_begin;
    view.raw_origin = source->sequence != nullptr ? source->state->base : 0;
    view.keys = source->item.keys;
    view.values = source->item.values;
    view.new_pages = state.pages.data() + source->first_page;
    if (source->sequence == nullptr) {
      view.keys = source->keys_behind;
      view.values = source->values_behind;
      view.pages = {state.page_views.data() + source->first_view, source->views};
    }
    return view;
  }

  static detail::AttentionJob job_of(const State& state, const PlannedItem& planned) noexcept {
    detail::AttentionJob job;
    job.item = &planned.item;
    job.params = &state.params;
    job.view = view_of(state, planned);
    if (planned.item.tree != nullptr) job.view.tree_begin = job.view.after - planned.item.queries.tokens;
    job.position = planned.position;
    job.group = planned.group;
    job.scale = state.scale;
    return job;
  }

  // Task: one unit, one side of one head, of one page that is due.
  void run_encode(std::size_t task, std::byte* workspace) const noexcept {
    const PlannedItem& planned = item_of(task, &PlannedItem::encode_task);
    const std::size_t index = task - planned.encode_task, units = state_->layer->units();
    encode_unit(planned, planned.open + index / units, index % units, workspace);
  }

  // The same for pages coded ahead. Of the last page only units with work to do now are tasks.
  void run_ahead(std::size_t task, std::byte* workspace) const noexcept {
    const PlannedItem& planned = item_of(task, &PlannedItem::ahead_task);
    const std::size_t units = state_->layer->units(), first = (std::max)(planned.open, planned.due);
    const std::size_t index = task - planned.ahead_task, whole = (planned.listed - 1 - first) * units;
    if (index < whole) {
      encode_unit(planned, first + index / units, index % units, workspace);
    } else {
      encode_unit(planned, planned.listed - 1, first_unit(*state_->layer, planned) + (index - whole), workspace);
    }
  }

  // Units of the last page, if that is coded ahead, from the first one with work left; and how many there are.
  static std::size_t first_unit(const detail::Layer& layer, const PlannedItem& planned) noexcept {
    return planned.open == planned.listed - 1 ? layer.unit_at(planned.work_before) : 0;
  }
  static std::size_t ahead_tasks(const detail::Layer& layer, const PlannedItem& planned) noexcept {
    const std::size_t first = (std::max)(planned.open, planned.due);
    if (first >= planned.listed) return 0;
    const std::size_t before = planned.open == planned.listed - 1 ? planned.work_before : 0;
    const std::size_t last =
        planned.work_after > before ? layer.unit_at(planned.work_after - 1) + 1 - first_unit(layer, planned) : 0;
    return (planned.listed - 1 - first) * layer.units() + last;
  }

  void encode_unit(const PlannedItem& planned, std::size_t page, std::size_t unit,
                   std::byte* workspace) const noexcept {
    const State& state = *state_;
    const detail::Layer& layer = *state.layer;
    const detail::SequenceView view = view_of(state, planned);
    const std::size_t from = page == planned.open ? planned.work_before : 0;
    const std::size_t until = page + 1 == planned.listed ? planned.work_after : layer.page_work();
    const std::size_t first = planned.state->coded_end() + page * layer.page_shape.tokens;
    const std::size_t slot = state.slots.claim();
    state.rows[slot] = {};
    layer.encode(
        state.pages[planned.first_page + page]->memory, unit, layer.page_shape.tokens, layer.parts_begun(unit, from),
        layer.parts_begun(unit, until), workspace + state.slots_begin + slot * state.slot_bytes,
        [&](std::size_t t, bfloat16* out) { view.raw_row(detail::Layer::side_of(unit), unit / 2, first + t, out); });
    state.slots.release(slot);
  }

  // Task: attention of one KV head and one part or query block; or one new tile of the tail or of the first tokens; or
  // one unit coded ahead.
  void run_attend(std::size_t task, std::byte* workspace) const noexcept {
    const State& state = *state_;
    if (task >= state.attend_tasks + state.store_tasks) {
      run_ahead(task - state.attend_tasks - state.store_tasks, workspace);
      return;
    }
    if (task >= state.attend_tasks) {
      store_tile(task - state.attend_tasks);
      return;
    }
    const PlannedItem& planned = item_of(task, &PlannedItem::attend_task);
    const std::size_t index = task - planned.attend_task;
    const detail::AttentionJob job = job_of(state, planned);
    const detail::Layer& layer = *state.layer;
    const std::size_t slot = state.slots.claim();
    detail::Carver carver(workspace + state.slots_begin + slot * state.slot_bytes);
    detail::RowBlock block = detail::RowBlock::carve(layer, state.rows_per_block, state.tree_levels, carver);
    if (planned.parts > 1) {
      const std::size_t pieces = planned.parts + 1, head = index / pieces, piece = index % pieces;
      const State::Rows rows{state.runs.load(std::memory_order_relaxed), planned.merge_task + head};
      if (state.rows[slot] == rows) {
        job.take_rows(block, 0, planned.item.queries.tokens);
      } else {
        const bool ready = job.prepare(block, head, 0, planned.item.queries.tokens, piece == planned.parts);
        state.rows[slot] = ready ? rows : State::Rows{};
      }
      const detail::Partial to = partial(planned, head, piece, workspace);
      if (piece == planned.parts) {
        job.attend_raw(block, head, to);
      } else {
        const std::size_t origin = (planned.first_part + piece) << planned.part_shift;
        const detail::Partial result =
            job.attend_splits(block, head, (std::max)(origin, planned.first_split),
                              (std::min)(origin + (std::size_t{1} << planned.part_shift), planned.end_split), origin,
                              state.split_entries);
        std::copy_n(result.states, block.rows, to.states);
        std::copy_n(result.acc, block.rows * layer.shape.value_dim, to.acc);
      }
    } else {
      state.rows[slot] = {};
      const std::size_t blocks = block_count(planned), head = index / blocks;
      const std::size_t begin = index % blocks * planned.queries_per_block;
      job.attend_block(block, head, begin, (std::min)(begin + planned.queries_per_block, planned.item.queries.tokens),
                       state.split_entries);
    }
    state.slots.release(slot);
  }

  // Task: one KV head of one item in parts.
  void run_merge(std::size_t task, std::byte* workspace) const noexcept {
    const State& state = *state_;
    state.runs.fetch_add(1, std::memory_order_relaxed);
    const PlannedItem& planned = item_of(task, &PlannedItem::merge_task);
    const std::size_t head = task - planned.merge_task, rows = planned.item.queries.tokens * planned.group;
    const detail::AttentionJob job = job_of(state, planned);
    const std::size_t dim = state.layer->shape.value_dim;
    detail::FoldTree tree;
    const auto fetch = [&](std::size_t part) {  // from the caches of who computed it
      const auto* from = reinterpret_cast<const std::byte*>(partial(planned, head, part, workspace).states);
      for (std::size_t at = 0; at < partial_bytes(planned, dim); at += 64) kernels::fetch_line(from + at);
    };
    constexpr std::size_t kAhead = 4;
    for (std::size_t part = 0; part < (std::min)(kAhead, planned.parts); ++part) fetch(part);
    for (std::size_t part = 0; part < planned.parts; ++part) {
      if (part + kAhead <= planned.parts) fetch(part + kAhead);  // the raw rows come last
      detail::Partial leaf = partial(planned, head, part, workspace);
      tree.push(job.operations(), leaf, planned.first_part + part, rows, dim);
    }
    const detail::Partial total = tree.finish(job.operations(), partial(planned, head, 0, workspace), rows, dim);
    job.finish(total, partial(planned, head, planned.parts, workspace), rows, head, 0);
  }

  static std::size_t block_count(const PlannedItem& planned) noexcept {
    return (planned.item.queries.tokens + planned.queries_per_block - 1) / planned.queries_per_block;
  }

  static std::size_t partial_bytes(const PlannedItem& planned, std::size_t dim) noexcept {
    const std::size_t rows = planned.item.queries.tokens * planned.group;
    return layout::round_up(rows * (sizeof(detail::SoftmaxState) + dim * sizeof(float)), detail::kCacheLine);
  }

  detail::Partial partial(const PlannedItem& planned, std::size_t head, std::size_t part,
                          std::byte* workspace) const noexcept {
    const std::size_t dim = state_->layer->shape.value_dim, rows = planned.item.queries.tokens * planned.group;
    std::byte* at = workspace + planned.partials + (head * (planned.parts + 1) + part) * partial_bytes(planned, dim);
    return {reinterpret_cast<detail::SoftmaxState*>(at),
            reinterpret_cast<float*>(at + rows * sizeof(detail::SoftmaxState))};
  }

  // Writes the new rows of one tile. A tile shared with another sequence was replaced by a new block: old rows are
  // copied.
  void store_tile(std::size_t task) const noexcept {
    const State& state = *state_;
    const PlannedItem& planned = item_of(task, &PlannedItem::store_task);
    const detail::Layer& layer = *state.layer;
    const std::size_t first_tokens = planned.state->first;
    std::size_t index = task - planned.store_task;
    const std::size_t first_written = written_tiles(planned, true);
    const bool first = index < first_written;
    if (!first) index -= first_written;
    // Tiles are counted from the first one that gets a row.
    const std::size_t origin = first ? 0 : planned.tail_begin;
    const std::size_t limit = first ? (std::min)(planned.after, first_tokens) : planned.after;
    const std::size_t low = (std::max)(planned.before, origin);
    const std::size_t tile = (low - origin) / 16 + index;
    const std::size_t begin = origin + tile * 16, end = (std::min)(begin + 16, limit);
    const Array<detail::Block*>& old = first ? planned.state->first_tiles : planned.state->tail;
    const std::size_t kept = first ? planned.kept_first : planned.kept_tail;
    const std::size_t skipped = first ? 0 : planned.dropped_tail;
    const std::size_t fresh = planned.blocks + planned.pages + (first ? 0 : planned.first_tiles);
    detail::Block* target = tile < kept ? old[skipped + tile] : state.blocks[fresh + (tile - kept)].block;
    const bool copies = tile >= kept && begin < planned.before;
    const detail::SequenceView view = view_of(state, planned);
    for (std::size_t at = copies ? begin : (std::max)(begin, planned.before); at < end; ++at) {
      for (const Side side : {Side::key, Side::value}) {
        for (std::size_t head = 0; head < layer.shape.kv_heads; ++head) {
          view.raw_row(side, head, at, layer.tile_row(target, side, head, at - begin));
        }
      }
    }
  }

  // Tiles that get at least one new row.
  static std::size_t written_tiles(const PlannedItem& planned, bool first) noexcept {
    const std::size_t origin = first ? 0 : planned.tail_begin;
    const std::size_t limit = first ? (std::min)(planned.after, planned.state->first) : planned.after;
    const std::size_t low = (std::max)(planned.before, origin);
    if (low >= limit) return 0;
    return (limit - origin + 15) / 16 - (low - origin) / 16;
  }

  // Makes the appends visible. Cannot fail: all tables have room.
  void commit() const noexcept {
    State& state = *state_;
    for (PlannedItem& planned : state.items) {
      if (!planned.appends()) continue;
      detail::LayerState& layer_state = *planned.state;
      const detail::PlannedBlock* next = state.blocks.data() + planned.blocks + planned.pages;
      const auto page_tokens = static_cast<std::uint32_t>(state.rule.page_tokens);
      layer_state.coding.clear();
      for (std::size_t i = 0; i < planned.listed; ++i) {
        detail::Block* page = state.pages[planned.first_page + i];
        if (i < planned.due) {
          (void)layer_state.entries.push_back({page, layer_state.coded_end(), 0, page_tokens});
        } else {
          (void)layer_state.coding.push_back(page);
        }
      }
      layer_state.coding_work = planned.work_after;
      install(planned, layer_state.first_tiles, 0, planned.kept_first, next, planned.first_tiles);
      install(planned, layer_state.tail, planned.dropped_tail, planned.kept_tail, next + planned.first_tiles,
              planned.tail_tiles);
      layer_state.tail_begin = planned.tail_begin;
      layer_state.length = planned.after;
      state.core->free_behind_window(*state.layer, layer_state);
      state.core->settle_reserve(*planned.sequence);
      state.core->account(*planned.sequence);
    }
    state.unmark();  // the counts of tasks stay: other threads may be reading them
  }

  // tiles := tiles[dropped, dropped + kept) + fresh; the others are let go.
  void install(const PlannedItem& planned, Array<detail::Block*>& tiles, std::size_t dropped, std::size_t kept,
               const detail::PlannedBlock* fresh, std::size_t count) const noexcept {
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      if (i >= dropped && i < dropped + kept) continue;
      state_->core->recycle(*planned.sequence, *planned.state, state_->layer->tile_class, tiles[i]);
    }
    tiles.erase((std::min)(dropped + kept, tiles.size()), tiles.size());
    tiles.erase(0, (std::min)(dropped, tiles.size()));
    for (std::size_t i = 0; i < count; ++i) (void)tiles.push_back(fresh[i].block);
  }

  Owned<State> state_;
};

}  // namespace turboquant
