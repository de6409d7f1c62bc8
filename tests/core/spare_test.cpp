// Memory that a call leaves for the next one: it has one owner at any time, and is freed once.
#include <turboquant/core/spare.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace {

using turboquant::detail::Reusable;
using turboquant::detail::Spare;

std::atomic<int> live{0};

struct Counted : Reusable {
  Counted() { ++live; }
  ~Counted() override { --live; }
  std::atomic<int> users{0};
};

TEST(Spare, HoldsOneObject) {
  {
    Spare spare;
    EXPECT_EQ(spare.take(), nullptr);
    EXPECT_EQ(spare.bytes(), 0U);
    auto* first = new Counted;
    spare.keep(first, 10);
    EXPECT_EQ(spare.bytes(), 10U);
    EXPECT_EQ(spare.take(), first);
    EXPECT_EQ(spare.bytes(), 0U);
    EXPECT_EQ(spare.take(), nullptr);
    spare.keep(first, 10);
    spare.keep(new Counted, 20);
    EXPECT_EQ(live, 1);
    EXPECT_EQ(spare.bytes(), 20U);
  }
  EXPECT_EQ(live, 0);
}

TEST(Spare, NobodySharesWhatIsTaken) {
  std::atomic<int> shared{0};
  {
    Spare spare;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int round = 0; round < 2000; ++round) {
          auto* mine = static_cast<Counted*>(spare.take());
          if (mine == nullptr) mine = new Counted;
          shared += ++mine->users != 1;
          if (round % 64 == 0) std::this_thread::yield();
          --mine->users;
          spare.keep(mine, 1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(live, 1);
  }
  EXPECT_EQ(shared, 0);
  EXPECT_EQ(live, 0);
}

}  // namespace
