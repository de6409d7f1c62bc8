// An allocation that fails, whichever it is, leaves everything as it was, and the next try is as if nothing had been.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/counting_source.hpp"
#include "cache/failing_world.hpp"
#include "cache/sanitized.hpp"

namespace {

TEST(Transactions, CreateSequence) {
  const Operation create{.name = "create", .make = [](World& world) {
                           auto id = std::make_shared<SequenceId>();
                           Call call = plain([&world, id] { return world.cache->create_sequence(*id); });
                           call.afterwards = [&world, id] { world.ids.push_back(*id); };
                           return call;
                         }};
  EXPECT_GE(check(create), 3U);
  // The 17th sequence needs a larger table.
  Operation seventeenth = create;
  seventeenth.before = [](World& world) {
    while (world.ids.size() < 16) world.ids.push_back(new_sequence(*world.cache));
  };
  EXPECT_GE(check(seventeenth), 6U);
}

TEST(Transactions, Fork) {
  for (const auto& [sequence, length] : {std::pair<std::size_t, std::size_t>{0, 75},
                                         {0, 53},
                                         {0, 3},
                                         {0, 0},
                                         {1, 53},  // the last page is finished and not begun
                                         {1, 37},
                                         {2, 62},  // a page in work
                                         {2, 60}}) {
    SCOPED_TRACE(testing::Message() << "sequence " << sequence << " up to " << length);
    const Operation fork{
        .name = "fork", .make = [source = sequence, kept = length](World& world) {
          auto id = std::make_shared<SequenceId>();
          Call call = plain([&world, id, source, kept] { return world.cache->fork(world.ids[source], kept, *id); });
          call.afterwards = [&world, id] { world.ids.push_back(*id); };
          return call;
        }};
    EXPECT_GE(check(fork), 10U);
  }
}

// A page goes back among those coded ahead, where others lie already. Without room for it none of them may stay.
TEST(Transactions, ForkWithSeveralPagesCodedAhead) {
  CacheConfig config = three_layers();
  config.recent_tokens = 40;
  const Operation fork{.name = "fork",
                       .before = [](World& world) { world.append(world.ids[3], 8, 75, 78); },
                       .make =
                           [](World& world) {
                             auto id = std::make_shared<SequenceId>();
                             Call call = plain([&world, id] { return world.cache->fork(world.ids[3], 75, *id); });
                             call.afterwards = [&world, id] { world.ids.push_back(*id); };
                             return call;
                           },
                       .may_do_without = true};
  EXPECT_GE(check(fork, config), 10U);
}

TEST(Transactions, Truncate) {
  for (const std::size_t sequence : {0U, 1U, 2U})
    for (const std::size_t length : {51U, 48U, 45U, 37U, 20U, 4U, 0U}) {
      const Operation truncate{
          .name = "truncate to " + std::to_string(length),
          .make =
              [=](World& world) {
                return plain([=, &world] { return world.cache->truncate(world.ids[sequence], length); });
              },
          .may_do_without = true};
      EXPECT_EQ(check(truncate), 0U) << "a table that cannot grow is no reason to refuse";
    }
}

TEST(Transactions, Erase) {
  std::size_t refused = 0;
  for (const std::size_t sequence : {0U, 2U})
    for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{25, 30},  // splits an entry
                                     {21, 37},                                     // a whole one
                                     {10, 50},
                                     {58, 60},  // raw rows
                                     {40, 60},  // codes and raw rows
                                     {1, 3},    // first tokens
                                     {0, 61},
                                     {3, 8},
                                     {50, 62}}) {
      const Operation erase{
          .name = "erase " + std::to_string(begin) + " to " + std::to_string(end),
          .make =
              [=, from = begin, to = end](World& world) {
                return plain([=, &world] { return world.cache->erase(world.ids[sequence], from, to); });
              },
          .may_do_without = true};
      refused += check(erase);
    }
  EXPECT_GT(refused, 50U);
}

