// One random history of several sequences in one pool, step by step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <turboquant/turboquant.hpp>
#include <utility>
#include <vector>

#include "cache/history_world.hpp"

namespace tests {

/// The configuration is history_config(seed). Checks are gtest's.
class History final : public HistoryWorld {
 public:
  using HistoryWorld::HistoryWorld;

  /// One step of some sequence.
  void take(Dice& dice) {
    ++counts_.operations;
    if (sequences_.empty() || (sequences_.size() < 5 && dice.roll(8) == 0)) {
      begin_sequence();
      return;
    }
    const std::size_t index = dice.roll(sequences_.size());
    if (change(index, dice)) {
      Known& after = sequences_[index];
      ASSERT_EQ(cache_->length(after.id), after.length());
      for (std::size_t l = 0; l < config_.layers.size(); ++l) after.mirrors[l].learn(*cache_, after.id);
      look_back(after, dice);
      if (dice.roll(8) == 0) read_all(after);
    }
    audit();
  }

 private:
  /// False: the sequence is gone.
  bool change(std::size_t index, Dice& dice) {
    Known& known = sequences_[index];
    const std::size_t length = known.length();
    switch (dice.roll(20)) {
      case 0:  // at the end or anywhere
        fork(known, dice.roll(2) == 0 ? length : dice.roll(length + 1));
        break;
      case 1:  // rejected drafts
        counts_.shallow += truncate(known, length - std::min(length, dice.roll(config_.rollback_tokens + 1))) ? 1 : 0;
        break;
      case 2:  // back to anywhere
        if (dice.roll(3) != 0) break;
        counts_.deep += truncate(known, dice.roll(length + 1)) ? 1 : 0;
        break;
      case 3:
        if (dice.roll(2) != 0) break;
        known.firm = 0;
        if (!attempt(known, [&](Cache& cache, bool echo) { return cache.seal(id_of(known, echo)); })) break;
        for (Mirror& mirror : known.mirrors) mirror.seal();
        known.refused = false;
        ++counts_.seals;
        break;
      case 4: {  // anything: codes, raw rows, first tokens
        const std::size_t begin = dice.roll(length + 1);
        erase(known, begin, begin + dice.roll(length - begin + 1));
        break;
      }
      case 5: {  // what is raw, or nearly so
        const std::size_t from = length - std::min(length, config_.recent_tokens + config_.rollback_tokens);
        const std::size_t begin = from + dice.roll(length - from + 1);
        erase(known, begin, begin + dice.roll(length - begin + 1));
        break;
      }
      case 6:
        if (dice.roll(4) != 0) break;
        release(index);
        return false;
      case 7:
      case 8:
        reserve(known, dice);
        break;
      case 9:
        return branch(index, dice);
      case 10:
        return append(index, dice, 1 + dice.roll(80));
      case 11:
        return exchange(index, dice);
      case 12:
        if (dice.roll(4) == 0) load_everything(dice);
        break;
      case 13:
        drop_plan(known, dice);
        break;
      case 14:  // to the end of what was promised
        if (known.firm > length) return append(index, dice, known.firm - length);
        break;
      default:
        return append(index, dice, 1 + dice.roll(6));
    }
    return true;
  }

  bool truncate(Known& known, std::size_t length) {
    bool allowed = true;
    for (const Mirror& mirror : known.mirrors) allowed = allowed && mirror.may_shorten(length);
    if (known.length() - length > config_.rollback_tokens) known.firm = 0;
    const auto call = [&](Cache& cache, bool echo) { return cache.truncate(id_of(known, echo), length); };
    if (!attempt(known, allowed, false, call)) return false;
    for (Mirror& mirror : known.mirrors) mirror.truncate(length);
    known.refused = false;
    return true;
  }

