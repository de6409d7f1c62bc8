// Making a plan: validation, memory, and the division of the work into tasks.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>

#include <turboquant/attention/plan.hpp>

namespace turboquant::detail {

// Builds plans; for the functions of attention/attend.hpp and pages.hpp.
struct PlanAccess {
  // The memory of an earlier call over this cache, if there is some; see keep.
  static AttentionPlan take(const CacheCore& core) noexcept {
    AttentionPlan plan;
    plan.state_.reset(static_cast<PlanState*>(core.spare().take()));
    return plan;
  }
  // Leaves the plan's memory to a later call.
  static void keep(const CacheCore& core, AttentionPlan& plan) noexcept {
    if (plan.state_) PlanState::leave(core, std::move(plan.state_));
  }
  // Work space that lives as long as the plan; null without memory.
  static std::byte* scratch(AttentionPlan& plan, std::size_t bytes) noexcept {
    if (!plan.state_) plan.state_.reset(new (std::nothrow) State);
    return plan.state_ && plan.state_->scratch.reserve(bytes) ? plan.state_->scratch.get() : nullptr;
  }
  // Requires scratch.
  static Slots& slots(AttentionPlan& plan) noexcept { return plan.state_->slots; }

  // Lets no more than `slots` tasks run at once. Returns the bytes that `run` needs then.
  static std::size_t limit_slots(AttentionPlan& plan, std::size_t slots) noexcept {
    if (!plan.state_) return 0;
    const State& state = *plan.state_;
    const std::size_t count = (std::min)(slots, state.slot_count);
    state.slots.reset(count);
    return state.slots_begin + state.slot_bytes * count;
  }

  static Status plan(CacheCore& core, std::size_t layer_index, std::span<const BatchItem> batch,
                     const AttentionParams& params, AttentionPlan& plan) noexcept {
    if (layer_index >= core.layer_count()) {
      if (plan.state_) plan.state_->drop();
      return {Status::bad_layer, "layer", Core::as_signed(core.layer_count()), Core::as_signed(layer_index)};
    }
    Status status = begin(plan, core.layer(layer_index), core.rule(), params, batch.size());
    if (status.code != Status::ok) return status;
    State& state = *plan.state_;
    state.core = &core;
    for (std::size_t i = 0; i < batch.size() && status == Status::ok; ++i) {
      status = of_item(i, add(state, layer_index, batch[i], i));
    }
    if (status == Status::ok) status = mark_readers(state);
    return finish(state, status);
  }

  // The same over pages that the caller owns: nothing is appended, nothing is held.
  static Status plan_pages(const Layer& layer, std::span<const PageItem> batch, const AttentionParams& params,
                           AttentionPlan& plan) noexcept {
    Status status = begin(plan, layer, {layer.page_shape.tokens, 0, 0}, params, batch.size());
    if (status.code != Status::ok) return status;
    State& state = *plan.state_;
    state.outside.reset(new (std::nothrow) LayerState[batch.size()]);
    if (!state.outside) status = {Status::out_of_memory, "plan"};
    for (std::size_t i = 0; i < batch.size() && status == Status::ok; ++i) {
      status = of_item(i, add_pages(state, batch[i], i));
    }
    return finish(state, status);
  }

 private:
  using State = PlanState;
  using Item = PlannedItem;
  using Core = CacheCore;

  static constexpr std::size_t kSplitTokens = 1024;  // tokens per split of a long context
  static constexpr std::size_t kMostParts = 32;      // parts of a long context that run on their own
  static constexpr std::size_t kPartRows = 64;       // for items with at most so many rows per KV head
  static constexpr std::size_t kBlockRows = 32;      // rows per query block otherwise

  static bool copy(std::span<const float> from, Array<float>& to) noexcept {
    if (!to.resize(from.size())) return false;
    std::copy(from.begin(), from.end(), to.begin());
    return true;
  }