TEST(Transactions, Keep) {
  for (const std::size_t sequence : {0U, 2U}) {
    const Operation keep{.name = "keep",
                         .make =
                             [=](World& world) {
                               const std::size_t length = sequence == 0 ? 75 : 62;
                               return plain([=, &world] {
                                 static constexpr std::uint32_t kTokens[] = {0, 2, 5};
                                 return world.cache->keep(world.ids[sequence], length - 7, kTokens);
                               });
                             },
                         .may_do_without = true};
    const std::size_t refused = check(keep);
    if (sequence == 0) {
      EXPECT_GE(refused, 6U);  // its tiles are shared
    } else {
      EXPECT_EQ(refused, 0U);
    }
  }
}

TEST(Transactions, Reserve) {
  for (const std::size_t tokens : {1U, 40U, 150U}) {
    for (const bool again : {false, true}) {
      Operation reserve{.name = "reserve " + std::to_string(tokens), .make = [=](World& world) {
                          return plain([=, &world] { return world.cache->reserve(world.ids[0], tokens); });
                        }};
      if (again) reserve.before = [](World& world) { ASSERT_OK(world.cache->reserve(world.ids[0], 20)); };
      EXPECT_GE(check(reserve), again && tokens == 1 ? 1U : 10U);
    }
  }
}

TEST(Transactions, Seal) {
  for (const std::size_t sequence : {0U, 1U, 2U}) {
    const Operation seal{.name = "seal", .make = [=](World& world) {
                           return plain([=, &world] { return world.cache->seal(world.ids[sequence]); });
                         }};
    EXPECT_GE(check(seal), 5U) << sequence;
  }
}

TEST(Transactions, AttendAndPlan) {
  for (const bool by_plan : {false, true})
    for (std::size_t layer = 0; layer < 3; ++layer) {
      if (tests::kSanitized && by_plan == (layer == 0)) continue;  // each way and each layer once
      const std::uint64_t tree[] = {1, 3, 5, 11};
      const std::vector<std::vector<Part>> steps{
          {{0, 75, 70, 3}},                                               // a prompt
          {{0, 75, 1, 1}},                                                // one token, the tile is shared
          {{1, 53, 1, 1}},                                                // one token, a new page begins
          {{0, 75, 20, 2}, {1, 53, 2, 2}, {2, 62, 40, 0}, {3, 0, 0, 3}},  // a batch
          {{0, 75, 4, 4, tree}},
          {{2, 0, 0, 60}},  // attend only
      };
      for (const std::vector<Part>& parts : steps) {
        const Operation attend{.name = "step", .make = [&, by_plan, layer](World& world) {
                                 Call call = step(world, layer, parts, by_plan);
                                 // The other layers follow, so that lengths are equal again.
                                 call.afterwards = [&world, layer, &parts, then = call.afterwards] {
                                   then();
                                   for (std::size_t l = 0; l < 3; ++l)
                                     if (l != layer) EXPECT_OK(step(world, l, parts).run());
                                 };
                                 return call;
                               }};
        EXPECT_GE(check(attend), parts[0].tokens == 0 ? 2U : 6U);
      }
    }
}

TEST(Transactions, Logits) {
  bool has_memory = false;  // left by the calls before
  const Operation logits{.name = "logits", .make = [&has_memory](World& world) {
                           if (!has_memory) delete CacheAccess::core(*world.cache).spare().take();
                           Call call;
                           call.blocks.push_back(std::make_shared<Block>(gaussian_block(3, 2, 4, 32)));
                           call.outputs.push_back(std::make_shared<Block>(8, 1, 75, kNaN));
                           call.run = [&world, queries = call.blocks[0], out = call.outputs[0]] {
                             return turboquant::logits(*world.cache, world.ids[0], 1, std::as_const(*queries).rows(),
                                                       out->numbers.data());
                           };
                           return call;
                         }};
  EXPECT_EQ(check(logits), 4U) << "the workspace and who owns it, once in each kind of failure";
  has_memory = true;
  EXPECT_EQ(check(logits), 0U);
}

