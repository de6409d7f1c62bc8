// The caches of a random history and what must be true of them at any time: a plain model per sequence and layer, all
// memory explained, refused calls without a trace, and a second cache, loaded from files, in which all is the same.
#pragma once

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <turboquant/turboquant.hpp>
#include <utility>
#include <vector>

#include "cache/audit.hpp"
#include "cache/block.hpp"
#include "cache/counting_source.hpp"
#include "cache/history_config.hpp"
#include "cache/mirror.hpp"
#include "cache/saved_file.hpp"

namespace tests {

/// A source of decisions and of data.
class Dice {
 public:
  virtual ~Dice() = default;
  /// 0 <= result < sides.
  virtual std::size_t roll(std::size_t sides) = 0;
  /// The seed of numbers that no other step has.
  virtual std::uint64_t fresh_stream() = 0;
};

struct Known {
  turboquant::SequenceId id, echo_id{};  // in the cache; in the second one, if there is one
  std::vector<Mirror> mirrors;           // per layer
  std::size_t reserved = 0;              // up to this length reserve() has promised something
  std::size_t firm = 0;                  // so far nothing may fail: the sequence has only grown since, and rolled back
  bool refused = false;                  // a call was, or a plan dropped, since its tables were last counted

  std::size_t length() const { return mirrors[0].length(); }
};

/// How often the branches of a step were taken, over all histories.
struct Counts {
  std::size_t operations = 0, deep = 0, shallow = 0, erased = 0, traceless = 0, branches = 0, forks = 0, seals = 0,
              files = 0, moves = 0, reserves = 0, plans = 0, exhausted = 0, behind = 0, firm = 0, echoed = 0;
};

/// Checks are gtest's.
class HistoryWorld {
 public:
  using Cache = HistoryCache;
  using Status = turboquant::Status;
  using SequenceId = turboquant::SequenceId;

  HistoryWorld(std::uint64_t seed, Counts& counts) : counts_(counts), config_(history_config(seed)) {
    echo_config_ = config_;
    echo_config_.max_bytes = 0;
    config_.memory = memory_.source();
    cache_ = std::make_unique<Cache>(config_);
  }

  /// Nobody has disturbed anybody, and nothing is left.
  void end() {
    for (Known& known : sequences_) {
      read_all(known);
      if (echo_) {
        EXPECT_EQ(saved(*cache_, known.id), saved(*echo_, known.echo_id));
      }
    }
    while (!sequences_.empty()) release(sequences_.size() - 1);
    EXPECT_EQ(cache_->memory().page_bytes, 0U);
    EXPECT_EQ(cache_->memory().tail_bytes, 0U);
    EXPECT_TRUE(counts_its_tables(*cache_, {}));
    EXPECT_EQ(cache_->memory().slab_bytes, memory_.bytes());
  }

 protected:
  /// What a refused call must leave alone.
  struct Look {
    std::size_t pages, tiles, tables;
    std::vector<std::size_t> lengths;
    friend bool operator==(const Look&, const Look&) = default;
    friend std::ostream& operator<<(std::ostream& out, const Look& look) {
      return out << "pages " << look.pages << ", tiles " << look.tiles << ", tables " << look.tables << ", lengths "
                 << testing::PrintToString(look.lengths);
    }
  };
  Look look() const {
    const turboquant::MemoryUse use = cache_->memory();
    Look seen{use.page_bytes, use.tail_bytes, use.table_bytes, {}};
    for (const Known& known : sequences_) seen.lengths.push_back(cache_->length(known.id));
    return seen;
  }

  /// Where a call may be refused: for lack of memory in a full cache, or for rows that a window has let go of. Refused,
  /// it has changed nothing; else the second cache does the same. `call(cache, echo)`: a Status. True if it was done.
  template <class Call>
  bool attempt(const std::vector<Known*>& all, bool window_allows, bool memory_fails, const Call& call) {
    const Look before = look();
    const Status status = call(*cache_, false);
    const bool refused = !(status == Status::ok);
    for (Known* known : all) known->refused = known->refused || refused;
    if (refused) {
      EXPECT_EQ(look(), before) << turboquant::to_string(status.code) << ' ' << status.field;
    }
    if (status == Status::out_of_memory) {
      EXPECT_TRUE(memory_fails && config_.max_bytes != 0) << status.field;
      ++counts_.exhausted;
      return false;
    }
    if (echo_) {
      EXPECT_EQ(call(*echo_, true).code, status.code) << "the loaded sequence differs";
    }
    if (status == Status::behind_window && !window_allows) {
      ++counts_.behind;
      return false;
    }
    EXPECT_OK(status);
    return !refused;
  }
  template <class Call>
  bool attempt(Known& known, bool window_allows, bool memory_fails, const Call& call) {
    return attempt(std::vector<Known*>{&known}, window_allows, memory_fails, call);
  }
  template <class Call>
  bool attempt(Known& known, const Call& call) {
    return attempt(known, true, true, call);
  }
  static SequenceId id_of(const Known& known, bool echo) { return echo ? known.echo_id : known.id; }

