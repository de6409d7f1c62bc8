// A cache with sequences in which every allocation fails in its turn, and what must be the same afterwards. Replaces
// operator new: for one source of a program.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "attention/thread_pool.hpp"
#include "cache/audit.hpp"
#include "cache/block.hpp"
#include "cache/replaced_new.hpp"

// ---- operator new of this whole program: counts what is alive, and fails on demand

namespace {

constexpr std::size_t kNever = static_cast<std::size_t>(-1);

struct Injector {
  std::atomic<std::size_t> left{kNever};  // allocations until the one that fails; kNever: none does
  std::atomic<bool> all_later{false};     // ... and all behind it
  std::atomic<std::size_t> hits{0}, alive{0};

  bool refuses() {
    if (left.load() == kNever) return false;
    if (left.load() == 0) {
      ++hits;
      if (!all_later.load()) left = kNever;
      return true;
    }
    --left;
    return false;
  }
};
Injector injector;

}  // namespace

void* tests::take_block(std::size_t bytes, std::size_t alignment) noexcept {
  if (injector.refuses()) return nullptr;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0) return nullptr;
  ++injector.alive;
  return memory;
}
void tests::give_block(void* memory) noexcept {
  if (memory != nullptr) --injector.alive;
  std::free(memory);
}

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::MemoryUse;
using turboquant::SequenceId;
using turboquant::Status;
using turboquant::detail::CacheAccess;

using Cache = KVCache<turboquant::TQ4, turboquant::TQ8>;

// Three layers of two formats, so that blocks of four sizes are in play.
CacheConfig three_layers() {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 1, .head_dim = 32},
                   LayerShape{.kv_heads = 2, .head_dim = 32, .value_dim = 64, .format = 1},
                   LayerShape{.kv_heads = 1, .head_dim = 32}};
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  config.first_tokens = 5;
  return config;
}

Block rows_of(const LayerShape& shape, bool keys, std::uint64_t stream, std::size_t begin, std::size_t end) {
  const std::size_t dim = keys || shape.value_dim == 0 ? shape.head_dim : shape.value_dim;
  return gaussian_block(stream + (keys ? 0 : 1000), end - begin, shape.kv_heads, dim, 1, begin);
}

/// All sequences as they can be seen from outside.
struct Seen {
  std::vector<std::size_t> lengths;
  std::vector<float> numbers;
  std::size_t page_bytes = 0, tail_bytes = 0;

  bool same_results(const Seen& other) const { return lengths == other.lengths && same_bits(numbers, other.numbers); }
  bool same_bytes(const Seen& other) const { return page_bytes == other.page_bytes && tail_bytes == other.tail_bytes; }
};