TEST(Transactions, ReadAllocatesNothing) {
  const Operation read{
      .name = "read", .make = [](World& world) {
        Call call;
        call.outputs = {std::make_shared<Block>(75, 2, 32, kNaN), std::make_shared<Block>(75, 2, 64, kNaN)};
        call.run = [&world, outputs = call.outputs] {
          return world.cache->read(world.ids[0], 1, 0, outputs[0]->rows(), outputs[1]->rows());
        };
        return call;
      }};
  EXPECT_EQ(check(read), 0U);
}

// A plan that is used again keeps what it has; a failure then still leaves nothing behind.
TEST(Transactions, APlanUsedAgain) {
  auto plan = std::make_shared<turboquant::AttentionPlan>();
  World world(three_layers());
  Call first = step(world, 0, {{0, 75, 1, 1}});
  const LayerShape& shape = world.cache->config().layers[0];
  const Block keys = rows_of(shape, true, 50, 75, 175), values = rows_of(shape, false, 50, 75, 175);
  BatchItem item;
  item.sequence = world.ids[0];
  item.keys = keys.rows();
  item.values = values.rows();
  const std::span<const BatchItem> batch(&item, 1);
  ASSERT_OK(turboquant::plan(*world.cache, 0, batch, {}, *plan));
  *plan = turboquant::AttentionPlan();
  const Seen before = world.look();
  std::size_t refused = 0;
  for (std::size_t n = 0;; ++n) {
    injector.left = n;
    const Status status = turboquant::plan(*world.cache, 0, batch, {}, *plan);
    injector.left = kNever;
    if (status == Status::ok) break;
    ++refused;
    ASSERT_STREQ(turboquant::to_string(status.code), turboquant::to_string(Status::out_of_memory));
    EXPECT_EQ(plan->phases(), 0U);
    EXPECT_EQ(plan->workspace_bytes(), 0U);
    ASSERT_TRUE(is_balanced(*world.cache, world.ids));
    ASSERT_TRUE(world.look().same_results(before));
  }
  EXPECT_GT(refused, 0U);
  // While it is pending its blocks belong to nobody else; dropped, they come back.
  EXPECT_FALSE(is_balanced(*world.cache, world.ids));
  *plan = turboquant::AttentionPlan();
  EXPECT_TRUE(is_balanced(*world.cache, world.ids));
  EXPECT_TRUE(world.look().same_results(before));
}

// F09: a step over four layers, exhausted at any point. The layers that it reached are taken back exactly.
TEST(Transactions, F09_AStepThatFailsBetweenLayersIsTakenBack) {
  CacheConfig config;
  config.layers.assign(4, LayerShape{.kv_heads = 1, .head_dim = 32});
  config.page_tokens = config.recent_tokens = 16;
  config.rollback_tokens = 48;  // the three pages that a step brings
  World twin(config);
  const auto run = [](const std::vector<Call>& calls) {
    for (const Call& call : calls)
      if (const Status status = call.run(); !(status == Status::ok)) return status;
    return Status();
  };
  const auto make = [](World& world) {
    std::vector<Call> calls;
    for (std::size_t l = 0; l < 4; ++l) calls.push_back(step(world, l, {{0, 75, 48, 2}}));
    return calls;
  };
  std::vector<Call> wanted = make(twin);
  ASSERT_OK(run(wanted));
  const Seen twin_after = twin.look(false);
  for (const Failing failing : {Failing::one, Failing::all_later, Failing::limit}) {
    World world(limited(config, failing));
    if (failing != Failing::limit) world.fill_slabs();
    const Seen before = world.look(false);
    std::size_t half_way = 0;
    for (std::size_t n = 0;; ++n) {
      SCOPED_TRACE(testing::Message() << "failing " << static_cast<int>(failing) << " at " << n);
      ASSERT_LT(n, 2000U);
      std::vector<Call> calls = make(world);
      Call all = plain([&] { return run(calls); });
      bool hit = false;
      const Status status = attempt(world, all, failing, n, hit);
      if (failing == Failing::limit) world.let_go();
      if (status == Status::ok) {
        for (std::size_t l = 0; l < 4; ++l) EXPECT_TRUE(same_outputs(calls[l], wanted[l]));
        EXPECT_TRUE(world.look(false).same_results(twin_after));
        break;
      }
      ASSERT_EQ(status.code, Status::out_of_memory);
      ASSERT_EQ(world.cache->length(world.ids[0]), 75U) << "every layer counts";
      const turboquant::detail::Sequence* sequence = CacheAccess::core(*world.cache).find(world.ids[0]);
      half_way += sequence->layers[0].length > 75 ? 1 : 0;
      ASSERT_OK(world.cache->truncate(world.ids[0], 75));
      ASSERT_TRUE(world.look(false).same_results(before));
      ASSERT_TRUE(is_balanced(*world.cache, world.ids, world.foreign_pages, world.foreign_tiles));
    }
    EXPECT_GT(half_way, 1U);
  }
}

