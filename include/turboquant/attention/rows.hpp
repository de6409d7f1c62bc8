// Attention of one block of queries over one KV head: online softmax over coded pages and raw tiles, in a fixed order.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include <turboquant/attention/batch.hpp>
#include <turboquant/attention/carver.hpp>
#include <turboquant/attention/merge.hpp>
#include <turboquant/attention/view.hpp>

namespace turboquant::detail {

// Keys that one row may read: codes [coded_low, coded_high), raw rows [first_low, first_high) of the first tokens and
// [tail_low, tail_high).
struct RowRange {
  std::size_t coded_low, coded_high, first_low, first_high, tail_low, tail_high;
};

// The softmax of one row over one set of keys; acc is not divided by the sum yet.
struct Partial {
  SoftmaxState* states;  // [rows]
  float* acc;            // [rows][value_dim]
};

// A row of values, a multiple of 16 long. Loops of a fixed size become vectors at -O2 too.
inline void multiply_row(float* row, std::size_t dim, float factor) {
  for (; dim != 0; dim -= 16, row += 16)
    for (std::size_t i = 0; i < 16; ++i) row[i] *= factor;
}

inline void clear(const Partial& part, std::size_t rows, std::size_t dim) {
  for (std::size_t r = 0; r < rows; ++r) part.states[r] = SoftmaxState{0, 0};
  std::memset(part.acc, 0, rows * dim * sizeof(float));
}

// to := to + from, row by row. A row without keys on one side takes the other side's bits.
inline void fold(const Operations& ops, const Partial& to, const Partial& from, std::size_t rows, std::size_t dim) {
  for (std::size_t r = 0; r < rows; ++r) {
    SoftmaxState& a = to.states[r];
    const SoftmaxState& b = from.states[r];
    if (!(b.sum > 0)) continue;
    if (!(a.sum > 0)) {
      a = b;
      std::copy_n(from.acc + r * dim, dim, to.acc + r * dim);
      continue;
    }
    const float largest = (std::max)(a.largest, b.largest);
    const float fa = a.largest == largest ? 1.0f : ops.exp_negative(a.largest - largest);
    const float fb = b.largest == largest ? 1.0f : ops.exp_negative(b.largest - largest);
    ops.combine(to.acc + r * dim, fa, from.acc + r * dim, fb, dim);
    a = {largest, fa * a.sum + fb * b.sum};
  }
}

// Partial results of splits, merged as a binary tree over their numbers: even with next odd, then pairs, then fours. A
// missing half changes nothing, so the result does not depend on how many splits follow, nor on who merges which part.
struct FoldTree {
  static constexpr std::size_t kMostLevels = 48;
  Partial levels[kMostLevels];
  std::uint64_t used = 0;  // bit l: level l holds a result

  // Takes over the leaf's buffers and leaves it others.
  void push(const Operations& ops, Partial& leaf, std::size_t number, std::size_t rows, std::size_t dim) {
    std::size_t level = 0;
    for (; number % 2 != 0; number /= 2, ++level) {
      if ((used >> level & 1u) == 0) continue;
      fold(ops, levels[level], leaf, rows, dim);
      std::swap(levels[level], leaf);
      used &= ~(std::uint64_t{1} << level);
    }
    std::swap(levels[level], leaf);
    used |= std::uint64_t{1} << level;
  }

  // The merged result; `empty` serves if there was no split.
  Partial finish(const Operations& ops, const Partial& empty, std::size_t rows, std::size_t dim) {
    const Partial* result = nullptr;
    for (std::uint64_t rest = used; rest != 0; rest &= rest - 1) {
      const Partial& level = levels[std::countr_zero(rest)];
      if (result != nullptr) fold(ops, level, *result, rows, dim);
      result = &level;
    }
    if (result != nullptr) return *result;
    clear(empty, rows, dim);
    return empty;
  }
};

// One row is one query head at one query position. Every number of a row depends on that row alone, so results do not
// depend on how rows are grouped into blocks.
struct RowBlock {
  std::size_t rows = 0;
  std::size_t query_begin = 0;  // token of row 0
  QueryBlock query;
  float* factor;     // [rows]: unit * scale
  RowRange* ranges;  // [rows]
  std::ptrdiff_t* positions;
  float* slopes;          // [rows]
  float* logits;          // [rows][kChunk]
  std::int16_t* weights;  // [rows][kChunk]
  WeightSums* sums;       // [pages of a step][rows]
  CodedPart* keys;        // [pages of a step]
  CodedPart* values;
  Partial leaf, raw;
  FoldTree tree;
  bfloat16* staging;  // [16][dim]

