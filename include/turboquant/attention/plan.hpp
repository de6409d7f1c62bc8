// The attention plan: one layer of a step, validated, with all memory reserved, as tasks in phases.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include <turboquant/attention/rows.hpp>
#include <turboquant/attention/slots.hpp>

namespace turboquant {
namespace detail {

// A block that the plan holds until it commits, and where it came from.
struct PlannedBlock {
  Block* block;
  unsigned size_class;
  bool from_reserve;
};

// One item of a plan. Planned blocks lie in one array of the plan, in this order: pages, first tiles, tail tiles.
struct PlannedItem {
  BatchItem item;
  Sequence* sequence;
  LayerState* state;
  std::size_t before, after;                  // lengths
  std::size_t coded_end, tail_begin;          // after the commit
  std::size_t blocks, pages, first_tiles, tail_tiles;  // index of the first planned block; counts
  std::size_t kept_first, kept_tail;          // old tiles that stay as they are (after dropped_tail)
  std::size_t dropped_tail;                   // old tail tiles freed at the commit
  std::ptrdiff_t position;
  std::size_t group, heads;
  std::size_t parts, first_part;              // parts > 1: partial results, and a merge
  std::size_t first_split, end_split;         // a part is 2^part_shift splits, aligned
  unsigned part_shift;
  std::size_t queries_per_block;
  std::size_t partials;                       // byte offset in the workspace
  // Index of the first task of this item in each kind of work.
  std::size_t encode_task, store_task, attend_task, merge_task;

  bool reads;  // counted among the sequence's readers

  bool appends() const { return item.keys.tokens > 0; }
};

struct PlanState {
  CacheCore* core = nullptr;
  const Layer* layer = nullptr;
  AttentionParams params{};
  Array<float> alibi_slopes, sink_logits;  // copies: the caller's may be gone when the plan runs
  float scale = 1;
  Array<PlannedItem> items;
  Array<PlannedBlock> blocks;
  Array<Block*> page_blocks;  // the pages of all items again, as the view wants them
  bool armed = false;         // sequences are marked, appends are pending
  std::size_t encode_tasks = 0, store_tasks = 0, attend_tasks = 0, merge_tasks = 0, commit_tasks = 0;
  std::size_t split_entries = 1, rows_per_block = 1, tree_levels = 1, slot_bytes = 0, slot_count = 0, workspace_bytes = 0;
  mutable Slots slots;

  ~PlanState() { drop(); }

  // Gives everything back as if the plan had never been made.
  void drop() noexcept {
    if (armed) {
      for (PlannedItem& planned : items) {
        const std::size_t count = planned.pages + planned.first_tiles + planned.tail_tiles;
        for (std::size_t i = 0; i < count; ++i) {
          const PlannedBlock& held = blocks[planned.blocks + i];
          if (held.block == nullptr) continue;
          if (held.from_reserve) {
            core->give_back(*planned.sequence, held.size_class, held.block);
          } else {
            core->pool().release(held.block);
          }
        }
      }
      unmark();
    }
    items.clear();
    blocks.clear();
    page_blocks.clear();
    encode_tasks = store_tasks = attend_tasks = merge_tasks = commit_tasks = 0;
    slot_count = workspace_bytes = 0;
  }

  // Sequences accept other calls again.
  void unmark() noexcept {
    for (PlannedItem& planned : items) {
      if (planned.reads) planned.sequence->readers.fetch_sub(1, std::memory_order_release);
      if (planned.appends() && planned.sequence->pending == this) planned.sequence->pending = nullptr;
    }
    armed = false;
  }
};

}  // namespace detail

/// One layer of a step as tasks, for engines with their own thread pool: run every task of a phase, in any order on any
/// threads, then a barrier, then the next phase. Results do not depend on threads or order. `plan` fills it; the last phase
/// commits the appends and ends the plan. Dropped or planned anew before that, it changes nothing. Must not outlive its cache; the buffers of the
/// items must live until it has run. May be reused: it keeps its memory.
class AttentionPlan {
 public:
  AttentionPlan() noexcept = default;

  /// Bytes that `run` needs, aligned to 64; contents do not matter and need not survive the plan.
  std::size_t workspace_bytes() const noexcept { return state_ != nullptr ? state_->workspace_bytes : 0; }