  void fork(Known& known, std::size_t kept) {
    if (sequences_.size() >= 6) return;
    bool allowed = true;
    for (const Mirror& mirror : known.mirrors) allowed = allowed && mirror.may_shorten(kept);
    known.firm = 0;
    Known child = known;
    const auto call = [&](Cache& cache, bool echo) {
      return cache.fork(id_of(known, echo), kept, echo ? child.echo_id : child.id);
    };
    if (!attempt(known, allowed, true, call)) return;
    child.reserved = 0;
    child.refused = false;
    for (Mirror& mirror : child.mirrors) mirror.truncate(kept);
    ++counts_.forks;
    sequences_.push_back(std::move(child));  // `known` is stale from here on
  }

  void erase(Known& known, std::size_t begin, std::size_t end) {
    bool allowed = true, traceless = true;
    for (const Mirror& mirror : known.mirrors) {
      allowed = allowed && mirror.may_erase(begin, end);
      traceless = traceless && mirror.is_traceless(begin, known.length() - (end - begin));
    }
    known.firm = 0;
    const auto call = [&](Cache& cache, bool echo) { return cache.erase(id_of(known, echo), begin, end); };
    if (!attempt(known, allowed, true, call) || begin == end) return;
    for (Mirror& mirror : known.mirrors) mirror.erase(begin, end);
    known.refused = false;
    counts_.traceless += traceless ? 1 : 0;
    ++counts_.erased;
  }

  void reserve(Known& known, Dice& dice) {
    std::size_t tokens = 1 + dice.roll(100);
    if (config_.max_bytes != 0 && dice.roll(4) == 0) tokens = std::size_t{1} << (10 + dice.roll(39));
    if (dice.roll(8) == 0) {  // gives back what is left
      EXPECT_OK(cache_->reserve(known.id, 0));
      known.reserved = known.firm = 0;
      return;
    }
    const Look before = look();
    const Status status = cache_->reserve(known.id, tokens);
    known.refused = !(status == Status::ok);
    ++counts_.reserves;
    if (known.refused) {
      EXPECT_STATUS(out_of_memory, status);
      EXPECT_NE(config_.max_bytes, 0U);
      EXPECT_EQ(look(), before) << "a refused reserve of " << tokens;
      return;
    }
    known.firm = std::max(known.firm, known.length() + tokens);
    known.reserved = std::max(known.reserved, known.length() + tokens);
  }

  /// Some of the drafts at the end are kept: a chain of them, or a tree.
  bool branch(std::size_t index, Dice& dice) {
    const std::size_t most = std::min({config_.recent_tokens, config_.rollback_tokens, std::size_t{20}});
    if (most == 0) return true;
    const std::size_t length = sequences_[index].length(), drafts = 1 + dice.roll(most);
    std::vector<std::uint64_t> tree;
    if (dice.roll(2) == 0) {
      for (std::size_t i = 0; i < drafts; ++i) {
        const std::size_t parent = dice.roll(i + 1);
        tree.push_back((std::uint64_t{1} << i) | (parent < i ? tree[parent] : 0));
      }
    }
    if (!append(index, dice, drafts, tree.empty() ? nullptr : tree.data())) return false;
    Known& known = sequences_[index];
    if (known.length() == length) return true;  // no memory
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t i = 0; i < drafts; ++i)
      if (dice.roll(2) == 0) tokens.push_back(i);
    known.firm = 0;
    const auto call = [&](Cache& cache, bool echo) { return cache.keep(id_of(known, echo), length, tokens); };
    if (!attempt(known, call)) return true;
    for (Mirror& mirror : known.mirrors) mirror.keep(length, tokens);
    ++counts_.branches;
    return true;
  }