  static constexpr std::size_t kChunk = layout::kMaxPageTokens;  // coded tokens per softmax step
  static constexpr std::size_t kMostPages = kChunk / layout::kTileTokens;
  static constexpr std::size_t kRawChunk = 64;  // raw tokens per softmax step

  // `levels` of the tree are enough for split numbers below 2^(levels - 1).
  static RowBlock carve(const Layer& layer, std::size_t rows, std::size_t levels, Carver& carver) {
    const std::size_t key_dim = layer.shape.head_dim, value_dim = layer.shape.value_dim;
    RowBlock b;
    b.rows = rows;
    b.query.rows = rows;
    b.query.dim = key_dim;
    b.query.plane_count = layer.operations->query_planes;
    b.query.normal = carver.take<float>(rows * key_dim);
    b.query.rotated = carver.take<float>(rows * key_dim);
    b.query.planes = carver.take<std::int8_t>(rows * key_dim * b.query.plane_count);
    b.query.step = carver.take<float>(rows);
    b.query.unit = carver.take<float>(rows);
    b.query.sums = carver.take<std::int32_t>(rows * b.query.plane_count);
    b.factor = carver.take<float>(rows);
    b.ranges = carver.take<RowRange>(rows);
    b.positions = carver.take<std::ptrdiff_t>(rows);
    b.slopes = carver.take<float>(rows);
    b.logits = carver.take<float>(rows * kChunk);
    b.weights = carver.take<std::int16_t>(rows * kChunk);
    b.sums = carver.take<WeightSums>(kMostPages * rows);
    b.keys = carver.take<CodedPart>(kMostPages);
    b.values = carver.take<CodedPart>(kMostPages);
    const auto take = [&](Partial& part) {
      part.states = carver.take<SoftmaxState>(rows);
      part.acc = carver.take<float>(rows * value_dim);
    };
    take(b.leaf);
    take(b.raw);
    for (std::size_t level = 0; level < levels; ++level) take(b.tree.levels[level]);
    b.staging = carver.take<bfloat16>(layout::kTileTokens * (std::max)(key_dim, value_dim));
    return b;
  }
};

// What all blocks of one item share.
struct AttentionJob {
  const BatchItem* item = nullptr;
  const AttentionParams* params = nullptr;
  SequenceView view{};
  std::ptrdiff_t position = 0;  // of query 0
  std::size_t group = 1;        // query heads per KV head
  float scale = 1;

  const Operations& operations() const { return *view.layer->operations; }

  RowRange range(std::ptrdiff_t p) const {
    const std::size_t first = view.first_tokens;
    std::size_t low = item->key_begin, high = (std::min)(item->key_end, view.after),
                coded = view.coded_for(view.after - 1);
    if (view.after == 0) high = coded = 0;
    if (params->causal) {
      if (p < 0) return {};
      const auto at = static_cast<std::size_t>(p);
      high = (std::min)(high, at + 1);
      coded = view.coded_for(at);
    }
    const std::size_t window = view.layer->shape.window;
    if (window != 0 && p >= 0) low = (std::max)(low, saturating_subtract(static_cast<std::size_t>(p) + 1, window));
    RowRange r{};
    const auto clip = [&](std::size_t begin, std::size_t end, std::size_t& from, std::size_t& to) {
      from = (std::max)(low, begin);
      to = (std::max)((std::min)(high, end), from);
    };
    clip(0, (std::min)(first, view.after), r.first_low, r.first_high);
    clip(first, coded, r.coded_low, r.coded_high);
    clip((std::max)(coded, first), view.after, r.tail_low, r.tail_high);
    return r;
  }