  // Names the item that was refused.
  static Status of_item(std::size_t index, Status status) noexcept {
    if (status.code != Status::ok) status.item = Core::as_signed(index);
    return status;
  }
  static Status of_item(const State& state, const Item& planned, Status status) noexcept {
    return of_item(static_cast<std::size_t>(&planned - state.items.data()), status);
  }

  static bool all_finite(std::span<const float> values) noexcept {
    return std::all_of(values.begin(), values.end(), [](float x) { return is_finite(x); });
  }

  static Status begin(AttentionPlan& plan, const Layer& layer, const CodingRule& rule, const AttentionParams& params,
                      std::size_t items) noexcept {
    if (!plan.state_) plan.state_.reset(new (std::nothrow) State);
    if (!plan.state_) return {Status::out_of_memory, "plan"};
    State& state = *plan.state_;
    state.drop();
    state.core = nullptr;
    state.layer = &layer;
    state.rule = rule;
    const Status status = set_params(state, params);
    if (status.code != Status::ok) return status;
    return state.items.reserve(items) ? Status{} : Status{Status::out_of_memory, "plan"};
  }

  static Status finish(State& state, Status status) noexcept {
    if (status == Status::ok) status = check_inputs(state);
    if (status == Status::ok) status = schedule(state);
    if (status.code != Status::ok) state.drop();
    return status;
  }

  static Status add_pages(State& state, const PageItem& from, std::size_t index) noexcept {
    const Layer& layer = *state.layer;
    const Status rows = check_new_rows(layer.shape, from.keys, from.values);
    if (rows.code != Status::ok) return rows;
    if (const Status status = check_queries(state, from); status.code != Status::ok) return status;
    const std::size_t first_view = state.page_views.size();
    if (!state.page_views.reserve_more(from.pages.size())) return {Status::out_of_memory, "plan"};
    std::size_t before = 0;
    for (const PageSpan& span : from.pages) {
      if (span.page == nullptr) return {Status::bad_shape, "pages.page"};
      const std::size_t room = layer.page_shape.tokens;
      if (span.first >= room) return Core::bad_shape("pages.first", room - 1, span.first);
      if (span.count == 0 || span.count > room - span.first) {
        return Core::bad_shape("pages.count", room - span.first, span.count);
      }
      (void)state.page_views.push_back({span.page, before, span.first, span.count});
      before += span.count;
    }
    Item& planned = add_item(state, from.queries);
    planned.item.queries = from.queries;
    planned.item.out = from.out;
    planned.item.lse = from.lse;
    planned.item.position = from.position;
    planned.item.key_begin = from.key_begin;
    planned.item.key_end = from.key_end;
    planned.first_view = first_view;
    planned.views = from.pages.size();
    planned.state = &state.outside[index];
    planned.state->base = planned.state->tail_begin = planned.state->held_begin = before;
    planned.keys_behind = from.keys;
    planned.values_behind = from.values;
    planned.before = before;
    planned.after = before + from.keys.tokens;
    return {};
  }

  static Status set_params(State& state, const AttentionParams& params) noexcept {
    if (!is_finite(params.scale)) return {Status::non_finite_input, "params.scale"};
    if (!is_finite(params.softcap)) return {Status::non_finite_input, "params.softcap"};
    if (params.softcap < 0) return {Status::bad_shape, "params.softcap"};
    if (!all_finite(params.alibi_slopes)) return {Status::non_finite_input, "params.alibi_slopes"};
    for (const float sink : params.sink_logits) {
      if (!is_finite(sink) && !is_nothing(sink)) return {Status::non_finite_input, "params.sink_logits"};
    }
    if (!copy(params.alibi_slopes, state.alibi_slopes) || !copy(params.sink_logits, state.sink_logits)) {
      return {Status::out_of_memory, "plan"};
    }
    state.params = params;
    state.params.alibi_slopes = {state.alibi_slopes.data(), state.alibi_slopes.size()};
    state.params.sink_logits = {state.sink_logits.data(), state.sink_logits.size()};
    state.scale = params.scale != 0 ? params.scale : 1.0f / std::sqrt(static_cast<float>(state.layer->shape.head_dim));
    return {};
  }

