// The bytes of pages are a function of tokens, configuration and seed: of nothing else that has happened.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention/thread_pool.hpp"
#include "cache/block.hpp"
#include "cache/counting_source.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::Format;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::PolarQuant;
using turboquant::ScalarQuant;
using turboquant::SequenceId;
using turboquant::detail::CacheAccess;

/// Numbers that decide what happens, a function of the seed.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : seed_(seed) {}
  std::size_t roll(std::size_t sides) { return static_cast<std::size_t>(oracle::hash(seed_, 815, ++count_) % sides); }

 private:
  std::uint64_t seed_, count_ = 0;
};

/// The pages of one layer, by the position of their first token: those that are read, and those that are complete and
/// wait for their time.
struct Page {
  std::size_t first = 0, count = 0;
  std::vector<unsigned char> bytes;
  bool operator==(const Page&) const = default;
};
using Pages = std::map<std::size_t, Page>;

template <class Cache>
Pages pages_of(Cache& cache, SequenceId id, std::size_t l) {
  const auto& core = CacheAccess::core(cache);
  const auto& state = core.find(id)->layers[l];
  const auto page = [&](const turboquant::detail::Block* block, std::size_t first, std::size_t count) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(block->memory);
    return Page{first, count, {bytes, bytes + core.layer(l).page.bytes}};
  };
  Pages pages;
  for (const auto& entry : state.entries) pages[entry.begin] = page(entry.page, entry.first, entry.count);
  for (std::size_t i = 0; i < state.coding.size(); ++i) {
    if (i + 1 == state.coding.size() && state.coding_work < core.layer(l).page_work()) break;
    const std::size_t tokens = core.rule().page_tokens;
    pages[state.coded_end() + i * tokens] = page(state.coding[i], 0, tokens);
  }
  return pages;
}

/// A sequence whose tokens are those of stream 1, reached on a way of its own.
template <class Cache>
class Wanderer {
 public:
  Wanderer(Cache& cache, Dice& dice, ThreadPool& pool)
      : cache_(cache), dice_(dice), pool_(pool), id_(new_sequence(cache)), other_(new_sequence(cache)) {}

  SequenceId id() const { return id_; }
  const std::map<std::string, int>& done() const { return done_; }

  void walk_to(std::size_t length) {
    while (length_ < length && !testing::Test::HasFailure()) {
      const std::size_t next = std::min(length, length_ + 1 + dice_.roll(dice_.roll(3) == 0 ? 70 : 6));
      switch (dice_.roll(8)) {
        case 0:
          draft();
          break;
        case 1:
          go_back();
          break;
        case 2:
          fork();
          break;
        case 3:
          drop_plan();
          break;
        case 4:
          ++done_["reserve"];
          ASSERT_OK(cache_.reserve(id_, dice_.roll(90)));
          break;
        case 5:
          keep_some();
          break;
        default:
          break;
      }
      for (std::size_t l = 0; l < layers(); ++l) {
        std::size_t at = length_;
        while (at < next) {
          const std::size_t end = std::min(next, at + 1 + dice_.roll(next - length_));
          append(id_, l, 1, at, end);
          at = end;
        }
      }
      length_ = next;
      longest_ = std::max(longest_, length_);
    }
  }

 private:
  std::size_t layers() const { return cache_.config().layers.size(); }
  std::size_t rollback() const { return cache_.config().rollback_tokens; }
  std::size_t lowest() const { return longest_ > rollback() ? longest_ - rollback() : 0; }

  struct Rows {
    Block keys, values, queries, out;
  };
  Rows rows(std::size_t l, std::uint64_t stream, std::size_t begin, std::size_t end, std::size_t queries) {
    const LayerShape& shape = cache_.config().layers[l];
    const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
    return {gaussian_block(stream, end - begin, shape.kv_heads, shape.head_dim, 1, begin),
            gaussian_block(stream + 1000, end - begin, shape.kv_heads, value_dim, 1, begin),
            gaussian_block(stream + 2000, queries, shape.kv_heads, shape.head_dim, 1, begin),
            Block(queries, shape.kv_heads, value_dim)};
  }
  static BatchItem item(SequenceId id, Rows& rows) {
    BatchItem item;
    item.sequence = id;
    item.keys = std::as_const(rows.keys).rows();
    item.values = std::as_const(rows.values).rows();
    item.queries = std::as_const(rows.queries).rows();
    item.out = rows.out.rows();
    return item;
  }