// reserve is the other way out: what it promises it promises for all layers, or for none.
TEST(Transactions, F09_ReserveCoversAllLayers) {
  const CacheConfig config = limited(three_layers());
  for (std::size_t left = 0;; left += 4096) {
    World world(config);
    world.leave(left);
    const bool granted = world.cache->reserve(world.ids[0], 100) == Status::ok;
    world.let_go();
    world.leave(0);
    std::size_t appended = 0;
    for (std::size_t l = 0; l < 3; ++l) appended += step(world, l, {{0, 75, 100, 1}}).run() == Status::ok ? 1 : 0;
    if (granted) {
      EXPECT_EQ(appended, 3U) << left;
      break;
    }
    EXPECT_EQ(appended, 0U) << left;
    ASSERT_LT(left, config.max_bytes);
  }
}

// max_bytes counts pages and tails together, and exhaustion is a normal event.
TEST(Transactions, LimitCountsPagesAndTailsTogetherAndTheEngineGoesOn) {
  CacheConfig config = three_layers();
  config.max_bytes = 120000;
  CountingSource memory;
  config.memory = memory.source();
  std::size_t refusals = 0;
  {
    Cache cache(config), free_cache([&] {
      CacheConfig unlimited = config;
      unlimited.max_bytes = 0;
      return unlimited;
    }());
    std::vector<std::pair<SequenceId, std::size_t>> running;  // and its length
    std::vector<SequenceId> twins;
    std::uint64_t state = 5;
    for (int round = 0; round < 400; ++round) {
      state = oracle::hash(state, 1, 2);
      if (running.size() < 4) {
        running.emplace_back(new_sequence(cache), 0);
        twins.push_back(new_sequence(free_cache));
      }
      const std::size_t who = state % running.size(), count = 1 + (state >> 8) % 9;
      auto& [id, length] = running[who];
      Status status;
      for (std::size_t l = 0; l < 3 && status == Status::ok; ++l) {
        const LayerShape& shape = config.layers[l];
        const Block keys = rows_of(shape, true, 1, length, length + count),
                    values = rows_of(shape, false, 1, length, length + count),
                    query = gaussian_block(2, 1, 2 * shape.kv_heads, 32);
        const Outcome outcome = attend_one(cache, l, id, keys, values, query);
        status = outcome.status;
        if (!(status == Status::ok)) break;
        EXPECT_TRUE(same_bits(outcome, attend_one(free_cache, l, twins[who], keys, values, query))) << round;
      }
      const MemoryUse use = cache.memory();
      ASSERT_LE(use.page_bytes + use.tail_bytes, config.max_bytes);
      if (status == Status::ok) {
        length += count;
        continue;
      }
      ASSERT_STREQ(turboquant::to_string(status.code), turboquant::to_string(Status::out_of_memory));
      ++refusals;
      ASSERT_OK(cache.truncate(id, length));
      ASSERT_OK(free_cache.truncate(twins[who], length));
      const std::size_t victim = (who + 1) % running.size();
      cache.release(running[victim].first);
      free_cache.release(twins[victim]);
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(victim));
      twins.erase(twins.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    std::vector<SequenceId> ids;
    for (const auto& [id, length] : running) ids.push_back(id);
    EXPECT_TRUE(is_balanced(cache, ids));
  }
  EXPECT_GT(refusals, 5U);
}

}  // namespace