  std::ptrdiff_t position_of(std::size_t query) const {
    if (item->tree == nullptr) return position + static_cast<std::ptrdiff_t>(query);
    return static_cast<std::ptrdiff_t>(view.tree_begin) + std::popcount(item->tree[query]) - 1;
  }

  // Makes the block that of the queries [begin, end), for which it has room.
  void take_rows(RowBlock& b, std::size_t begin, std::size_t end) const {
    b.rows = b.query.rows = (end - begin) * group;
    b.query_begin = begin;
  }

  // Rows of the queries [begin, end), all heads of the group of `kv_head`. False: only raw rows were asked for, the
  // queries see none, and have been left as they were.
  bool prepare(RowBlock& b, std::size_t kv_head, std::size_t begin, std::size_t end, bool raw_only = false) const {
    take_rows(b, begin, end);
    bool needed = !raw_only;
    for (std::size_t query = begin, r = 0; query < end; ++query) {
      const std::ptrdiff_t at = position_of(query);
      const RowRange visible = range(at);
      needed |= visible.first_low < visible.first_high || visible.tail_low < visible.tail_high;
      for (std::size_t g = 0; g < group; ++g, ++r) {
        b.positions[r] = at;
        b.ranges[r] = visible;
        b.slopes[r] = params->alibi_slopes.empty() ? 0.0f : params->alibi_slopes[kv_head * group + g];
      }
    }
    if (!needed) return false;
    float* row = b.query.normal;
    for (std::size_t query = begin; query < end; ++query) {
      for (std::size_t g = 0; g < group; ++g, row += b.query.dim) {
        load_row(item->queries, query, kv_head * group + g, row);
      }
    }
    operations().prepare_queries(view.layer->key_rotation, b.query);
    for (std::size_t r = 0; r < b.rows; ++r) {
      b.factor[r] = (std::min)(b.query.unit[r] * scale, (std::numeric_limits<float>::max)());
      if (b.factor[r] < 0) b.factor[r] = (std::max)(b.factor[r], (std::numeric_limits<float>::lowest)());
    }
    return true;
  }

  // logits [low, high) of row r, whose column t is the key at position `origin` + t: soft cap and ALiBi.
  void bias(RowBlock& b, std::size_t r, std::size_t low, std::size_t high, std::ptrdiff_t origin) const {
    float* logits = b.logits + r * RowBlock::kChunk;
    if (params->softcap > 0) operations().soft_cap(logits, low, high, params->softcap);
    if (b.slopes[r] != 0) {
      for (std::size_t t = low; t < high; ++t) {
        const float bias = b.slopes[r] * static_cast<float>(origin + static_cast<std::ptrdiff_t>(t) - b.positions[r]);
        logits[t] = (std::min)((std::max)(logits[t] + bias, (std::numeric_limits<float>::lowest)()),
                               (std::numeric_limits<float>::max)());
      }
    }
  }

  // What comes after the logits [begin, end) of row r: bias, softmax step over the visible columns [low, high), scaling
  // of the row's accumulator.
  void soften(RowBlock& b, std::size_t r, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
              std::ptrdiff_t origin, const Partial& to) const {
    bias(b, r, low, high, origin);
    float* logits = b.logits + r * RowBlock::kChunk;
    const bool fresh = !(to.states[r].sum > 0);
    const float factor = operations().softmax_step(logits, begin, end, low, high, to.states[r]);
    const std::size_t dim = view.layer->shape.value_dim;
    if (!fresh && factor != 1.0f) multiply_row(to.acc + r * dim, dim, factor);
  }

  // to := the attention over the entries [begin, end), in the rotated domain.
  void attend_entries(RowBlock& b, std::size_t kv_head, std::size_t begin, std::size_t end, const Partial& to) const {
    clear(to, b.rows, view.layer->shape.value_dim);
    PageView pages[RowBlock::kMostPages];
    for (std::size_t e = begin; e < end;) {
      const std::size_t count = gather(e, end, pages);
      attend_pages(b, kv_head, {pages, count}, e + count, to);
      e += count;
    }
  }