  static Status check_new_rows(const LayerShape& shape, const ConstRows& keys, const ConstRows& values) noexcept {
    if (keys.tokens != values.tokens) return Core::bad_shape("values.tokens", keys.tokens, values.tokens);
    if (keys.tokens == 0) return {};
    const Status status = check_rows(keys, kKeyFields, shape.kv_heads, shape.head_dim);
    if (status.code != Status::ok) return status;
    return check_rows(values, kValueFields, shape.kv_heads, shape.value_dim);
  }

  template <class AnyItem>
  static Status check_queries(const State& state, const AnyItem& item) noexcept {
    const LayerShape& shape = state.layer->shape;
    const ConstRows& queries = item.queries;
    if (queries.tokens == 0)
      return item.out.tokens != 0 ? Core::bad_shape("queries.tokens", item.out.tokens, 0) : Status{};
    if (queries.heads == 0 || queries.heads % shape.kv_heads != 0) {
      return Core::bad_shape("queries.heads", shape.kv_heads, queries.heads);
    }
    Status status = check_rows(queries, kQueryFields, queries.heads, shape.head_dim);
    if (status == Status::ok) {
      status = check_rows(ConstRows(item.out), kOutFields, queries.heads, shape.value_dim);
    }
    if (status.code != Status::ok) return status;
    if (item.out.tokens != queries.tokens) return Core::bad_shape("out.tokens", queries.tokens, item.out.tokens);
    for (const auto& [values, name] : {std::pair{state.params.alibi_slopes, "params.alibi_slopes"},
                                       std::pair{state.params.sink_logits, "params.sink_logits"}}) {
      if (!values.empty() && values.size() != queries.heads) return Core::bad_shape(name, queries.heads, values.size());
    }
    return {};
  }

  // A new item, for which there is room, with what follows from its queries.
  static Item& add_item(State& state, const ConstRows& queries) noexcept {
    (void)state.items.resize(state.items.size() + 1);
    Item& planned = state.items.back();
    planned.group = queries.tokens != 0 ? queries.heads / state.layer->shape.kv_heads : 1;
    planned.heads = queries.tokens != 0 ? queries.heads : 0;
    return planned;
  }

  // Checks shapes, adds the item and, if it appends, marks its sequence.
  static Status add(State& state, std::size_t layer_index, const BatchItem& item, std::size_t index) noexcept {
    const LayerShape& shape = state.layer->shape;
    Sequence* sequence = state.core->find(item.sequence);
    if (sequence == nullptr) return {Status::unknown_sequence, "sequence"};
    if (item.keys.tokens > 0 && sequence->is_planned()) {
      return {Status::bad_shape, sequence->pending == &state ? "sequence appears twice" : "pending plan"};
    }
    if (const Status status = check_new_rows(shape, item.keys, item.values); status.code != Status::ok) return status;
    if (const Status status = check_queries(state, item); status.code != Status::ok) return status;
    if (const Status status = check_tree(state, item); status.code != Status::ok) return status;
    LayerState& layer_state = sequence->layers[layer_index];
    const std::size_t before = layer_state.length;
    if (item.keys.tokens > kMostTokens - before) {
      return Core::bad_shape("keys.tokens", kMostTokens - before, item.keys.tokens);
    }
    Item& planned = add_item(state, item.queries);
    planned.item = item;
    planned.sequence = sequence;
    planned.state = &layer_state;
    planned.before = before;
    planned.after = before + item.keys.tokens;
    state.armed = true;
    state.commit_tasks = 1;
    if (planned.appends()) {
      sequence->pending = &state;
      sequence->pending_item = index;
    }
    return {};
  }