/// A cache with four sequences: two that share pages and tiles, one that ends with a page, one with a page in work.
class World {
 public:
  explicit World(const CacheConfig& config) : cache(std::make_unique<Cache>(config)) {
    auto& pool = CacheAccess::core(*cache).pool();
    // Blocks with which a test fills the pool, before any sequence learns how many classes there are.
    EXPECT_TRUE(pool.add_class(16384 - 64, turboquant::detail::BlockUse::tile, large_));
    EXPECT_TRUE(pool.add_class(64, turboquant::detail::BlockUse::tile, small_));
    ids.resize(3);
    for (SequenceId& id : ids) EXPECT_OK(cache->create_sequence(id));
    append(ids[0], 1, 0, 75);
    append(ids[1], 2, 0, 5 + 3 * 16);
    append(ids[2], 3, 0, 62);
    SequenceId fork;
    EXPECT_OK(cache->fork(ids[0], 75, fork));
    ids.push_back(fork);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World() {
    let_go();
    EXPECT_TRUE(is_balanced(*cache, ids));
    for (const SequenceId id : ids) cache->release(id);
    EXPECT_EQ(cache->memory().page_bytes, 0U);
    EXPECT_EQ(cache->memory().tail_bytes, 0U);
  }

  void append(SequenceId id, std::uint64_t stream, std::size_t begin, std::size_t end) {
    for (std::size_t l = 0; l < cache->config().layers.size(); ++l) {
      const LayerShape& shape = cache->config().layers[l];
      EXPECT_OK(append_only(*cache, l, id, rows_of(shape, true, stream, begin, end),
                            rows_of(shape, false, stream, begin, end)));
    }
  }

  /// `old_positions`: attention at positions long past too, which read codes where raw rows are gone.
  Seen look(bool old_positions = true) {
    Seen seen;
    const MemoryUse use = cache->memory();
    seen.page_bytes = use.page_bytes;
    seen.tail_bytes = use.tail_bytes;
    for (const SequenceId id : ids) {
      const turboquant::detail::Sequence* sequence = CacheAccess::core(*cache).find(id);
      for (std::size_t l = 0; l < cache->config().layers.size(); ++l) {
        const LayerShape& shape = cache->config().layers[l];
        const std::size_t length = sequence->layers[l].length;
        seen.lengths.push_back(length);
        Block keys, values;
        EXPECT_OK(read_rows(*cache, id, l, 0, length, keys, values));
        add(seen, keys.numbers);
        add(seen, values.numbers);
        if (length == 0) continue;
        for (const std::size_t position : {length - 1, length / 2}) {
          if (position != length - 1 && !old_positions) continue;
          CallOptions options;
          options.position = position;
          const Block query = gaussian_block(99, 1, 2 * shape.kv_heads, shape.head_dim);
          const Outcome outcome = attend_only(*cache, l, id, query, options);
          EXPECT_OK(outcome.status);
          add(seen, outcome.out.numbers);
          add(seen, outcome.lse);
        }
      }
    }
    return seen;
  }

  /// Takes blocks until no slab has a free one: the next page, and the next tile, need memory of the source.
  void fill_slabs() {
    auto& core = CacheAccess::core(*cache);
    for (std::size_t l = 0; l < core.layer_count(); ++l)
      for (const unsigned size_class : {core.layer(l).page_class, core.layer(l).tile_class}) {
        for (;;) {
          turboquant::detail::Block* block = core.pool().acquire(size_class);
          ASSERT_NE(block, nullptr);
          taken_.push_back(block);
          const bool pages = size_class == core.layer(l).page_class;
          const std::size_t bytes = pages ? core.layer(l).page.bytes : core.layer(l).tile_bytes();
          (pages ? foreign_pages : foreign_tiles) += (bytes + 63) / 64 * 64;
          if (block->slab->free == nullptr) break;
        }
      }
  }

  /// Takes blocks until `left` bytes, rounded up to 64, may be had under max_bytes.
  void leave(std::size_t left) {
    auto& pool = CacheAccess::core(*cache).pool();
    const MemoryUse use = cache->memory();
    std::size_t free = cache->config().max_bytes - use.page_bytes - use.tail_bytes;
    for (const auto& [size_class, bytes] : {std::pair{large_, std::size_t{16384 - 64}}, {small_, std::size_t{64}}})
      while (free >= left + bytes) {
        taken_.push_back(pool.acquire(size_class));
        ASSERT_NE(taken_.back(), nullptr);
        foreign_tiles += bytes;
        free -= bytes;
      }
  }

  void let_go() {
    for (turboquant::detail::Block* block : taken_) CacheAccess::core(*cache).pool().release(block);
    taken_.clear();
    foreign_pages = foreign_tiles = 0;
  }

  std::unique_ptr<Cache> cache;
  std::vector<SequenceId> ids;
  std::size_t foreign_pages = 0, foreign_tiles = 0;

 private:
  static void add(Seen& seen, const std::vector<float>& numbers) {
    seen.numbers.insert(seen.numbers.end(), numbers.begin(), numbers.end());
  }

  std::vector<turboquant::detail::Block*> taken_;
  unsigned large_ = 0, small_ = 0;
};

/// One call with its buffers ready, what it wrote, and what is to be done when it has succeeded.
struct Call {
  std::function<Status()> run;
  std::vector<std::shared_ptr<Block>> blocks;  // kept alive; those in `outputs` are compared
  std::vector<std::shared_ptr<Block>> outputs;
  std::function<void()> afterwards = [] {};
};

struct Operation {
  std::string name;
  std::function<void(World&)> before = [](World&) {};
  std::function<Call(World&)> make;
  bool may_do_without = false;  // a table that cannot grow costs work later, not the call
};

// How allocations fail: the n-th only, all from the n-th on, or blocks beyond so many steps of bytes.
enum class Failing { one, all_later, limit };
constexpr std::size_t kStep = 512;  // bytes; every block is larger

CacheConfig limited(CacheConfig config, Failing failing = Failing::limit) {
  config.max_bytes = failing == Failing::limit ? std::size_t{1} << 21 : 0;
  return config;
}

Status attempt(World& world, const Call& call, Failing failing, std::size_t n, bool& hit) {
  if (failing == Failing::limit) {
    world.leave(n * kStep);
    const Status status = call.run();
    hit = !(status == Status::ok);
    return status;
  }
  injector.hits = 0;
  injector.all_later = failing == Failing::all_later;
  injector.left = n;
  const Status status = call.run();
  injector.left = kNever;
  hit = injector.hits.load() != 0;
  return status;
}

bool same_outputs(const Call& a, const Call& b) {
  for (std::size_t i = 0; i < a.outputs.size(); ++i)
    if (!same_bits(*a.outputs[i], *b.outputs[i])) return false;
  return a.outputs.size() == b.outputs.size();
}

/// Runs the operation with a failure at every point there is. Returns how many calls were refused.
std::size_t check(const Operation& operation, const CacheConfig& config = three_layers()) {
  std::size_t refused = 0;
  { SCOPED_TRACE("GoogleTest makes room for its traces at the first of them"); }
  const std::size_t alive = injector.alive.load();
  {
    World twin(config);
    operation.before(twin);
    const Call wanted = operation.make(twin);
    EXPECT_OK(wanted.run());
    wanted.afterwards();
    const Seen twin_after = twin.look();
    for (const SequenceId id : twin.ids) twin.append(id, 7, 75, 110);
    const Seen twin_later = twin.look();

    for (const Failing failing : {Failing::one, Failing::all_later, Failing::limit}) {
      std::unique_ptr<World> world;
      Seen before;
      for (std::size_t n = 0;; ++n) {
        SCOPED_TRACE(testing::Message() << operation.name << ", failing " << static_cast<int>(failing) << " at " << n);
        EXPECT_LT(n, 2000U) << "it never succeeds";
        if (testing::Test::HasFailure() || n >= 2000) return refused;
        if (world == nullptr) {
          world = std::make_unique<World>(limited(config, failing));
          operation.before(*world);
          if (failing != Failing::limit) world->fill_slabs();
          before = world->look();
        }
        const Call call = operation.make(*world);
        bool hit = false;
        const Status status = attempt(*world, call, failing, n, hit);
        if (!(status == Status::ok)) {
          ++refused;
          EXPECT_STATUS(out_of_memory, status);
          EXPECT_TRUE(is_balanced(*world->cache, world->ids, world->foreign_pages, world->foreign_tiles));
          if (failing == Failing::limit) world->let_go();
          const Seen after = world->look();
          EXPECT_TRUE(after.same_results(before)) << "the refused call can be seen";
          EXPECT_TRUE(after.same_bytes(before)) << "pages " << before.page_bytes << " -> " << after.page_bytes
                                                << ", tiles " << before.tail_bytes << " -> " << after.tail_bytes;
          continue;
        }
        world->let_go();
        call.afterwards();
        EXPECT_TRUE(same_outputs(call, wanted));
        EXPECT_TRUE(is_balanced(*world->cache, world->ids));
        const Seen after = world->look();
        EXPECT_TRUE(after.same_results(twin_after)) << "the call succeeded and did something else";
        EXPECT_TRUE(after.same_bytes(twin_after) || (hit && operation.may_do_without));
        if (!hit || failing != Failing::one) {
          for (const SequenceId id : world->ids) world->append(id, 7, 75, 110);
          EXPECT_TRUE(world->look().same_results(twin_later));
        }
        world.reset();
        if (!hit) break;
      }
    }
  }
  EXPECT_EQ(injector.alive.load(), alive) << operation.name << " leaks";
  return refused;
}

Call plain(std::function<Status()> run) {
  Call call;
  call.run = std::move(run);
  return call;
}

/// Items of a step: sequence, new tokens, queries; a tree if wanted.
struct Part {
  std::size_t sequence, begin, tokens, queries;
  const std::uint64_t* tree = nullptr;
};
Call step(World& world, std::size_t layer, const std::vector<Part>& parts, bool by_plan = false) {
  Call call;
  const LayerShape& shape = world.cache->config().layers[layer];
  auto items = std::make_shared<std::vector<BatchItem>>();
  for (const Part& part : parts) {
    const auto hold = [&call](Block block) {
      call.blocks.push_back(std::make_shared<Block>(std::move(block)));
      return call.blocks.back();
    };
    BatchItem item;
    item.sequence = world.ids[part.sequence];
    item.keys = std::as_const(*hold(rows_of(shape, true, 50, part.begin, part.begin + part.tokens))).rows();
    item.values = std::as_const(*hold(rows_of(shape, false, 50, part.begin, part.begin + part.tokens))).rows();
    item.queries = std::as_const(*hold(gaussian_block(60, part.queries, 2 * shape.kv_heads, shape.head_dim))).rows();
    const std::size_t value_dim = shape.value_dim == 0 ? shape.head_dim : shape.value_dim;
    call.outputs.push_back(hold(Block(part.queries, 2 * shape.kv_heads, value_dim, kNaN)));
    item.out = call.outputs.back()->rows();
    item.tree = part.tree;
    items->push_back(item);
  }
  if (!by_plan) {
    call.run = [&world, layer, items] { return turboquant::attend(*world.cache, layer, *items); };
    return call;
  }
  auto plan = std::make_shared<turboquant::AttentionPlan>();
  call.run = [&world, layer, items, plan] { return turboquant::plan(*world.cache, layer, *items, {}, *plan); };
  call.afterwards = [plan] { EXPECT_TRUE(run_plan(*plan, 1)); };
  return call;
}

}  // namespace