  // The entries that the softmax step of entry `e` takes together: as many as fill a chunk, counted from entry 0, so
  // that a row's steps do not depend on where its codes begin or end. Their tokens are columns of one row of logits,
  // so a page cut at its end is the last, and one cut at its start the first.
  std::size_t gather(std::size_t e, std::size_t end, PageView* pages) const {
    const std::size_t tokens = view.rule->page_tokens, most = RowBlock::kChunk / tokens;
    const std::size_t limit = (std::min)(end, e + most - e % most);
    std::size_t count = 0;
    for (PageView next = view.entry(e);;) {
      pages[count++] = next;
      if (e + count == limit || next.first + next.count != tokens) return count;
      next = view.entry(e + count);
      if (next.first != 0) return count;
    }
  }

  // One softmax step over gathered pages; `next` is the entry behind them.
  void attend_pages(RowBlock& b, std::size_t kv_head, std::span<const PageView> pages, std::size_t next,
                    const Partial& to) const {
    const Layer& layer = *view.layer;
    const std::size_t dim = layer.shape.value_dim, tokens = layer.page_shape.tokens;
    std::size_t low = npos, high = 0, row_begin = b.rows, row_end = 0;
    std::size_t common_low = 0, common_high = npos;  // what all rows see
    for (std::size_t r = 0; r < b.rows; ++r) {
      const std::size_t from = (std::max)(b.ranges[r].coded_low, pages.front().begin);
      const std::size_t until = (std::min)(b.ranges[r].coded_high, pages.back().end());
      common_low = (std::max)(common_low, from), common_high = (std::min)(common_high, until);
      if (from >= until) continue;
      low = (std::min)(low, from), high = (std::max)(high, until);
      row_begin = (std::min)(row_begin, r), row_end = r + 1;
    }
    if (row_begin >= row_end) return;
    // Columns count from the first page that is seen; `shift` is the position of its token 0, modulo 2^64.
    const std::size_t origin = pages.front().begin - pages.front().first;
    const std::size_t skipped = (low - origin) / tokens, seen = (high - origin + tokens - 1) / tokens - skipped;
    const std::size_t shift = origin + skipped * tokens;
    const std::size_t begin = (low - shift) / 16 * 16, end = (high - shift + 15) / 16 * 16;
    CodedPart* keys = b.keys;
    CodedPart* values = b.values;
    const std::size_t end_entry = view.end_entry();
    for (std::size_t k = 0; k < seen; ++k) {
      const std::byte* page = pages[skipped + k].memory;
      layer.find_part(page, Side::key, kv_head, keys[k]);
      layer.find_part(page, Side::value, kv_head, values[k]);
      // Fetched meanwhile: the values of this step while its keys are read, then the keys of the next step or raw ones.
      keys[k].next = values[k].begin();
      values[k].next = next + k < end_entry ? layer.part_ahead(view.entry(next + k).memory, Side::key, kv_head)
                                            : view.keys_ahead(kv_head, next + k - end_entry);
    }
    if (seen == 1) {
      layer.operations->score(keys[0], begin / 16, end / 16, b.query, row_begin, row_end, b.factor,
                              b.logits + row_begin * RowBlock::kChunk, RowBlock::kChunk);
    } else {
      layer.operations->score_pages({keys, seen}, b.query, b.factor, b.logits, RowBlock::kChunk);
    }
    const auto first_position = static_cast<std::ptrdiff_t>(shift);
    if (common_low == shift + begin && common_high == shift + end) {
      if (params->softcap > 0 || !params->alibi_slopes.empty()) {
        for (std::size_t r = 0; r < b.rows; ++r) bias(b, r, begin, end, first_position);
      }
      layer.operations->soften_rows({values, seen}, begin, end, b.rows, b.logits, RowBlock::kChunk, to.states,
                                    b.weights, b.sums, to.acc, dim);
    } else {
      for (std::size_t r = row_begin; r < row_end; ++r) {
        const std::size_t from = (std::max)(b.ranges[r].coded_low, pages.front().begin);
        const std::size_t until = (std::min)(b.ranges[r].coded_high, pages.back().end());
        if (from >= until) {
          for (std::size_t k = 0; k < seen; ++k) b.sums[k * b.rows + r] = WeightSums{0, 0, 0};
          continue;
        }
        soften(b, r, begin, end, from - shift, until - shift, first_position, to);
        layer.operations->weigh({values, seen}, b.logits + r * RowBlock::kChunk, begin, end,
                                b.weights + r * RowBlock::kChunk, b.sums + r, b.rows);
      }
    }
    layer.operations->accumulate({values, seen}, begin, end, row_end - row_begin,
                                 b.weights + row_begin * RowBlock::kChunk, RowBlock::kChunk, b.sums + row_begin, b.rows,
                                 to.acc + row_begin * dim, dim);
  }