  void begin_sequence() {
    Known known;
    known.id = new_sequence(*cache_);
    if (echo_) known.echo_id = new_sequence(*echo_);
    for (std::size_t l = 0; l < config_.layers.size(); ++l)
      known.mirrors.emplace_back(config_, l, history_codes(config_.layers[l]));
    sequences_.push_back(std::move(known));
  }

  void release(std::size_t index) {
    cache_->release(sequences_[index].id);
    EXPECT_EQ(cache_->length(sequences_[index].id), 0U);
    if (echo_) echo_->release(sequences_[index].echo_id);
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  /// New tokens and queries of one layer, for one call on each cache.
  struct Rows {
    Block keys, values, queries;
    Outcome outcome;
  };
  Rows rows_of(std::uint64_t stream, std::size_t layer, std::size_t count, std::size_t asking) const {
    const turboquant::LayerShape& shape = config_.layers[layer];
    const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
    stream += layer << 24;
    return {gaussian_block(stream, count, shape.kv_heads, shape.head_dim),
            gaussian_block(stream + (1U << 30), count, shape.kv_heads, value_dim),
            gaussian_block(stream + (2U << 30), asking, 2 * shape.kv_heads, shape.head_dim),
            {}};
  }

  /// A query at a position long past, and at part of the keys.
  void look_back(Known& known, Dice& dice) {
    if (known.length() == 0) return;
    const std::size_t layer = dice.roll(config_.layers.size());
    const Block query = rows_of(dice.fresh_stream(), layer, 0, 1).queries;
    CallOptions options;
    options.position = dice.roll(2) == 0 ? known.length() - 1 : dice.roll(known.length());
    if (dice.roll(4) == 0) {
      options.key_begin = dice.roll(known.length());
      options.key_end = options.key_begin + dice.roll(known.length());
    }
    const Outcome outcome = attend_only(*cache_, layer, known.id, query, options);
    if (echo_) {
      const Outcome echo = attend_only(*echo_, layer, known.echo_id, query, options);
      EXPECT_EQ(echo.status.code, outcome.status.code);
      EXPECT_TRUE(same_bits(echo, outcome)) << "the loaded sequence sees something else";
    }
    const Mirror& mirror = known.mirrors[layer];
    if (outcome.status == Status::behind_window && !mirror.may_look_back(options.position, options.key_begin)) {
      ++counts_.behind;
      return;
    }
    mirror.check(
        query, outcome, {},
        {.position = options.position, .own_call = false, .key_begin = options.key_begin, .key_end = options.key_end});
  }

  void read_all(Known& known) {
    for (std::size_t l = 0; l < config_.layers.size(); ++l) {
      Mirror& mirror = known.mirrors[l];
      mirror.learn(*cache_, known.id);
      const std::size_t begin = mirror.held() == mirror.first() ? 0 : mirror.held(), length = mirror.length();
      if (begin >= length) continue;
      Block keys, values;
      ASSERT_OK(read_rows(*cache_, known.id, l, begin, length, keys, values));
      const std::size_t coded = mirror.coded(length), first = mirror.first();
      for (std::size_t t = begin; t < length; ++t) {
        const bool code = t >= first && t < coded;
        const auto equal = [&](const Block& read, const Tensor& wanted) {
          for (std::size_t h = 0; h < read.heads; ++h)
            for (std::size_t i = 0; i < read.dim; ++i)
              if (static_cast<double>(read.row(t - begin, h)[i]) != wanted.row(t, h)[i]) return false;
          return true;
        };
        ASSERT_TRUE(equal(keys, code ? mirror.decoded_keys() : mirror.raw_keys())) << "layer " << l << ", token " << t;
        ASSERT_TRUE(equal(values, code ? mirror.decoded_values() : mirror.raw_values())) << "layer " << l << ", " << t;
      }
    }
  }

  /// All memory has its reason.
  void audit() {
    std::vector<SequenceId> ids, refused;
    for (const Known& known : sequences_) {
      ids.push_back(known.id);
      if (known.refused) refused.push_back(known.id);
      if (known.reserved == 0) {
        EXPECT_FALSE(has_reserve(*cache_, known.id)) << "held for tokens that have come";
      }
    }
    EXPECT_TRUE(is_balanced(*cache_, ids));
    EXPECT_TRUE(counts_its_tables(*cache_, ids, refused));
    EXPECT_EQ(cache_->memory().slab_bytes, memory_.bytes());
    const turboquant::MemoryUse use = cache_->memory();
    if (config_.max_bytes != 0) {
      EXPECT_LE(use.page_bytes + use.tail_bytes, config_.max_bytes);
    }
  }

  Counts& counts_;
  turboquant::CacheConfig config_, echo_config_;
  CountingSource memory_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Cache> echo_;  // null: none yet
  std::vector<Known> sequences_;
};

/// What the first failing check of run(stop) said; empty: none failed. stop() is true once one has.
template <class Run>
std::string first_failure(const Run& run) {
  testing::TestPartResultArray results;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    run([&] { return results.size() > 0; });
  }
  return results.size() == 0 ? std::string() : results.GetTestPartResult(0).message();
}

}  // namespace tests
