// Array against std::vector, and that a failure changes nothing.
#include <turboquant/core/array.hpp>

#include <turboquant/core/random.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace tq = turboquant;

namespace {
bool refuse = false;
long long live_blocks = 0;  // of the nothrow operator new
}  // namespace

// One family over malloc for the whole program, so that the nothrow form can be told to fail.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (refuse) return nullptr;
  ++live_blocks;
  return std::malloc(bytes + (bytes == 0));
}
void* operator new(std::size_t bytes) {
  void* memory = ::operator new(bytes, std::nothrow);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  --live_blocks;
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { ::operator delete(memory); }

namespace {

struct Entry {
  std::uint32_t page = 7, first = 0;
  friend bool operator==(const Entry&, const Entry&) = default;
};

Entry entry(std::uint64_t x) { return {std::uint32_t(x), std::uint32_t(x >> 32)}; }

bool equal(const tq::Array<Entry>& array, const std::vector<Entry>& model) {
  return array.size() == model.size() && std::equal(array.begin(), array.end(), model.begin());
}

}  // namespace

TEST(Array, StartsEmptyWithoutMemory) {
  const long long before = live_blocks;
  const tq::Array<Entry> array;
  EXPECT_EQ(array.size(), 0u);
  EXPECT_TRUE(array.empty());
  EXPECT_EQ(array.begin(), array.end());
  EXPECT_EQ(live_blocks, before);
}

TEST(Array, BehavesLikeAVector) {
  const long long before = live_blocks;
  {
    tq::Array<Entry> array;
    std::vector<Entry> model;
    for (std::uint64_t step = 0; step < 20000; ++step) {
      const std::uint64_t bits = tq::random_bits(1, 2, step);
      const Entry value = entry(bits * 5);
      const std::size_t at = std::size_t(bits >> 20) % (model.size() + 1);
      const std::size_t last = at + std::size_t(bits >> 40) % (model.size() - at + 1);
      switch (bits % 16) {
        case 0:
          array.erase(at, last);
          model.erase(model.begin() + std::ptrdiff_t(at), model.begin() + std::ptrdiff_t(last));
          break;
        case 1:
          ASSERT_TRUE(array.push_front(value));
          model.insert(model.begin(), value);
          break;
        case 2:
          ASSERT_TRUE(array.resize(at));
          model.resize(at);
          break;
        case 3:
          ASSERT_TRUE(array.resize(model.size() + 3));
          model.resize(model.size() + 3);
          break;
        case 4:
          ASSERT_TRUE(array.reserve(at * 2));
          EXPECT_GE(array.capacity(), at * 2);
          break;
        case 5:
          if (step % 64 == 0) {
            array.clear();
            model.clear();
          }
          break;
        case 6:
        case 7:
          ASSERT_TRUE(array.insert(at, value));
          model.insert(model.begin() + std::ptrdiff_t(at), value);
          break;
        default:
          ASSERT_TRUE(array.push_back(value));
          model.push_back(value);
          EXPECT_EQ(array.back(), value);
      }
      ASSERT_TRUE(equal(array, model)) << step;
    }
    EXPECT_GT(live_blocks, before);
  }
  EXPECT_EQ(live_blocks, before) << "leaked";
}

TEST(Array, NewElementsAreValueInitialised) {
  tq::Array<Entry> entries;
  ASSERT_TRUE(entries.resize(3));
  EXPECT_EQ(entries[2], Entry{});
  EXPECT_EQ(entries[2].page, 7u);
  tq::Array<int> numbers;
  ASSERT_TRUE(numbers.push_back(9));
  ASSERT_TRUE(numbers.resize(0));
  ASSERT_TRUE(numbers.resize(1));
  EXPECT_EQ(numbers[0], 0);
}

TEST(Array, TakesItsOwnElements) {
  tq::Array<int> array;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(array.push_back(i + 1));
  while (array.size() < 300) {  // passes many growths
    ASSERT_TRUE(array.push_back(array[0]));
    ASSERT_EQ(array.back(), 1);
    ASSERT_TRUE(array.insert(1, array[3]));
    ASSERT_EQ(array[1], array[4]);
  }
}

TEST(Array, FailureChangesNothing) {
  tq::Array<int> array;
  ASSERT_TRUE(array.reserve(2));
  ASSERT_TRUE(array.push_back(1));
  ASSERT_TRUE(array.push_back(2));
  ASSERT_EQ(array.capacity(), 2u);
  const int* data = array.data();
  refuse = true;
  const bool any =
      array.push_back(3) || array.push_front(3) || array.insert(1, 3) || array.resize(3) || array.reserve(3);
  tq::Array<int> fresh;
  const bool fresh_any = fresh.push_back(1) || fresh.resize(1) || fresh.reserve(1);
  const bool within = array.resize(1) && array.push_back(5);
  refuse = false;
  EXPECT_FALSE(any);
  EXPECT_FALSE(fresh_any);
  EXPECT_TRUE(fresh.empty());
  EXPECT_TRUE(within) << "reserved room needs no memory";
  EXPECT_EQ(array.data(), data);
  EXPECT_EQ(array.capacity(), 2u);
  EXPECT_EQ(array.size(), 2u);
  EXPECT_EQ(array[0], 1);
  EXPECT_EQ(array[1], 5);
}

TEST(Array, SizesThatOverflowAreRefused) {
  tq::Array<Entry> array;
  ASSERT_TRUE(array.push_back(entry(1)));
  EXPECT_FALSE(array.reserve(tq::Array<Entry>::max_size() + 1));
  EXPECT_FALSE(array.resize(std::size_t(-1)));
  EXPECT_FALSE(array.reserve(std::size_t(-1) / sizeof(Entry) + 2));  // times 8 is 8 modulo 2^64
  EXPECT_EQ(array.size(), 1u);
  EXPECT_EQ(array[0], entry(1));
}

TEST(Array, MovesAndSwapsWithoutCopying) {
  EXPECT_FALSE(std::is_copy_constructible_v<tq::Array<int>>);
  EXPECT_FALSE(std::is_copy_assignable_v<tq::Array<int>>);
  EXPECT_TRUE(std::is_nothrow_move_constructible_v<tq::Array<int>>);
  const long long before = live_blocks;
  {
    tq::Array<int> a, b;
    ASSERT_TRUE(a.push_back(1));
    ASSERT_TRUE(b.push_back(2));
    const int* data = a.data();
    a.swap(b);
    EXPECT_EQ(b.data(), data);
    EXPECT_EQ(a[0], 2);
    tq::Array<int> moved(std::move(b));
    EXPECT_EQ(moved.data(), data);
    a = std::move(moved);
    EXPECT_EQ(a.data(), data);
    EXPECT_EQ(a.size(), 1u);
    tq::Array<int>& same = a;
    a = std::move(same);
    EXPECT_EQ(a.data(), data);
    EXPECT_EQ(a[0], 1);
  }
  EXPECT_EQ(live_blocks, before) << "leaked";
}