  // to := the attention over the raw rows, not rotated: first tokens, then the newest.
  void attend_raw(RowBlock& b, std::size_t kv_head, const Partial& to) const {
    clear(to, b.rows, view.layer->shape.value_dim);
    if (item->tree == nullptr) {
      attend_raw_rows(b, kv_head, 0, b.rows, to);
      return;
    }
    AttentionJob one = *this;  // every query of a tree has newest rows of its own
    for (std::size_t r = 0; r < b.rows; r += group) {
      one.view.path = item->tree[b.query_begin + r / group];
      one.attend_raw_rows(b, kv_head, r, r + group, to);
    }
  }

  // The attention over the splits [begin, end) of `split_entries` entries each, numbered from `origin` in the tree.
  Partial attend_splits(RowBlock& b, std::size_t kv_head, std::size_t begin, std::size_t end, std::size_t origin,
                        std::size_t split_entries) const {
    const std::size_t dim = view.layer->shape.value_dim;
    for (std::size_t s = begin; s < end; ++s) {
      attend_entries(b, kv_head, (std::max)(s * split_entries, view.first_entry()),
                     (std::min)((s + 1) * split_entries, view.end_entry()), b.leaf);
      b.tree.push(operations(), b.leaf, s - origin, b.rows, dim);
    }
    return b.tree.finish(operations(), b.leaf, b.rows, dim);
  }

  // The block's whole result: coded splits, then the raw part, then written out.
  void attend_block(RowBlock& b, std::size_t kv_head, std::size_t query_begin, std::size_t query_end,
                    std::size_t split_entries) const {
    (void)prepare(b, kv_head, query_begin, query_end);
    const std::size_t end = (view.end_entry() + split_entries - 1) / split_entries;
    const Partial coded = attend_splits(b, kv_head, view.first_entry() / split_entries, end, 0, split_entries);
    attend_raw(b, kv_head, b.raw);
    finish(coded, b.raw, b.rows, kv_head, query_begin);
  }

  // Rotates the coded part back, adds the raw part, lets sinks take part, divides, writes. Leaves nothing of `coded`.
  void finish(const Partial& coded, const Partial& raw, std::size_t rows, std::size_t kv_head,
              std::size_t query_begin) const {
    const std::size_t dim = view.layer->shape.value_dim;
    for (std::size_t r = 0; r < rows; ++r) {
      if (coded.states[r].sum > 0) {
        operations().rotate_back(view.layer->value_rotation, coded.acc + r * dim, coded.acc + r * dim);
      }
    }
    fold(operations(), coded, raw, rows, dim);
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t token = query_begin + r / group, head = kv_head * group + r % group;
      SoftmaxState state = coded.states[r];
      float* acc = coded.acc + r * dim;
      if (item->lse != nullptr) {
        item->lse[token * item->queries.heads + head] =
            state.sum > 0 ? state.largest + std::log(state.sum) : -std::numeric_limits<float>::infinity();
      } else if (!params->sink_logits.empty() && !is_nothing(params->sink_logits[head]) && state.sum > 0) {
        const float sink = params->sink_logits[head], largest = (std::max)(state.largest, sink);
        const float factor = operations().exp_negative(state.largest - largest);
        state.sum = state.sum * factor + operations().exp_negative(sink - largest);
        multiply_row(acc, dim, factor);
      }
      if (state.sum > 0) {
        multiply_row(acc, dim, 1.0f / state.sum);  // a sum is 1 or more: its largest logit counts 1
      } else {
        std::fill_n(acc, dim, 0.0f);
      }
      store_row(item->out, token, head, acc);
    }
  }