  std::size_t phases() const noexcept {
    std::size_t count = 0;
    for (const Phase phase : kPhases) count += size(phase) > 0 ? 1 : 0;
    return count;
  }

  /// Tasks of a phase; 0 for a phase that does not exist.
  std::size_t tasks(std::size_t phase) const noexcept {
    Phase which{};
    return find(phase, which) ? size(which) : 0;
  }

  /// Runs one task. Each task of each phase must run exactly once. workspace: workspace_bytes() bytes, the same for all tasks.
  void run(std::size_t phase, std::size_t task, std::byte* workspace) const noexcept {
    Phase which{};
    if (!find(phase, which) || task >= size(which)) return;
    switch (which) {
      case Phase::encode: run_encode(task, workspace); break;
      case Phase::attend: run_attend(task, workspace); break;
      case Phase::merge: run_merge(task, workspace); break;
      case Phase::commit: commit(); break;
    }
  }

 private:
  friend struct PlanAccess;
  using State = detail::PlanState;
  using PlannedItem = detail::PlannedItem;

  // encode: finished pages. attend: attention, and the tail's new rows beside it (nobody reads them yet). merge: of split
  // contexts. commit: one task, which also ends the plan.
  enum class Phase { encode, attend, merge, commit };
  static constexpr Phase kPhases[] = {Phase::encode, Phase::attend, Phase::merge, Phase::commit};

  std::size_t size(Phase phase) const noexcept {
    if (state_ == nullptr) return 0;
    switch (phase) {
      case Phase::encode: return state_->encode_tasks;
      case Phase::attend: return state_->attend_tasks + state_->store_tasks;
      case Phase::merge: return state_->merge_tasks;
      case Phase::commit: return state_->commit_tasks;
    }
    return 0;
  }

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
    if (!planned.appends() && planned.sequence->pending == &state) source = &state.items[planned.sequence->pending_item];
    detail::SequenceView view;
    view.layer = state.layer;
    view.state = source->state;
    view.rule = &state.core->rule();
    view.first_tokens = state.core->config().first_tokens;
    view.before = source->before;
    view.after = source->after;
    view.coded_end = source->coded_end;
    view.tail_begin = source->tail_begin;
    view.keys = source->item.keys;
    view.values = source->item.values;
    view.new_pages = state.page_blocks.data() + (source->appends() ? page_index(state, *source) : 0);
    return view;
  }

  static std::size_t page_index(const State& state, const PlannedItem& planned) noexcept {
    return planned.encode_task / (2 * state.layer->shape.kv_heads);
  }

  static detail::AttentionJob job_of(const State& state, const PlannedItem& planned) noexcept {
    detail::AttentionJob job;
    job.item = &planned.item;
    job.params = &state.params;
    job.view = view_of(state, planned);
    job.position = planned.position;
    job.group = planned.group;
    job.scale = state.scale;
    return job;
  }

  // Task: one side of one head of one page.
  void run_encode(std::size_t task, std::byte* workspace) const noexcept {
    const State& state = *state_;
    const PlannedItem& planned = item_of(task, &PlannedItem::encode_task);
    const detail::Layer& layer = *state.layer;
    const std::size_t index = task - planned.encode_task, heads = layer.shape.kv_heads;
    const std::size_t page = index / (2 * heads), head = index / 2 % heads;
    const Side side = index % 2 == 0 ? Side::key : Side::value;
    const detail::SequenceView view = view_of(state, planned);
    const std::size_t begin = planned.state->coded_end() + page * layer.page_shape.tokens;
    const std::size_t slot = state.slots.claim();
    layer.encode(state.blocks[planned.blocks + page].block, side, head, layer.page_shape.tokens,
                 workspace + slot * state.slot_bytes,
                 [&](std::size_t t, bfloat16* out) { view.raw_row(side, head, begin + t, out); });
    state.slots.release(slot);
  }

