// What an attention plan holds: its items, their blocks, and how the work is divided into tasks.
#pragma once

#include <atomic>
#include <cstddef>

#include <turboquant/attention/rows.hpp>
#include <turboquant/attention/slots.hpp>
#include <turboquant/core/array.hpp>
#include <turboquant/core/memory.hpp>
#include <turboquant/core/owned.hpp>
#include <turboquant/core/spare.hpp>

namespace turboquant::detail {

// A block that the plan holds until it commits, and where it came from.
struct PlannedBlock {
  Block* block;
  unsigned size_class;
  bool from_reserve;
};

// One item of a plan. Planned blocks lie in one array of the plan, in this order: pages, first tiles, tail tiles.
struct PlannedItem {
  BatchItem item;
  Sequence* sequence;  // null: the caller owns the pages, page_views[first_view, + views)
  LayerState* state;
  std::size_t first_view, views;
  ConstRows keys_behind, values_behind;  // the caller's raw rows behind its pages
  std::size_t before, after;             // lengths
  std::size_t coded_end, tail_begin;     // after the commit
  // Pages from the old coded_end on, in the plan's list from first_page on: those coded ahead before, then new ones.
  // The first `due` become readable now and must be complete before anyone reads; of the others the last one may stay
  // in work.
  std::size_t first_page, listed, due;
  std::size_t open;                                    // first page in the list with work left
  std::size_t work_before, work_after;                 // on page `open` before, on the last page after
  std::size_t blocks, pages, first_tiles, tail_tiles;  // index of the first planned block; counts
  std::size_t kept_first, kept_tail;                   // old tiles that stay as they are (after dropped_tail)
  std::size_t dropped_tail;                            // old tail tiles freed at the commit
  std::ptrdiff_t position;
  std::size_t group, heads;
  std::size_t parts, first_part;       // parts > 1: partial results, and a merge
  std::size_t first_split, end_split;  // a part is 2^part_shift splits, aligned
  unsigned part_shift;
  std::size_t queries_per_block;
  std::size_t partials;  // byte offset in the workspace
  // Index of the first task of this item in each kind of work.
  std::size_t encode_task, ahead_task, store_task, attend_task, merge_task;

  bool reads;  // counted among the sequence's readers

  bool appends() const { return item.keys.tokens > 0; }
};

struct PlanState : Reusable {
  CacheCore* core = nullptr;
  const Layer* layer = nullptr;
  CodingRule rule{};
  AttentionParams params{};
  Array<float> alibi_slopes, sink_logits;  // copies: the caller's may be gone when the plan runs
  float scale = 1;
  Array<PlannedItem> items;
  Array<PlannedBlock> blocks;
  Array<Block*> pages;          // of all items: those coded ahead before, then new ones
  Array<PageView> page_views;   // of items whose pages the caller owns
  Owned<LayerState[]> outside;  // states of those items: nothing but pages
  // Sequences are marked, appends are pending.
  std::atomic<bool> armed{false};
  std::size_t encode_tasks = 0, ahead_tasks = 0, store_tasks = 0, attend_tasks = 0, merge_tasks = 0, commit_tasks = 0;
  std::size_t split_entries = 1, rows_per_block = 1, tree_levels = 1;
  std::size_t slots_begin = 0, slot_bytes = 0, slot_count = 0, workspace_bytes = 0;  // partial results, then slots
  mutable Slots slots;
  // Whose rows a slot holds, ready to be used again: those of the merge task of this number in this run. A run ends
  // with the first merge task; plans over pages have several.
  struct Rows {
    std::size_t run = 0, merge_task = 0;
    bool operator==(const Rows&) const = default;
  };
  mutable Rows rows[Slots::kMost];
  mutable std::atomic<std::size_t> runs{1};
  Scratch scratch;  // of calls that plan and run

  ~PlanState() override { drop(); }

  static constexpr std::size_t kMostKept = std::size_t{1} << 20;  // bytes of work space

  // Leaves the memory of a plan over this cache to a later call.
  static void leave(const CacheCore& core, Owned<PlanState> used) noexcept {
    used->drop();
    if (used->scratch.size() > kMostKept) used->scratch.release();
    const std::size_t bytes = used->bytes();
    core.spare().keep(used.release(), bytes);
  }

  std::size_t bytes() const noexcept {
    const auto of = [](const auto& array) { return array.capacity() * sizeof(array[0]); };
    return sizeof *this + of(alibi_slopes) + of(sink_logits) + of(items) + of(blocks) + of(pages) + of(page_views) +
           scratch.size();
  }

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
    pages.clear();
    page_views.clear();
    encode_tasks = ahead_tasks = store_tasks = attend_tasks = merge_tasks = commit_tasks = 0;
    slot_count = workspace_bytes = 0;
  }

  // Sequences accept other calls again.
  void unmark() noexcept {
    for (PlannedItem& planned : items) {
      if (planned.reads) planned.sequence->readers.fetch_sub(1, std::memory_order_release);
      if (planned.appends() && planned.sequence->pending == this) {
        planned.sequence->pending.store(nullptr, std::memory_order_release);  // it may be released from here on
      }
    }
    armed = false;
  }
};

}  // namespace turboquant::detail