  // Alone or beside another sequence, with queries or without, serial, on threads, or as a plan.
  void append(SequenceId id, std::size_t l, std::uint64_t stream, std::size_t begin, std::size_t end) {
    Rows mine = rows(l, stream, begin, end, dice_.roll(2) == 0 ? 0 : 1), beside = rows(l, 77, begin, end, 1);
    std::vector<BatchItem> items{item(id, mine)};
    if (dice_.roll(4) == 0) items.insert(items.begin() + (dice_.roll(2) == 0 ? 0 : 1), item(other_, beside));
    switch (dice_.roll(3)) {
      case 0:
        ASSERT_OK(turboquant::attend(cache_, l, items));
        break;
      case 1:
        ++done_["threads"];
        ASSERT_OK(turboquant::attend(cache_, l, items, {}, pool_));
        break;
      default: {
        turboquant::AttentionPlan plan;
        ASSERT_OK(turboquant::plan(cache_, l, items, {}, plan));
        EXPECT_TRUE(run_plan(plan, 1 + dice_.roll(2)));
      }
    }
  }
  void append_all(SequenceId id, std::uint64_t stream, std::size_t begin, std::size_t end) {
    for (std::size_t l = 0; l < layers(); ++l) append(id, l, stream, begin, end);
  }

  // Other tokens come and go.
  void draft() {
    if (rollback() == 0) return;
    ++done_["draft"];
    const std::size_t count = 1 + dice_.roll(rollback());
    append_all(id_, 50 + dice_.roll(5), length_, length_ + count);
    longest_ = std::max(longest_, length_ + count);
    ASSERT_OK(cache_.truncate(id_, length_));
  }
  void go_back() {
    if (lowest() >= length_) return;
    ++done_["back"];
    length_ = lowest() + dice_.roll(length_ - lowest());
    ASSERT_OK(cache_.truncate(id_, length_));
  }
  // The walk goes on in a child, or in the source beside a child; the other one gets other tokens.
  void fork() {
    ++done_["fork"];
    SequenceId child;
    ASSERT_OK(cache_.fork(id_, length_, child));
    if (dice_.roll(2) == 0) std::swap(child, id_);
    append_all(child, 60, length_, length_ + 1 + dice_.roll(40));
    if (dice_.roll(2) == 0) cache_.release(child);
  }
  // Some tasks of a plan for other tokens run; nothing of it happens.
  void drop_plan() {
    ++done_["dropped"];
    const std::size_t l = dice_.roll(layers());
    Rows mine = rows(l, 70, length_, length_ + 1 + dice_.roll(100), 1);
    const BatchItem one = item(id_, mine);
    turboquant::AttentionPlan plan;
    ASSERT_OK(turboquant::plan(cache_, l, std::span(&one, 1), {}, plan));
    const Workspace workspace(plan.workspace_bytes());
    for (std::size_t phase = 0; phase + 1 < plan.phases(); ++phase) {
      const std::size_t tasks = plan.tasks(phase), run = dice_.roll(2) == 0 ? tasks : dice_.roll(tasks + 1);
      for (std::size_t task = 0; task < run; ++task) plan.run(phase, tasks - 1 - task, workspace.get());
      if (run < tasks) break;
    }
  }
  // Drafts of which every other one is right.
  void keep_some() {
    const std::size_t most = std::min({rollback(), cache_.config().recent_tokens, std::size_t{20}}) / 2;
    if (most == 0 || length_ + 2 * most < lowest()) return;
    ++done_["keep"];
    const std::size_t right = 1 + dice_.roll(most);
    std::vector<std::uint32_t> kept;
    for (std::size_t i = 0; i < right; ++i) {
      append_all(id_, 51, length_ + i, length_ + i + 1);
      append_all(id_, 1, length_ + i, length_ + i + 1);
      kept.push_back(static_cast<std::uint32_t>(2 * i + 1));
    }
    longest_ = std::max(longest_, length_ + 2 * right);
    ASSERT_OK(cache_.keep(id_, length_, kept));
    length_ += right;
  }

  Cache& cache_;
  Dice& dice_;
  ThreadPool& pool_;
  SequenceId id_, other_;
  std::size_t length_ = 0, longest_ = 0;
  std::map<std::string, int> done_;
};

CacheConfig config_of(std::uint64_t seed) {
  constexpr std::array<std::uint8_t, 3> kCenters{8, 0, 16};
  constexpr std::array<std::uint32_t, 3> kDims{32, 64, 96};
  CacheConfig config;
  config.layers = {
      LayerShape{
          .kv_heads = 1 + static_cast<std::uint32_t>(seed % 2), .head_dim = 32, .center_bits = kCenters[seed % 3]},
      LayerShape{.head_dim = kDims[seed % 3], .value_dim = 32, .window = 90, .center_bits = kCenters[(seed + 1) % 3]}};
  config.page_tokens = seed % 2 == 0 ? 16 : 48;
  config.recent_tokens = std::array<std::size_t, 4>{16, 0, 37, 64}[seed % 4];
  config.rollback_tokens = std::array<std::size_t, 4>{8, 3, 0, 32}[seed / 2 % 4];
  config.first_tokens = seed % 5 == 0 ? 0 : seed % 5 + 2;
  config.seed = 1000 + seed;
  return config;
}