  /// A file takes the place of a sequence, in this cache only.
  bool exchange(std::size_t index, Dice& dice) {
    if (dice.roll(3) != 0) return true;
    Known& known = sequences_[index];
    const Bytes file = saved(*cache_, known.id);
    if (echo_) {
      EXPECT_EQ(saved(*echo_, known.echo_id), file);
    }
    const bool first_out = dice.roll(2) == 0;  // its memory may be needed
    if (first_out) cache_->release(known.id);
    MemoryStream stream(file);
    SequenceId id;
    const Status status = load(*cache_, stream.source(), id);
    ++counts_.files;
    if (!(status == Status::ok)) {
      EXPECT_TRUE(status == Status::out_of_memory && config_.max_bytes != 0)
          << turboquant::to_string(status.code) << ' ' << status.field;
      ++counts_.exhausted;
      if (!first_out) return true;
      if (echo_) echo_->release(known.echo_id);
      sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(index));
      return false;
    }
    if (!first_out) cache_->release(known.id);
    known.id = id;
    known.reserved = known.firm = 0;
    known.refused = false;
    EXPECT_EQ(saved(*cache_, known.id), file);
    return true;
  }

  /// Everything is loaded into another cache, which from then on sees the same calls; or everything moves there.
  void load_everything(Dice& dice) {
    const bool moves = dice.roll(3) == 0 && config_.max_bytes == 0;
    auto other = std::make_unique<Cache>(moves ? config_ : echo_config_);
    std::vector<SequenceId> ids;
    for (const Known& known : sequences_) ids.push_back(loaded(*other, saved(*cache_, known.id)));
    for (const SequenceId id : ids)
      if (id == SequenceId()) return;  // refused, which has been said
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Known& known = sequences_[i];
      if (!moves) {
        known.echo_id = ids[i];
        continue;
      }
      cache_->release(known.id);
      known.id = ids[i];
      known.reserved = known.firm = 0;
      known.refused = false;
    }
    ++counts_.moves;
    std::swap(moves ? cache_ : echo_, other);
    if (!moves) return;
    EXPECT_EQ(other->memory().page_bytes, 0U);
    EXPECT_EQ(other->memory().tail_bytes, 0U);
  }

  /// What one sequence gets in a step of all layers.
  struct Part {
    Known* known;
    std::size_t before, count, asking;
    std::uint64_t stream;
    Rows rows{};
  };
  Part part_of(std::size_t index, Dice& dice, std::size_t count) {
    Known& known = sequences_[index];
    return {&known, known.length(), count, 1 + dice.roll(std::min<std::size_t>(count, 3)), dice.fresh_stream()};
  }

  /// False: a sequence had to go.
  bool append(std::size_t index, Dice& dice, std::size_t count, const std::uint64_t* tree = nullptr) {
    std::vector<Part> parts{part_of(index, dice, count)};
    const std::size_t other = dice.roll(4 * sequences_.size());
    if (tree != nullptr) {
      parts[0].asking = count;
    } else if (other < sequences_.size() && other != index) {
      parts.push_back(part_of(other, dice, 1 + dice.roll(6)));
    }
    std::vector<Known*> all;
    bool firm = true;
    for (const Part& part : parts) {
      all.push_back(part.known);
      firm = firm && part.before + part.count <= part.known->firm;
    }
    counts_.firm += firm ? 1 : 0;
    for (std::size_t l = 0; l < config_.layers.size(); ++l) {
      for (Part& part : parts) part.rows = rows_of(part.stream, l, part.count, part.asking);
      const auto call = [&](Cache& cache, bool echo) { return step(cache, echo, l, parts, tree); };
      if (!attempt(all, true, !firm, call)) return l == 0 || realign(parts);
      for (const Part& part : parts) {
        Known& known = *part.known;
        Mirror& mirror = known.mirrors[l];
        known.refused = false;
        mirror.append(part.rows.keys, part.rows.values);
        mirror.learn(*cache_, known.id);
        if (tree == nullptr)
          mirror.check(part.rows.queries, part.rows.outcome, {}, {.position = part.before + part.count - part.asking});
      }
    }
    for (Known* known : all)
      if (known->reserved <= known->length()) known->reserved = known->firm = 0;
    return true;
  }

  /// One layer of all parts in one call; what it wrote, to the parts or compared with them.
  Status step(Cache& cache, bool echo, std::size_t layer, std::vector<Part>& parts, const std::uint64_t* tree) {
    std::vector<turboquant::BatchItem> items;
    std::vector<Outcome> outcomes;
    for (const Part& part : parts) {
      const Block& queries = part.rows.queries;
      outcomes.push_back({{},
                          Block(queries.tokens, queries.heads, part.rows.values.dim, kNaN),
                          std::vector<float>(queries.tokens * queries.heads, kNaN)});
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      turboquant::BatchItem item;
      item.sequence = id_of(*parts[i].known, echo);
      item.keys = std::as_const(parts[i].rows.keys).rows();
      item.values = std::as_const(parts[i].rows.values).rows();
      item.queries = std::as_const(parts[i].rows.queries).rows();
      item.out = outcomes[i].out.rows();
      item.lse = outcomes[i].lse.data();
      item.tree = tree;
      items.push_back(item);
    }
    const Status status = turboquant::attend(cache, layer, items);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (echo) {
        ++counts_.echoed;
        EXPECT_TRUE(same_bits(outcomes[i], parts[i].rows.outcome)) << "the loaded sequence sees something else";
      } else {
        parts[i].rows.outcome = std::move(outcomes[i]);
      }
    }
    return status;
  }

  /// A step has failed between layers. Beyond the rollback a window may not allow to go back: the sequence ends.
  bool realign(const std::vector<Part>& parts) {
    std::vector<SequenceId> lost;
    for (const Part& part : parts) {
      Known& known = *part.known;
      EXPECT_EQ(cache_->length(known.id), part.before);
      EXPECT_STATUS(bad_shape, cache_->seal(known.id));
      MemorySink sink;
      EXPECT_STATUS(bad_shape, save(*cache_, known.id, sink.sink()));
      bool allowed = true;
      for (const Mirror& mirror : known.mirrors) allowed = allowed && mirror.may_shorten(part.before);
      if (part.count > config_.rollback_tokens) known.firm = 0;
      const auto call = [&](Cache& cache, bool echo) { return cache.truncate(id_of(known, echo), part.before); };
      if (!attempt(known, allowed, false, call)) {
        lost.push_back(known.id);
        continue;
      }
      known.refused = false;
      for (Mirror& mirror : known.mirrors)
        if (mirror.length() != part.before) mirror.truncate(part.before);
    }
    for (const SequenceId id : lost) {
      std::size_t index = 0;
      while (!(sequences_[index].id == id)) ++index;
      release(index);
    }
    return lost.empty();
  }

  /// A plan that is begun, run for a while and dropped: nothing has happened.
  void drop_plan(Known& known, Dice& dice) {
    const std::size_t layer = dice.roll(config_.layers.size());
    const std::size_t count = 1 + dice.roll(dice.roll(2) == 0 ? 70 : 5);
    Rows rows = rows_of(dice.fresh_stream(), layer, count, 1 + dice.roll(3) % count);
    Block out(rows.queries.tokens, rows.queries.heads, rows.values.dim);
    turboquant::BatchItem item;
    item.sequence = known.id;
    item.keys = std::as_const(rows.keys).rows();
    item.values = std::as_const(rows.values).rows();
    item.queries = std::as_const(rows.queries).rows();
    item.out = out.rows();
    const Look before = look();
    known.refused = true;
    {
      turboquant::AttentionPlan step;
      const Status status = plan(*cache_, layer, std::span<const turboquant::BatchItem>(&item, 1), {}, step);
      if (status == Status::ok) {
        ++counts_.plans;
        EXPECT_STATUS(bad_shape, cache_->truncate(known.id, known.length()));
        EXPECT_STATUS(bad_shape, cache_->seal(known.id));
        cache_->release(known.id);
        const turboquant::Scratch workspace(step.workspace_bytes());
        const std::size_t phases = dice.roll(step.phases());  // the last one commits
        for (std::size_t phase = 0; phase < phases; ++phase) {
          const std::size_t tasks = phase + 1 == phases ? dice.roll(step.tasks(phase) + 1) : step.tasks(phase);
          for (std::size_t task = 0; task < tasks; ++task) step.run(phase, task, workspace.get());
        }
      } else {
        EXPECT_STATUS(out_of_memory, status);
        EXPECT_NE(config_.max_bytes, 0U);
        EXPECT_GT(known.length() + count, known.firm);
      }
    }
    EXPECT_EQ(look(), before) << "a dropped plan";
  }
};

}  // namespace tests