  // All of a tree must stay raw, and its branches must be accepted exactly. A query sees what its parent sees, and
  // itself.
  static Status check_tree(const State& state, const BatchItem& item) noexcept {
    if (item.tree == nullptr) return {};
    const std::size_t count = item.queries.tokens;
    const CodingRule& rule = state.rule;
    const std::size_t most = (std::min)({std::size_t{64}, rule.recent_tokens, rule.rollback_tokens});
    if (count > most) return Core::bad_shape("tree", most, count);
    if (item.keys.tokens != 0 && item.keys.tokens != count) return Core::bad_shape("tree", item.keys.tokens, count);
    if (!state.params.causal) return {Status::bad_shape, "params.causal"};
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t self = std::uint64_t{1} << i, ancestors = item.tree[i] ^ self;
      const bool ordered = ancestors < self;  // also: sees itself
      const std::uint64_t parents =
          !ordered || ancestors == 0 ? 0 : item.tree[static_cast<std::size_t>(std::bit_width(ancestors)) - 1];
      if (!ordered || parents != ancestors) {
        return {Status::bad_shape, "tree", Core::as_signed(i), static_cast<std::int64_t>(item.tree[i])};
      }
    }
    return {};
  }

  // After all appending items are marked: the sequences that are only read. Another plan may read them too, none may
  // append.
  static Status mark_readers(State& state) noexcept {
    for (Item& planned : state.items) {
      if (planned.appends() || planned.sequence == nullptr || planned.sequence->pending == &state) continue;
      if (planned.sequence->pending != nullptr) {
        return of_item(state, planned, {Status::bad_shape, "pending plan"});
      }
      planned.sequence->readers.fetch_add(1, std::memory_order_relaxed);
      planned.reads = true;
    }
    return {};
  }

  static Status check_inputs(const State& state) noexcept {
    for (const Item& planned : state.items) {
      const Status status = check_inputs(planned);
      if (status.code != Status::ok) return of_item(state, planned, status);
    }
    return {};
  }

  static Status check_inputs(const Item& planned) noexcept {
    const BatchItem& item = planned.item;
    const ConstRows& keys = planned.sequence != nullptr ? item.keys : planned.keys_behind;
    const ConstRows& values = planned.sequence != nullptr ? item.values : planned.values_behind;
    for (std::size_t t = 0; t < keys.tokens; ++t) {
      for (std::size_t h = 0; h < keys.heads; ++h) {
        if (!is_storable_row(keys, t, h)) return {Status::non_finite_input, "keys", 0, Core::as_signed(t)};
        if (!is_storable_row(values, t, h)) return {Status::non_finite_input, "values", 0, Core::as_signed(t)};
      }
    }
    for (std::size_t t = 0; t < item.queries.tokens; ++t) {
      for (std::size_t h = 0; h < item.queries.heads; ++h) {
        if (!is_finite_row(item.queries, t, h)) return {Status::non_finite_input, "queries", 0, Core::as_signed(t)};
      }
    }
    return {};
  }

  // The position of query 0, and that everything in front of the queries is there.
  static Status place(const State& state, Item& planned, const SequenceView& view) noexcept {
    const std::size_t queries = planned.item.queries.tokens;
    planned.position = planned.item.position == npos
                           ? static_cast<std::ptrdiff_t>(view.after) - static_cast<std::ptrdiff_t>(queries)
                           : static_cast<std::ptrdiff_t>(planned.item.position);
    if (planned.item.tree != nullptr) {
      if (queries > view.after) return Core::bad_shape("tree", view.after, queries);
      const std::size_t root = view.after - queries;
      // Codes know no branches: a tree that has been sealed is none any more.
      if (root < view.coded_end && view.first_tokens < view.coded_end) {
        return Core::bad_shape("tree", view.after - (std::min)(view.coded_end, view.after), queries);
      }
      planned.position = static_cast<std::ptrdiff_t>(root);
    }
    if (planned.item.position == npos && state.params.causal && view.after != 0 && queries > view.after) {
      return Core::bad_shape("queries.tokens", view.after, queries);  // the first ones would stand before position 0
    }
    if (planned.item.position != npos && planned.item.position > kMostTokens) {
      return Core::bad_shape("position", kMostTokens, planned.item.position);
    }
    if (planned.item.key_begin > planned.item.key_end) {
      return Core::bad_shape("key_begin", planned.item.key_end, planned.item.key_begin);
    }
    return check_held(state, planned, view);
  }

