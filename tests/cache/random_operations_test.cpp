// Long random histories of several sequences in one pool, each step held against a plain model of the container.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cache/block.hpp"
#include "cache/counting_source.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

using Cache = KVCache<turboquant::TQ4>;

/// A source of decisions and of data, a function of its seed.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : seed_(seed) {}
  /// 0 <= result < sides.
  std::size_t roll(std::size_t sides) { return static_cast<std::size_t>(oracle::hash(seed_, 4711, ++count_) % sides); }
  std::uint64_t fresh_stream() { return (seed_ << 32) + ++count_; }

 private:
  std::uint64_t seed_, count_ = 0;
};

struct Known {
  SequenceId id;
  Mirror mirror;
};

void append(Cache& cache, Known& known, Dice& dice, std::size_t count) {
  const std::uint64_t stream = dice.fresh_stream();
  const Block keys = gaussian_block(stream, count, 1, 32), values = gaussian_block(stream + (1U << 30), count, 1, 32);
  const std::size_t asking = 1 + dice.roll(count), first = known.mirror.length() + count - asking;
  const Block queries = gaussian_block(stream + (2U << 30), asking, 2, 32);
  const Outcome outcome = attend_one(cache, 0, known.id, keys, values, queries);
  known.mirror.append(keys, values);
  known.mirror.learn(cache, known.id);
  known.mirror.check(queries, outcome, {}, {.position = first});
}

/// A query at a position long past, and everything that can be read.
void look_back(Cache& cache, Known& known, Dice& dice) {
  if (known.mirror.length() == 0) return;
  const Block query = gaussian_block(dice.fresh_stream(), 1, 2, 32);
  CallOptions options;
  options.position = dice.roll(known.mirror.length());
  known.mirror.check(query, attend_only(cache, 0, known.id, query, options), {},
                     {.position = options.position, .own_call = false});
  Block keys, values;
  ASSERT_OK(read_rows(cache, known.id, 0, 0, known.mirror.length(), keys, values));
  const Tensor read = keys.exact(), &raw = known.mirror.raw_keys(), &decoded = known.mirror.decoded_keys();
  const std::size_t coded = known.mirror.coded(known.mirror.length()), first_tokens = known.mirror.first();
  for (std::size_t t = 0; t < known.mirror.length(); ++t)
    for (std::size_t i = 0; i < 32; ++i)
      ASSERT_EQ(read.row(t, 0)[i], (t >= first_tokens && t < coded ? decoded : raw).row(t, 0)[i]) << t;
}

TEST(RandomOperations, FollowThePlainModel) {
  std::size_t deep = 0, shallow = 0, erased = 0, traceless = 0, branches = 0;
  for (std::uint64_t seed = 0; seed < 30 && !HasFailure(); ++seed) {
    CountingSource memory;
    CacheConfig config;
    config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32}};
    config.page_tokens = seed % 2 == 0 ? 16 : 48;
    config.recent_tokens = seed % 3 * 11;
    config.rollback_tokens = seed % 4 * 7;
    config.first_tokens = seed % 5 * 3;
    config.memory = memory.source();
    Cache cache(config);
    Dice dice(seed);
    std::vector<Known> sequences;
    for (int step = 0; step < 120 && !HasFailure(); ++step) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " step " << step);
      if (sequences.empty() || (sequences.size() < 5 && dice.roll(8) == 0)) {
        sequences.push_back({new_sequence(cache), Mirror(config, 0, codes_of(4))});
        continue;
      }
      const std::size_t index = dice.roll(sequences.size());
      Known& known = sequences[index];
      const std::size_t length = known.mirror.length();
      switch (dice.roll(16)) {
        case 0: {  // fork, at the end or anywhere
          if (sequences.size() >= 6) break;
          const std::size_t kept = dice.roll(2) == 0 ? length : dice.roll(length + 1);
          Known child = known;
          ASSERT_OK(cache.fork(known.id, kept, child.id));
          child.mirror.truncate(kept);
          sequences.push_back(child);
          look_back(cache, sequences.back(), dice);
          break;
        }
        case 1: {  // rejected drafts
          const std::size_t dropped = std::min(length, dice.roll(config.rollback_tokens + 1));
          ASSERT_OK(cache.truncate(known.id, length - dropped));
          known.mirror.truncate(length - dropped);
          ++shallow;
          break;
        }
        case 2: {  // back to anywhere
          if (dice.roll(3) != 0) break;
          const std::size_t kept = dice.roll(length + 1);
          ASSERT_OK(cache.truncate(known.id, kept));
          known.mirror.truncate(kept);
          ++deep;
          break;
        }
        case 3: {
          ASSERT_OK(cache.seal(known.id));
          known.mirror.seal();
          known.mirror.learn(cache, known.id);
          break;
        }
        case 4: {  // anything: codes, raw rows, first tokens
          const std::size_t begin = dice.roll(length + 1), end = begin + dice.roll(length - begin + 1);
          traceless += known.mirror.is_traceless(begin, length - (end - begin)) ? 1 : 0;
          ASSERT_OK(cache.erase(known.id, begin, end));
          if (begin < end) known.mirror.erase(begin, end);
          known.mirror.learn(cache, known.id);
          ++erased;
          break;
        }
        case 9: {  // some of the drafts at the end
          const std::size_t most = std::min({config.recent_tokens, config.rollback_tokens, std::size_t{20}});
          if (most == 0) break;
          append(cache, known, dice, 1 + dice.roll(most));
          const std::size_t begin = length;
          std::vector<std::uint32_t> tokens;
          for (std::uint32_t i = 0; begin + i < known.mirror.length(); ++i)
            if (dice.roll(2) == 0) tokens.push_back(i);
          ASSERT_OK(cache.keep(known.id, begin, tokens));
          known.mirror.keep(begin, tokens);
          known.mirror.learn(cache, known.id);
          ++branches;
          break;
        }
        case 5: {
          if (dice.roll(4) != 0) break;
          cache.release(known.id);
          EXPECT_EQ(cache.length(known.id), 0U);
          sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(index));
          continue;
        }
        case 6:
          ASSERT_OK(cache.reserve(known.id, dice.roll(100)));
          break;
        case 7:
        case 8:
          append(cache, known, dice, 1 + dice.roll(80));
          break;
        default:
          append(cache, known, dice, 1 + dice.roll(6));
          break;
      }
      Known& after = sequences[index];
      ASSERT_EQ(cache.length(after.id), after.mirror.length());
      look_back(cache, after, dice);
    }
    // Nobody has disturbed anybody.
    for (Known& known : sequences) look_back(cache, known, dice);
    for (const Known& known : sequences) cache.release(known.id);
    EXPECT_EQ(cache.memory().page_bytes, 0U);
    EXPECT_EQ(cache.memory().tail_bytes, 0U);
  }
  EXPECT_GT(deep, 10U);
  EXPECT_GT(shallow, 50U);
  EXPECT_GT(erased, 50U);
  EXPECT_GT(traceless, 10U);
  EXPECT_LT(traceless + 10, erased);
  EXPECT_GT(branches, 50U);
}

}  // namespace
