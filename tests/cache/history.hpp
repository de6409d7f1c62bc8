// One history of several sequences in one pool, each step held against a plain model of the container.
#pragma once

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <turboquant/cache/stream.hpp>
#include <vector>

#include "cache/block.hpp"
#include "cache/counting_source.hpp"
#include "cache/mirror.hpp"

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
  turboquant::SequenceId id;
  Mirror mirror;
};

/// How often the branches of a step were taken, over all histories.
struct Counts {
  std::size_t operations = 0, deep = 0, shallow = 0, erased = 0, traceless = 0, branches = 0, forks = 0, seals = 0,
              files = 0;
};

inline turboquant::CacheConfig history_config(std::uint64_t seed) {
  turboquant::CacheConfig config;
  config.layers = {turboquant::LayerShape{.kv_heads = 1, .head_dim = 32}};
  config.page_tokens = seed % 2 == 0 ? 16 : 48;
  config.recent_tokens = seed % 3 * 11;
  config.rollback_tokens = seed % 4 * 7;
  config.first_tokens = seed % 5 * 3;
  return config;
}

/// The configuration is history_config(seed). Checks are gtest's.
class History {
 public:
  using Cache = turboquant::KVCache<turboquant::TQ4>;

  History(std::uint64_t seed, Counts& counts) : counts_(counts), config_(history_config(seed)) {
    config_.memory = memory_.source();
    cache_ = std::make_unique<Cache>(config_);
  }

  /// One step of some sequence.
  void take(Dice& dice) {
    ++counts_.operations;
    if (sequences_.empty() || (sequences_.size() < 5 && dice.roll(8) == 0)) {
      sequences_.push_back({new_sequence(*cache_), Mirror(config_, 0, codes_of(4))});
      return;
    }
    const std::size_t index = dice.roll(sequences_.size());
    if (!change(index, dice)) return;
    Known& after = sequences_[index];
    ASSERT_EQ(cache_->length(after.id), after.mirror.length());
    look_back(after, dice);
    if (dice.roll(8) == 0) read_all(after);
  }

  /// Nobody has disturbed anybody, and nothing is left.
  void end() {
    for (Known& known : sequences_) read_all(known);
    for (const Known& known : sequences_) cache_->release(known.id);
    EXPECT_EQ(cache_->memory().page_bytes, 0U);
    EXPECT_EQ(cache_->memory().tail_bytes, 0U);
  }