  // Decides what each item encodes, stores and attends to, and takes the memory for it.
  static Status schedule(State& state) noexcept {
    const Layer& layer = *state.layer;
    const CodingRule& rule = state.rule;
    state.split_entries = (std::max)(kSplitTokens / rule.page_tokens, std::size_t{1});
    for (Item& planned : state.items) {
      planned.coded_end = planned.state->coded_end();
      planned.tail_begin = planned.state->tail_begin;
      planned.blocks = state.blocks.size();
      planned.first_page = state.pages.size();
      planned.encode_task = state.encode_tasks;
      planned.ahead_task = state.ahead_tasks;
      planned.store_task = state.store_tasks;
      if (planned.appends()) {
        const Status status = schedule_append(state, planned);
        if (status.code != Status::ok) return of_item(state, planned, status);
      }
    }
    std::size_t partial_bytes = 0, levels = 1;
    state.rows_per_block = 1;
    for (Item& planned : state.items) {
      planned.attend_task = state.attend_tasks;
      planned.merge_task = state.merge_tasks;
      const std::size_t queries = planned.item.queries.tokens;
      if (queries == 0) continue;
      const SequenceView view = AttentionPlan::view_of(state, planned);
      if (const Status status = place(state, planned, view); status.code != Status::ok) {
        return of_item(state, planned, status);
      }
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
        partial_bytes +=
            layer.shape.kv_heads * (planned.parts + 1) * AttentionPlan::partial_bytes(planned, layer.shape.value_dim);
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
    Carver measure(nullptr);
    state.tree_levels = levels;
    if (state.attend_tasks > 0) (void)RowBlock::carve(layer, state.rows_per_block, levels, measure);
    state.slot_bytes = layout::round_up(
        (std::max)(measure.used(), state.encode_tasks + state.ahead_tasks > 0 ? layer.encode_scratch_bytes() : 0),
        kCacheLine);
    state.slot_count = (std::min)((std::max)(state.attend_tasks + state.ahead_tasks, state.encode_tasks), Slots::kMost);
    state.slots.reset(state.slot_count);
    state.runs.fetch_add(1, std::memory_order_relaxed);
    state.slots_begin = partial_bytes;
    state.workspace_bytes = partial_bytes + state.slot_bytes * state.slot_count;
    return {};
  }

  // Pages and tiles of one appending item, and room in its tables.
  static Status schedule_append(State& state, Item& planned) noexcept {
    const Layer& layer = *state.layer;
    const CodingRule& rule = state.rule;
    LayerState& old = *planned.state;
    const std::size_t first_tokens = old.first;
    const auto keep = [](const Array<Block*>& blocks, std::size_t begin, std::size_t rows) {
      // Whole tiles stay; a partial one only if nobody else has it.
      const std::size_t whole = rows / 16;
      return rows % 16 != 0 && blocks[begin + whole]->is_exclusive() ? whole + 1 : whole;
    };
    planned.coded_end = (std::max)(rule.coded(old.base, planned.after), planned.coded_end);
    const std::size_t ahead = old.coding.size(), numbered = state.core->pages_before_coding(old);
    planned.due = (planned.coded_end - old.coded_end()) / rule.page_tokens;
    const std::size_t begun = saturating_subtract(rule.pages_begun(old.base, planned.after), numbered);
    planned.listed = (std::max)({planned.due, begun, ahead});
    planned.pages = planned.listed - ahead;
    planned.open = ahead > 0 ? ahead - 1 : 0;
    planned.work_before = ahead > 0 ? old.coding_work : 0;
    const std::size_t work = layer.page_work();
    if (ahead > 0 && planned.work_before == work) ++planned.open, planned.work_before = 0;
    planned.work_after = work;
    if (planned.listed > planned.due) {
      const std::size_t last_end = old.coded_end() + planned.listed * rule.page_tokens;
      planned.work_after = rule.work_due(last_end, planned.after, work);
      if (planned.open == planned.listed) planned.work_after = work;  // it was complete before
      if (planned.open + 1 == planned.listed) {
        planned.work_after = (std::max)(planned.work_after, planned.work_before);
      }
    }
    planned.tail_begin = (std::max)(rule.raw_begin(old.base, planned.after), old.tail_begin);
    planned.kept_first = planned.before >= first_tokens
                             ? old.first_tiles.size()  // complete: shared or not, nobody writes
                             : keep(old.first_tiles, 0, planned.before);
    planned.first_tiles = layout::tile_count((std::min)(planned.after, first_tokens)) - planned.kept_first;
    planned.dropped_tail = (std::min)((planned.tail_begin - old.tail_begin) / 16, old.tail.size());
    planned.kept_tail = keep(old.tail, planned.dropped_tail, saturating_subtract(planned.before, planned.tail_begin));
    planned.tail_tiles = layout::tile_count(saturating_subtract(planned.after, planned.tail_begin)) - planned.kept_tail;

    const std::size_t count = planned.pages + planned.first_tiles + planned.tail_tiles;
    // The arrays grow geometrically: one token at a time must not copy a long table at every page.
    if (!old.entries.reserve_more(planned.due) || !old.coding.reserve_more(planned.listed - old.coding.size()) ||
        !old.first_tiles.reserve_more(planned.first_tiles) || !old.tail.reserve_more(planned.tail_tiles) ||
        !state.blocks.reserve_more(count) || !state.pages.reserve_more(planned.listed)) {
      planned.pages = planned.first_tiles = planned.tail_tiles = 0;  // nothing to give back
      return {Status::out_of_memory, "tables"};
    }
    const auto acquire = [&](unsigned size_class, std::size_t n) {
      for (std::size_t i = 0; i < n; ++i) {
        bool from_reserve = false;
        Block* block = state.core->take(*planned.sequence, size_class, from_reserve);
        (void)state.blocks.push_back({block, size_class, from_reserve});  // null too: drop() counts them
        if (block == nullptr) return false;
      }
      return true;
    };
    // What drop() may find half done: pad with null.
    const bool enough =
        acquire(layer.page_class, planned.pages) && acquire(layer.tile_class, planned.first_tiles + planned.tail_tiles);
    while (state.blocks.size() < planned.blocks + count) (void)state.blocks.push_back({nullptr, 0, false});
    if (!enough) return {Status::out_of_memory, "pages"};
    for (Block* page : old.coding) (void)state.pages.push_back(page);
    for (std::size_t i = 0; i < planned.pages; ++i) {
      Block* page = state.blocks[planned.blocks + i].block;
      layer.clear_padding(page->memory);
      (void)state.pages.push_back(page);
    }
    state.encode_tasks += saturating_subtract(planned.due, planned.open) * layer.units();
    state.ahead_tasks += AttentionPlan::ahead_tasks(layer, planned);
    state.store_tasks += AttentionPlan::written_tiles(planned, true) + AttentionPlan::written_tiles(planned, false);
    return {};
  }

  // A query that may see a token freed behind the window is refused.
  static Status check_held(const State& state, const Item& planned, const SequenceView& view) noexcept {
    const std::size_t held = planned.state->held_begin;
    if (planned.sequence == nullptr || held <= view.first_tokens) return {};
    const AttentionJob job = AttentionPlan::job_of(state, planned);
    for (std::size_t query = 0; query < planned.item.queries.tokens; ++query) {
      const std::ptrdiff_t position = job.position_of(query);
      const RowRange range = job.range(position);
      if (range.coded_low < range.coded_high && range.coded_low < held) {
        return {Status::behind_window, "position", Core::as_signed(held + state.layer->shape.window) - 1, position};
      }
    }
    return {};
  }
};

}  // namespace turboquant::detail