 private:
  void attend_raw_rows(RowBlock& b, std::size_t kv_head, std::size_t first, std::size_t last, const Partial& to) const {
    attend_raw_range(b, kv_head, first, last, 0, &RowRange::first_low, &RowRange::first_high, to);
    attend_raw_range(b, kv_head, first, last, view.raw_origin, &RowRange::tail_low, &RowRange::tail_high, to);
  }

  // The rows [first, last) of the block: softmax steps of kRawChunk positions counted from `origin`, so that a row's
  // steps depend on its own range only.
  void attend_raw_range(RowBlock& b, std::size_t kv_head, std::size_t first, std::size_t last, std::size_t origin,
                        std::size_t RowRange::*range_low, std::size_t RowRange::*range_high, const Partial& to) const {
    const Layer& layer = *view.layer;
    const std::size_t dim = layer.shape.value_dim;
    std::size_t low = npos, high = 0;
    for (std::size_t r = first; r < last; ++r) {
      if (b.ranges[r].*range_low >= b.ranges[r].*range_high) continue;
      low = (std::min)(low, b.ranges[r].*range_low);
      high = (std::max)(high, b.ranges[r].*range_high);
    }
    if (low >= high) return;
    for (std::size_t chunk = low - (low - origin) % RowBlock::kRawChunk; chunk < high; chunk += RowBlock::kRawChunk) {
      std::size_t from = npos, until = 0, row_begin = last, row_end = first;
      const auto visible = [&](std::size_t r, std::size_t& begin, std::size_t& end) {
        begin = (std::max)(b.ranges[r].*range_low, chunk);
        end = (std::min)(b.ranges[r].*range_high, chunk + RowBlock::kRawChunk);
        return begin < end;
      };
      for (std::size_t r = first; r < last; ++r) {
        std::size_t begin = 0, end = 0;
        if (!visible(r, begin, end)) continue;
        from = (std::min)(from, begin), until = (std::max)(until, end);
        row_begin = (std::min)(row_begin, r), row_end = r + 1;
      }
      if (row_begin >= row_end) continue;
      float* logits = b.logits + row_begin * RowBlock::kChunk;
      for_each_tile(from, until, chunk, [&](std::size_t begin, std::size_t count) {
        const bfloat16* keys = view.raw_rows(Side::key, kv_head, begin, count, b.staging);
        view.fetch_rows(Side::value, kv_head, begin, count);
        const std::size_t next = begin + count;
        if (next < until) view.fetch_rows(Side::key, kv_head, next, (std::min)(until - next, layout::kTileTokens));
        layer.operations->score_raw(keys, count, b.query, row_begin, row_end, b.factor, logits + (begin - chunk),
                                    RowBlock::kChunk);
      });
      for (std::size_t r = row_begin; r < row_end; ++r) {
        std::size_t begin = 0, end = 0;
        if (visible(r, begin, end)) {
          soften(b, r, from - chunk, until - chunk, begin - chunk, end - chunk, static_cast<std::ptrdiff_t>(chunk), to);
        } else {
          std::fill_n(b.logits + r * RowBlock::kChunk + (from - chunk), until - from, 0.0f);
        }
      }
      for_each_tile(from, until, chunk, [&](std::size_t begin, std::size_t count) {
        const bfloat16* values = view.raw_rows(Side::value, kv_head, begin, count, b.staging);
        const std::size_t next = begin + RowBlock::kRawChunk;
        if (next < high) view.fetch_rows(Side::key, kv_head, next, (std::min)(high - next, count));
        layer.operations->accumulate_raw(values, count, dim, row_end - row_begin, logits + (begin - chunk),
                                         RowBlock::kChunk, to.acc + row_begin * dim, dim);
      });
    }
  }

  // Calls visit(begin, count) for the pieces of [from, until) between multiples of 16 counted from `chunk`. What the
  // call appends is a piece of its own, so that only that is copied.
  template <class Visit>
  void for_each_tile(std::size_t from, std::size_t until, std::size_t chunk, Visit visit) const {
    const std::size_t held = view.held();
    while (from < until) {
      std::size_t end = (std::min)(until, chunk + ((from - chunk) / 16 + 1) * 16);
      if (from < held) end = (std::min)(end, held);
      visit(from, end - from);
      from = end;
    }
  }
};

}  // namespace turboquant::detail