 private:
  /// False: the sequence is gone.
  bool change(std::size_t index, Dice& dice) {
    Known& known = sequences_[index];
    const std::size_t length = known.mirror.length();
    switch (dice.roll(16)) {
      case 0: {  // at the end or anywhere
        if (sequences_.size() >= 6) break;
        const std::size_t kept = dice.roll(2) == 0 ? length : dice.roll(length + 1);
        Known child = known;
        EXPECT_OK(cache_->fork(known.id, kept, child.id));
        child.mirror.truncate(kept);
        ++counts_.forks;
        sequences_.push_back(child);
        look_back(sequences_.back(), dice);
        break;
      }
      case 1: {  // rejected drafts
        const std::size_t dropped = std::min(length, dice.roll(config_.rollback_tokens + 1));
        EXPECT_OK(cache_->truncate(known.id, length - dropped));
        known.mirror.truncate(length - dropped);
        ++counts_.shallow;
        break;
      }
      case 2: {  // back to anywhere
        if (dice.roll(3) != 0) break;
        const std::size_t kept = dice.roll(length + 1);
        EXPECT_OK(cache_->truncate(known.id, kept));
        known.mirror.truncate(kept);
        ++counts_.deep;
        break;
      }
      case 3:
        EXPECT_OK(cache_->seal(known.id));
        known.mirror.seal();
        known.mirror.learn(*cache_, known.id);
        ++counts_.seals;
        break;
      case 4: {  // anything: codes, raw rows, first tokens
        const std::size_t begin = dice.roll(length + 1), end = begin + dice.roll(length - begin + 1);
        counts_.traceless += known.mirror.is_traceless(begin, length - (end - begin)) ? 1 : 0;
        EXPECT_OK(cache_->erase(known.id, begin, end));
        if (begin < end) known.mirror.erase(begin, end);
        known.mirror.learn(*cache_, known.id);
        ++counts_.erased;
        break;
      }
      case 5:
        if (dice.roll(4) != 0) break;
        cache_->release(known.id);
        EXPECT_EQ(cache_->length(known.id), 0U);
        sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(index));
        return false;
      case 6:
        EXPECT_OK(cache_->reserve(known.id, dice.roll(100)));
        break;
      case 7: {  // some of the drafts at the end
        const std::size_t most = std::min({config_.recent_tokens, config_.rollback_tokens, std::size_t{20}});
        if (most == 0) break;
        append(known, dice, 1 + dice.roll(most));
        std::vector<std::uint32_t> tokens;
        for (std::uint32_t i = 0; length + i < known.mirror.length(); ++i)
          if (dice.roll(2) == 0) tokens.push_back(i);
        EXPECT_OK(cache_->keep(known.id, length, tokens));
        known.mirror.keep(length, tokens);
        known.mirror.learn(*cache_, known.id);
        ++counts_.branches;
        break;
      }
      case 8:
        append(known, dice, 1 + dice.roll(80));
        break;
      case 9: {  // a file takes its place
        if (dice.roll(3) != 0) break;
        std::stringstream file;
        EXPECT_OK(turboquant::save(*cache_, known.id, file));
        turboquant::SequenceId loaded;
        EXPECT_OK(turboquant::load(*cache_, file, loaded));
        cache_->release(known.id);
        known.id = loaded;
        ++counts_.files;
        break;
      }
      default:
        append(known, dice, 1 + dice.roll(6));
        break;
    }
    return true;
  }

  void append(Known& known, Dice& dice, std::size_t count) {
    const std::uint64_t stream = dice.fresh_stream();
    const Block keys = gaussian_block(stream, count, 1, 32), values = gaussian_block(stream + (1U << 30), count, 1, 32);
    const std::size_t asking = 1 + dice.roll(std::min<std::size_t>(count, 3));
    const Block queries = gaussian_block(stream + (2U << 30), asking, 2, 32);
    const std::size_t first = known.mirror.length() + count - asking;
    const Outcome outcome = attend_one(*cache_, 0, known.id, keys, values, queries);
    known.mirror.append(keys, values);
    known.mirror.learn(*cache_, known.id);
    known.mirror.check(queries, outcome, {}, {.position = first});
  }

  /// A query at a position long past.
  void look_back(Known& known, Dice& dice) {
    if (known.mirror.length() == 0) return;
    const Block query = gaussian_block(dice.fresh_stream(), 1, 2, 32);
    CallOptions options;
    options.position = dice.roll(known.mirror.length());
    known.mirror.check(query, attend_only(*cache_, 0, known.id, query, options), {},
                       {.position = options.position, .own_call = false});
  }

  void read_all(Known& known) {
    Block keys, values;
    ASSERT_OK(read_rows(*cache_, known.id, 0, 0, known.mirror.length(), keys, values));
    const Tensor read = keys.exact(), &raw = known.mirror.raw_keys(), &decoded = known.mirror.decoded_keys();
    const std::size_t coded = known.mirror.coded(known.mirror.length()), first = known.mirror.first();
    for (std::size_t t = 0; t < known.mirror.length(); ++t)
      for (std::size_t i = 0; i < 32; ++i)
        ASSERT_EQ(read.row(t, 0)[i], (t >= first && t < coded ? decoded : raw).row(t, 0)[i]) << t;
  }

  Counts& counts_;
  turboquant::CacheConfig config_;
  CountingSource memory_;
  std::unique_ptr<Cache> cache_;
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