  // Task: one new tile of the tail or of the first tokens; or attention of one KV head and one part or query block.
  void run_attend(std::size_t task, std::byte* workspace) const noexcept {
    const State& state = *state_;
    if (task >= state.attend_tasks) {
      store_tile(task - state.attend_tasks);
      return;
    }
    const PlannedItem& planned = item_of(task, &PlannedItem::attend_task);
    const std::size_t index = task - planned.attend_task;
    const detail::AttentionJob job = job_of(state, planned);
    const detail::Layer& layer = *state.layer;
    const std::size_t slot = state.slots.claim();
    detail::Carver carver(workspace + slot * state.slot_bytes);
    detail::RowBlock block = detail::RowBlock::carve(layer, state.rows_per_block, state.tree_levels, carver);
    if (planned.parts > 1) {
      const std::size_t pieces = planned.parts + 1, head = index / pieces, piece = index % pieces;
      job.prepare(block, head, 0, planned.item.queries.tokens);
      const detail::Partial to = partial(planned, head, piece, workspace);
      if (piece == planned.parts) {
        job.attend_raw(block, head, to);
      } else {
        const std::size_t origin = (planned.first_part + piece) << planned.part_shift;
        const detail::Partial result = job.attend_splits(
            block, head, (std::max)(origin, planned.first_split),
            (std::min)(origin + (std::size_t{1} << planned.part_shift), planned.end_split), origin, state.split_entries);
        std::copy_n(result.states, block.rows, to.states);
        std::copy_n(result.acc, block.rows * layer.shape.value_dim, to.acc);
      }
    } else {
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
    const PlannedItem& planned = item_of(task, &PlannedItem::merge_task);
    const std::size_t head = task - planned.merge_task, rows = planned.item.queries.tokens * planned.group;
    const detail::AttentionJob job = job_of(state, planned);
    const std::size_t dim = state.layer->shape.value_dim;
    detail::FoldTree tree;
    for (std::size_t part = 0; part < planned.parts; ++part) {
      detail::Partial leaf = partial(planned, head, part, workspace);
      tree.push(job.operations(), leaf, planned.first_part + part, rows, dim);
    }
    const detail::Partial total = tree.finish(job.operations(), partial(planned, head, 0, workspace), rows, dim);
    float row[1024];
    job.finish(total, partial(planned, head, planned.parts, workspace), rows, head, 0, row);
  }

  static std::size_t block_count(const PlannedItem& planned) noexcept {
    return (planned.item.queries.tokens + planned.queries_per_block - 1) / planned.queries_per_block;
  }

  static std::size_t partial_bytes(const PlannedItem& planned, std::size_t dim) noexcept {
    const std::size_t rows = planned.item.queries.tokens * planned.group;
    return layout::round_up(rows * (sizeof(detail::SoftmaxState) + dim * sizeof(float)), detail::kCacheLine);
  }

  detail::Partial partial(const PlannedItem& planned, std::size_t head, std::size_t part, std::byte* workspace) const noexcept {
    const std::size_t dim = state_->layer->shape.value_dim, rows = planned.item.queries.tokens * planned.group;
    std::byte* at = workspace + planned.partials + (head * (planned.parts + 1) + part) * partial_bytes(planned, dim);
    return {reinterpret_cast<detail::SoftmaxState*>(at), reinterpret_cast<float*>(at + rows * sizeof(detail::SoftmaxState))};
  }

  // Writes the new rows of one tile. A tile shared with another sequence was replaced by a new block: old rows are copied.
  void store_tile(std::size_t task) const noexcept {
    const State& state = *state_;
    const PlannedItem& planned = item_of(task, &PlannedItem::store_task);
    const detail::Layer& layer = *state.layer;
    const std::size_t first_tokens = state.core->config().first_tokens;
    std::size_t index = task - planned.store_task;
    const std::size_t first_written = written_tiles(planned, true, first_tokens);
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
  static std::size_t written_tiles(const PlannedItem& planned, bool first, std::size_t first_tokens) noexcept {
    const std::size_t origin = first ? 0 : planned.tail_begin;
    const std::size_t limit = first ? (std::min)(planned.after, first_tokens) : planned.after;
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
      const detail::PlannedBlock* next = state.blocks.data() + planned.blocks;
      const std::size_t page_tokens = state.core->rule().page_tokens;
      for (std::size_t i = 0; i < planned.pages; ++i) {
        const detail::Entry entry{next++->block, layer_state.coded_end(), 0, static_cast<std::uint32_t>(page_tokens)};
        (void)layer_state.entries.push_back(entry);
      }
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

  std::unique_ptr<State> state_;
};

/// Builds plans; for the functions of attention/attend.hpp.
struct PlanAccess {
  static Status plan(detail::CacheCore& core, std::size_t layer_index, std::span<const BatchItem> batch,
                     const AttentionParams& params, AttentionPlan& plan) noexcept {
    using namespace detail;
    if (plan.state_ == nullptr) plan.state_.reset(new (std::nothrow) PlanState);
    if (plan.state_ == nullptr) return {Status::out_of_memory, "plan"};
    PlanState& state = *plan.state_;
    state.drop();
    state.core = &core;
    if (layer_index >= core.layer_count()) {
      return {Status::bad_layer, "layer", CacheCore::as_signed(core.layer_count()), CacheCore::as_signed(layer_index)};
    }
    state.layer = &core.layer(layer_index);
    Status status = set_params(state, params);
    if (status == Status::ok && !state.items.reserve(batch.size())) status = {Status::out_of_memory, "plan"};
    for (std::size_t i = 0; i < batch.size() && status == Status::ok; ++i) status = add(state, layer_index, batch[i], i);
    if (status == Status::ok) status = mark_readers(state);
    if (status == Status::ok) status = check_inputs(state);
    if (status == Status::ok) status = schedule(state);
    if (status != Status::ok) state.drop();
    return status;
  }

 private:
  using State = detail::PlanState;
  using Item = detail::PlannedItem;
  using Core = detail::CacheCore;

  static constexpr std::size_t kSplitTokens = 1024;  // tokens per split of a long context
  static constexpr std::size_t kMostParts = 32;      // parts of a long context that run on their own
  static constexpr std::size_t kPartRows = 64;       // for items with at most so many rows per KV head
  static constexpr std::size_t kBlockRows = 32;      // rows per query block otherwise

  static bool copy(std::span<const float> from, Array<float>& to) noexcept {
    if (!to.resize(from.size())) return false;
    std::copy(from.begin(), from.end(), to.begin());
    return true;
  }

  static bool all_finite(std::span<const float> values) noexcept {
    return std::all_of(values.begin(), values.end(), [](float x) { return is_finite(x); });
  }

  static Status set_params(State& state, const AttentionParams& params) noexcept {
    if (!is_finite(params.scale)) return {Status::non_finite_input, "params.scale"};
    if (!is_finite(params.softcap)) return {Status::non_finite_input, "params.softcap"};
    if (params.softcap < 0) return {Status::bad_shape, "params.softcap"};
    if (!all_finite(params.alibi_slopes)) return {Status::non_finite_input, "params.alibi_slopes"};
    if (!all_finite(params.sink_logits)) return {Status::non_finite_input, "params.sink_logits"};
    if (!copy(params.alibi_slopes, state.alibi_slopes) || !copy(params.sink_logits, state.sink_logits)) {
      return {Status::out_of_memory, "plan"};
    }
    state.params = params;
    state.params.alibi_slopes = {state.alibi_slopes.data(), state.alibi_slopes.size()};
    state.params.sink_logits = {state.sink_logits.data(), state.sink_logits.size()};
    state.scale = params.scale != 0 ? params.scale : 1.0f / std::sqrt(static_cast<float>(state.layer->shape.head_dim));
    return {};
  }

  static Status check_rows(const ConstRows& rows, const char* data, const char* heads, const char* dims,
                           std::size_t expected_heads, std::size_t expected_dim) noexcept {
    if (rows.data == nullptr || size_of(rows.type) == 0) return {Status::bad_shape, data};
    if (rows.heads != expected_heads) return Core::bad_shape(heads, expected_heads, rows.heads);
    if (rows.dim != expected_dim) return Core::bad_shape(dims, expected_dim, rows.dim);
    return {};
  }

  // Checks shapes, adds the item and, if it appends, marks its sequence.
  static Status add(State& state, std::size_t layer_index, const BatchItem& item, std::size_t index) noexcept {
    const LayerShape& shape = state.layer->shape;
    detail::Sequence* sequence = state.core->find(item.sequence);
    if (sequence == nullptr) return {Status::unknown_sequence, "sequence", 0, Core::as_signed(index)};
    if (item.keys.tokens != item.values.tokens) {
      return Core::bad_shape("values.tokens", item.keys.tokens, item.values.tokens);
    }
    if (item.keys.tokens > 0) {
      if (sequence->is_planned()) {
        return {Status::bad_shape, sequence->pending == &state ? "sequence appears twice" : "pending plan"};
      }
      Status status = check_rows(item.keys, "keys.data", "keys.heads", "keys.dim", shape.kv_heads, shape.head_dim);
      if (status == Status::ok) {
        status = check_rows(item.values, "values.data", "values.heads", "values.dim", shape.kv_heads, shape.value_dim);
      }
      if (status != Status::ok) return status;
    }
    if (item.queries.tokens == 0 && item.out.tokens != 0) return Core::bad_shape("queries.tokens", item.out.tokens, 0);
    Item planned{};
    planned.item = item;
    planned.group = 1;
    if (item.queries.tokens > 0) {
      const ConstRows& queries = item.queries;
      if (queries.heads == 0 || queries.heads % shape.kv_heads != 0) {
        return Core::bad_shape("queries.heads", shape.kv_heads, queries.heads);
      }
      Status status = check_rows(queries, "queries.data", "queries.heads", "queries.dim", queries.heads, shape.head_dim);
      if (status == Status::ok) {
        status = check_rows(ConstRows(item.out), "out.data", "out.heads", "out.dim", queries.heads, shape.value_dim);
      }
      if (status != Status::ok) return status;
      if (item.out.tokens != queries.tokens) return Core::bad_shape("out.tokens", queries.tokens, item.out.tokens);
      for (const auto& [values, name] : {std::pair{state.params.alibi_slopes, "params.alibi_slopes"},
                                         std::pair{state.params.sink_logits, "params.sink_logits"}}) {
        if (!values.empty() && values.size() != queries.heads) return Core::bad_shape(name, queries.heads, values.size());
      }
      planned.group = queries.heads / shape.kv_heads;
      planned.heads = queries.heads;
    }
    planned.sequence = sequence;
    planned.state = &sequence->layers[layer_index];
    planned.before = planned.state->length;
    constexpr std::size_t kMost = std::size_t{1} << 48;
    if (item.keys.tokens > kMost - planned.before) return Core::bad_shape("keys.tokens", kMost, item.keys.tokens);
    planned.after = planned.before + item.keys.tokens;
    (void)state.items.push_back(planned);  // reserved
    state.armed = true;
    state.commit_tasks = 1;
    if (planned.appends()) {
      sequence->pending = &state;
      sequence->pending_item = index;
    }
    return {};
  }

  // After all appending items are marked: the sequences that are only read. Another plan may read them too, none may append.
  static Status mark_readers(State& state) noexcept {
    for (Item& planned : state.items) {
      if (planned.appends() || planned.sequence->pending == &state) continue;
      if (planned.sequence->pending != nullptr) return {Status::bad_shape, "pending plan"};
      planned.sequence->readers.fetch_add(1, std::memory_order_relaxed);
      planned.reads = true;
    }
    return {};
  }

  static Status check_inputs(const State& state) noexcept {
    for (const Item& planned : state.items) {
      const BatchItem& item = planned.item;
      for (std::size_t t = 0; t < item.keys.tokens; ++t) {
        for (std::size_t h = 0; h < item.keys.heads; ++h) {
          if (!is_storable_row(item.keys, t, h)) return {Status::non_finite_input, "keys", 0, Core::as_signed(t)};
          if (!is_storable_row(item.values, t, h)) return {Status::non_finite_input, "values", 0, Core::as_signed(t)};
        }
      }
      for (std::size_t t = 0; t < item.queries.tokens; ++t) {
        for (std::size_t h = 0; h < item.queries.heads; ++h) {
          if (!is_finite_row(item.queries, t, h)) return {Status::non_finite_input, "queries", 0, Core::as_signed(t)};
        }
      }
    }
    return {};
  }

  // Decides what each item encodes, stores and attends to, and takes the memory for it.
  static Status schedule(State& state) noexcept {
    const detail::Layer& layer = *state.layer;
    const detail::CodingRule& rule = state.core->rule();
    state.split_entries = (std::max)(kSplitTokens / rule.page_tokens, std::size_t{1});
    for (Item& planned : state.items) {
      planned.coded_end = planned.state->coded_end();
      planned.tail_begin = planned.state->tail_begin;
      planned.blocks = state.blocks.size();
      planned.encode_task = state.encode_tasks;
      planned.store_task = state.store_tasks;
      if (planned.appends()) {
        if (const Status status = schedule_append(state, planned); status.code != Status::ok) return status;
      }
    }
    std::size_t partial_bytes = 0, levels = 1;
    state.rows_per_block = 1;
    for (Item& planned : state.items) {
      planned.attend_task = state.attend_tasks;
      planned.merge_task = state.merge_tasks;
      const std::size_t queries = planned.item.queries.tokens;
      if (queries == 0) continue;
      const detail::SequenceView view = AttentionPlan::view_of(state, planned);
      planned.position = planned.item.position == npos
                             ? static_cast<std::ptrdiff_t>(view.after) - static_cast<std::ptrdiff_t>(queries)
                             : static_cast<std::ptrdiff_t>(planned.item.position);
      if (planned.item.position == npos && state.params.causal && view.after != 0 && queries > view.after) {
        return Core::bad_shape("queries.tokens", view.after, queries);  // the first ones would stand before position 0
      }
      if (planned.item.position != npos && planned.item.position > (std::size_t{1} << 48)) {
        return Core::bad_shape("position", std::size_t{1} << 48, planned.item.position);
      }
      if (planned.item.key_begin > planned.item.key_end) {
        return Core::bad_shape("key_begin", planned.item.key_end, planned.item.key_begin);
      }
      if (const Status status = check_held(state, planned, view); status.code != Status::ok) return status;
      const std::size_t rows = queries * planned.group;
      planned.first_split = view.first_entry() / state.split_entries;
      planned.end_split = (view.end_entry() + state.split_entries - 1) / state.split_entries;
      const auto count_parts = [&] {
        planned.first_part = planned.first_split >> planned.part_shift;
        planned.parts = planned.end_split <= planned.first_split
                            ? 0
                            : ((planned.end_split - 1) >> planned.part_shift) - planned.first_part + 1;
      };
      count_parts();
      while (planned.parts > kMostParts) ++planned.part_shift, count_parts();
      if (rows > kPartRows && queries > 1) planned.parts = 0;
      std::size_t block_rows = rows;
      if (planned.parts > 1) {
        planned.partials = partial_bytes;
        partial_bytes += layer.shape.kv_heads * (planned.parts + 1) * AttentionPlan::partial_bytes(planned, layer.shape.value_dim);
        state.attend_tasks += layer.shape.kv_heads * (planned.parts + 1);
        state.merge_tasks += layer.shape.kv_heads;
        levels = (std::max)(levels, std::size_t{planned.part_shift} + 1);
      } else {
        planned.queries_per_block = (std::min)(queries, (std::max)(kBlockRows / planned.group, std::size_t{1}));
        block_rows = planned.queries_per_block * planned.group;
        state.attend_tasks += layer.shape.kv_heads * AttentionPlan::block_count(planned);
        levels = (std::max)(levels, static_cast<std::size_t>(std::bit_width(planned.end_split)) + 1);
      }
      state.rows_per_block = (std::max)(state.rows_per_block, block_rows);
    }
    detail::Carver measure(nullptr);
    state.tree_levels = levels;
    if (state.attend_tasks > 0) (void)detail::RowBlock::carve(layer, state.rows_per_block, levels, measure);
    state.slot_bytes = layout::round_up((std::max)(measure.used(), state.encode_tasks > 0 ? layer.encode_scratch_bytes() : 0),
                                        detail::kCacheLine);
    state.slot_count = (std::min)((std::max)(state.attend_tasks, state.encode_tasks), detail::Slots::kMost);
    state.slots.reset(state.slot_count);
    for (Item& planned : state.items) planned.partials += state.slot_bytes * state.slot_count;
    state.workspace_bytes = state.slot_bytes * state.slot_count + partial_bytes;
    return {};
  }

  // Pages and tiles of one appending item, and room in its tables.
  static Status schedule_append(State& state, Item& planned) noexcept {
    const detail::Layer& layer = *state.layer;
    const detail::CodingRule& rule = state.core->rule();
    detail::LayerState& old = *planned.state;
    const std::size_t first_tokens = state.core->config().first_tokens;
    const auto tiles = [](std::size_t tokens) { return (tokens + 15) / 16; };
    const auto keep = [](const Array<detail::Block*>& blocks, std::size_t begin, std::size_t rows) {
      // Whole tiles stay; a partial one only if nobody else has it.
      const std::size_t whole = rows / 16;
      return rows % 16 != 0 && blocks[begin + whole]->is_exclusive() ? whole + 1 : whole;
    };
    planned.coded_end = (std::max)(rule.coded(old.base, planned.after), planned.coded_end);
    planned.pages = (planned.coded_end - old.coded_end()) / rule.page_tokens;
    planned.tail_begin = (std::max)(rule.raw_begin(old.base, planned.after), old.tail_begin);
    planned.kept_first = planned.before >= first_tokens ? old.first_tiles.size()  // complete: shared or not, nobody writes
                                                        : keep(old.first_tiles, 0, planned.before);
    planned.first_tiles = tiles((std::min)(planned.after, first_tokens)) - planned.kept_first;
    planned.dropped_tail = (std::min)((planned.tail_begin - old.tail_begin) / 16, old.tail.size());
    planned.kept_tail = keep(old.tail, planned.dropped_tail, detail::saturating_subtract(planned.before, planned.tail_begin));
    planned.tail_tiles = tiles(detail::saturating_subtract(planned.after, planned.tail_begin)) - planned.kept_tail;

    const std::size_t count = planned.pages + planned.first_tiles + planned.tail_tiles;
    // The arrays grow geometrically: one token at a time must not copy a long table at every page.
    if (!grow(old.entries, planned.pages) || !grow(old.first_tiles, planned.first_tiles) ||
        !grow(old.tail, planned.tail_tiles) || !grow(state.blocks, count) || !grow(state.page_blocks, planned.pages)) {
      planned.pages = planned.first_tiles = planned.tail_tiles = 0;  // nothing to give back
      return {Status::out_of_memory, "tables"};
    }
    const auto acquire = [&](unsigned size_class, std::size_t n) {
      for (std::size_t i = 0; i < n; ++i) {
        bool from_reserve = false;
        detail::Block* block = state.core->take(*planned.sequence, size_class, from_reserve);
        (void)state.blocks.push_back({block, size_class, from_reserve});  // null too: drop() counts them
        if (block == nullptr) return false;
      }
      return true;
    };
    // What drop() may find half done: pad with null.
    const bool enough = acquire(layer.page_class, planned.pages) &&
                        acquire(layer.tile_class, planned.first_tiles + planned.tail_tiles);
    while (state.blocks.size() < planned.blocks + count) (void)state.blocks.push_back({nullptr, 0, false});
    if (!enough) return {Status::out_of_memory, "pages"};
    for (std::size_t i = 0; i < planned.pages; ++i) {
      detail::Block* page = state.blocks[planned.blocks + i].block;
      layer.clear_padding(page);
      (void)state.page_blocks.push_back(page);
    }
    state.encode_tasks += planned.pages * 2 * layer.shape.kv_heads;
    state.store_tasks += AttentionPlan::written_tiles(planned, true, first_tokens) +
                         AttentionPlan::written_tiles(planned, false, first_tokens);
    return {};
  }

  template <class T>
  static bool grow(Array<T>& array, std::size_t more) noexcept {
    const std::size_t needed = array.size() + more;
    return needed <= array.capacity() || array.reserve((std::max)(needed, array.capacity() * 2));
  }

  // A query that may see a token freed behind the window is refused.
  static Status check_held(const State& state, const Item& planned, const detail::SequenceView& view) noexcept {
    const std::size_t held = planned.state->held_begin;
    if (held <= view.first_tokens) return {};
    const detail::AttentionJob job = AttentionPlan::job_of(state, planned);
    const detail::RowRange range = job.range(planned.position);
    if (range.coded_low < range.coded_high && range.coded_low < held) {
      return {Status::behind_window, "position", Core::as_signed(held + state.layer->shape.window) - 1, planned.position};
    }
    return {};
  }
};

}  // namespace turboquant
