// The floating-point state of the processor belongs to the caller: no call changes it, and none needs another than the
// caller's, who may have subnormal numbers flushed to zero.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <turboquant/cache/stream.hpp>
#include <vector>

#include "cache/block.hpp"
#include "cache/coded_rows.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace tests;
using turboquant::KVCache;
using turboquant::SequenceId;
using turboquant::Status;

#if defined(__x86_64__)
constexpr bool kHasState = true;
constexpr std::uint64_t kFlush = 0x8040;            // flush to zero, denormals are zero
constexpr std::uint64_t kOthers = 0x6000 | kFlush;  // and rounding towards zero
// Without the six flags that say what has happened.
std::uint64_t state() { return _mm_getcsr() & ~std::uint64_t{0x3f}; }
void set_state(std::uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__) && defined(__GNUC__)
constexpr bool kHasState = true;
constexpr std::uint64_t kFlush = std::uint64_t{1} << 24;
constexpr std::uint64_t kOthers = std::uint64_t{3} << 22 | kFlush;
std::uint64_t state() {
  std::uint64_t bits;
  __asm__ volatile("mrs %0, fpcr" : "=r"(bits));
  return bits;
}
void set_state(std::uint64_t bits) { __asm__ volatile("msr fpcr, %0" : : "r"(bits)); }
#else
constexpr bool kHasState = false;
constexpr std::uint64_t kFlush = 0, kOthers = 0;
std::uint64_t state() { return 0; }
void set_state(std::uint64_t) {}
#endif

/// Sets bits of the state for as long as it lives.
class State {
 public:
  explicit State(std::uint64_t bits) : before_(state()) { set_state(before_ | bits); }
  ~State() { set_state(before_); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

 private:
  std::uint64_t before_;
};

template <class F>
class FloatState : public testing::Test {};
using Formats = testing::Types<turboquant::TQ3, turboquant::TQ4, turboquant::TQ8,
                               turboquant::Format<turboquant::PolarQuant<4>, turboquant::ScalarQuant<4>>>;
TYPED_TEST_SUITE(FloatState, Formats);

TYPED_TEST(FloatState, B04_NoCallChangesIt) {
  if (!kHasState) GTEST_SKIP() << "no way to look at the state here";
  const Block keys = gaussian_block(1, 200, 2, 64), values = gaussian_block(2, 200, 2, 64),
              queries = gaussian_block(3, 1, 4, 64);
  for (const std::uint64_t bits : {std::uint64_t{0}, kFlush, kOthers}) {
    const State set(bits);
    const std::uint64_t before = state();
    const auto is_same = [&](const Status& status) { return status == Status::ok && state() == before; };
    KVCache<TypeParam> cache(coded_config(2, 64)), twin(coded_config(2, 64));
    SequenceId id, other;
    EXPECT_TRUE(is_same(cache.create_sequence(id)));
    EXPECT_TRUE(is_same(cache.reserve(id, 300)));
    EXPECT_TRUE(is_same(append_only(cache, 0, id, keys, values)));
    EXPECT_TRUE(is_same(attend_only(cache, 0, id, queries).status));
    EXPECT_TRUE(is_same(cache.fork(id, 150, other)));
    EXPECT_TRUE(is_same(append_only(cache, 0, other, keys, values)));
    EXPECT_TRUE(is_same(cache.erase(other, 20, 30)));
    EXPECT_TRUE(is_same(cache.truncate(other, 180)));
    EXPECT_TRUE(is_same(cache.seal(other)));
    std::vector<float> logits(4 * 200);
    EXPECT_TRUE(is_same(turboquant::logits(cache, id, 0, queries.rows(), logits.data())));
    Block read_keys, read_values;
    EXPECT_TRUE(is_same(read_rows(cache, id, 0, 0, 200, read_keys, read_values)));
    std::stringstream file;
    EXPECT_TRUE(is_same(turboquant::save(cache, id, file)));
    EXPECT_TRUE(is_same(turboquant::load(twin, file, other)));
    cache.release(id);
    EXPECT_EQ(state(), before);
  }
}

// Rows around the smallest normal number and far below, and values of a range that a 16-bit float cannot scale.
TYPED_TEST(FloatState, B04_FlushedSubnormalsMakeNoNaN) {
  if (!kHasState) GTEST_SKIP() << "no way to change the state here";
  for (const float size : {1.4e-45F, 1e-40F, 1e-38F, 2e-37F, 1e-36F, 1e-30F, 1e-20F, 1e-8F, 1e-6F, 1.0F}) {
    std::vector<float> row(128), tilted(128);
    for (std::size_t i = 0; i < 128; ++i) {
      row[i] = size * (i % 2 == 0 ? 1.0F : -1.0F) * (1 + static_cast<float>(i) / 128);
      tilted[i] = 1 + size * static_cast<float>(i) / 128;
    }
    // Not much larger than what came in. Where the scale of a min-max grid is flushed and its zero point is not, a row
    // of less than 1e-36 may come back as a few times its norm.
    const double size_of_tiny = std::max(2.2 * static_cast<double>(size), 1e-35),
                 size_of_narrow = 2.2 + 2 * static_cast<double>(size);
    const Block tiny = repeated(row, 40), narrow = repeated(tilted, 40), query(1, 1, 128, 1.0F);
    const State flushed(kFlush);
    for (const Block* block : {&tiny, &narrow}) {
      const double largest = block == &tiny ? size_of_tiny : size_of_narrow;
      CodedRows<TypeParam> rows(coded_config(1, 128), *block, *block);
      const Outcome outcome = rows.attend(query);
      ASSERT_TRUE(all_finite(rows.decoded_keys) && all_finite(rows.decoded_values) && all_finite(outcome.out)) << size;
      for (std::size_t i = 0; i < 128; ++i) {
        ASSERT_LE(std::fabs(static_cast<double>(rows.decoded_keys.row(7)[i])), largest) << size;
        ASSERT_LE(std::fabs(static_cast<double>(rows.decoded_values.row(7)[i])), largest) << size;
        ASSERT_LE(std::fabs(static_cast<double>(outcome.out.row(0)[i])), largest) << size;
      }
      for (const float logit : rows.logits(query)) ASSERT_TRUE(turboquant::is_finite(logit)) << size;
    }
  }
}

// And ordinary rows do not notice.
TYPED_TEST(FloatState, B04_OrdinaryRowsKeepTheirBits) {
  const Block keys = gaussian_block(1, 80, 1, 128), values = gaussian_block(2, 80, 1, 128),
              query = gaussian_block(3, 1, 1, 128);
  CodedRows<TypeParam> plain(coded_config(1, 128), keys, values);
  const Outcome wanted = plain.attend(query);
  const State flushed(kFlush);
  CodedRows<TypeParam> rows(coded_config(1, 128), keys, values);
  EXPECT_TRUE(same_bits(rows.decoded_keys, plain.decoded_keys));
  EXPECT_TRUE(same_bits(rows.decoded_values, plain.decoded_values));
  EXPECT_TRUE(same_bits(rows.attend(query), wanted));
}

}  // namespace