/// Pages of `found` that the straight way has too are equal, none that it holds is missing.
void expect_same_pages(const Pages& found, const Pages& straight, std::size_t coded, std::size_t held,
                       std::size_t& compared) {
  for (const auto& [begin, page] : straight) {
    const auto at = found.find(begin);
    if (at == found.end()) {
      ASSERT_FALSE(begin >= held && begin < coded) << "no page at " << begin;
      continue;
    }
    ++compared;
    ASSERT_EQ(at->second.count, page.count) << begin;
    ASSERT_TRUE(at->second == page) << "the page at " << begin << " has other bytes";
  }
  for (const auto& [begin, page] : found)
    EXPECT_TRUE(begin >= coded || straight.contains(begin)) << "an unknown page at " << begin;
}

template <class F>
void run_format() {
  using Cache = KVCache<F>;
  ThreadPool pool(3);
  std::map<std::string, int> done;
  std::size_t compared = 0;
  for (std::uint64_t seed = 0; seed < 12 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Dice dice(seed);
    const std::size_t length = 150 + dice.roll(120);
    // What blocks hold before they are written differs too.
    CountingSource ones(0xff), zeros(0x00);
    CacheConfig config = config_of(seed);
    config.memory = ones.source();
    Cache straight(config);
    const SequenceId id = new_sequence(straight);
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const LayerShape& shape = config.layers[l];
      const std::size_t value_dim = shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
      ASSERT_OK(append_only(straight, l, id, gaussian_block(1, length, shape.kv_heads, shape.head_dim),
                            gaussian_block(1001, length, shape.kv_heads, value_dim)));
    }
    config.memory = zeros.source();
    Cache cache(config);
    Wanderer<Cache> wanderer(cache, dice, pool);
    wanderer.walk_to(length);
    ASSERT_EQ(cache.length(wanderer.id()), length);
    for (const auto& [name, count] : wanderer.done()) done[name] += count;
    for (const bool sealed : {false, true}) {
      if (sealed) {
        ASSERT_OK(straight.seal(id));
        ASSERT_OK(cache.seal(wanderer.id()));
      }
      for (std::size_t l = 0; l < config.layers.size(); ++l) {
        SCOPED_TRACE(testing::Message() << "layer " << l << (sealed ? ", sealed" : ""));
        const auto& state = CacheAccess::core(cache).find(wanderer.id())->layers[l];
        const auto& wanted = CacheAccess::core(straight).find(id)->layers[l];
        ASSERT_EQ(state.coded_end(), wanted.coded_end());
        expect_same_pages(pages_of(cache, wanderer.id(), l), pages_of(straight, id, l), wanted.coded_end(),
                          state.held_begin, compared);
      }
    }
  }
  for (const char* name : {"draft", "back", "fork", "dropped", "reserve", "keep", "threads"})
    EXPECT_GT(done[name], 5) << name;
  EXPECT_GT(compared, 200U);
}

TEST(PageBytes, Tq2) { run_format<turboquant::TQ2>(); }
TEST(PageBytes, Tq3) { run_format<turboquant::TQ3>(); }
TEST(PageBytes, Tq4) { run_format<turboquant::TQ4>(); }
TEST(PageBytes, Tq8) { run_format<turboquant::TQ8>(); }
TEST(PageBytes, PolarKeysAndScalarValues) { run_format<Format<PolarQuant<3>, ScalarQuant<4>>>(); }

// The comparison sees what it should: another seed, one other token.
TEST(PageBytes, DependOnSeedAndTokens) {
  const auto pages = [](std::uint64_t seed, float first) {
    CacheConfig config;
    config.layers = {LayerShape{.head_dim = 32}};
    config.page_tokens = 16;
    config.recent_tokens = 0;
    config.seed = seed;
    KVCache<turboquant::TQ4> cache(config);
    const SequenceId id = new_sequence(cache);
    Block keys = gaussian_block(1, 48, 1, 32);
    keys.row(20)[0] = first;
    EXPECT_OK(append_only(cache, 0, id, keys, gaussian_block(2, 48, 1, 32)));
    return pages_of(cache, id, 0);
  };
  const Pages a = pages(1, 0.5F), b = pages(1, 0.5F), c = pages(2, 0.5F), d = pages(1, 4.0F);
  ASSERT_EQ(a.size(), 3U);
  EXPECT_TRUE(a == b);
  for (const auto& [begin, page] : a) {
    EXPECT_FALSE(c.at(begin) == page);
    EXPECT_EQ(d.at(begin) == page, begin != 16) << begin;
  }
}

}  // namespace
