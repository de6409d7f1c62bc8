// TrellisQuant: its distortion, its bits against a slow decoder, the optimality of its paths, and attention through a
// cache.
#include "codec/coded_side.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace turboquant;

// ---- distortion
// ----------------------------------------------------------------------------------------------------------

// Mean of |x - y|^2 / |x|^2 over random directions, least-squares scale, pages of 64.
template <class C>
double distortion(Side side, std::size_t dim, bool search) {
  constexpr std::size_t kTokens = 64, kPages = 16;
  double sum = 0;
  for (std::size_t page = 0; page < kPages; ++page) {
    const auto rows = test::gaussian_rows(3000 + page, kTokens, dim);
    const test::CodedSide<C> coded(side, rows, dim, kTokens, {ScaleRule::least_squares, search});
    for (std::size_t t = 0; t < kTokens; ++t) sum += test::relative_error(rows.data() + t * dim, coded.decode(t));
  }
  return sum / (kTokens * kPages);
}

// Bounds: what was measured, and 1.5 % for the sampling error of 1,024 rows.
TEST(TrellisQuant, DistortionOfKeys) {
  EXPECT_LE(distortion<TrellisQuant<2>>(Side::key, 128, true), 0.0786);
  EXPECT_LE(distortion<TrellisQuant<3>>(Side::key, 128, true), 0.0206);
  EXPECT_LE(distortion<TrellisQuant<4>>(Side::key, 128, true), 0.00553);
  // Without search; then short and long keys.
  EXPECT_LE(distortion<TrellisQuant<2>>(Side::key, 128, false), 0.0798);
  EXPECT_LE(distortion<TrellisQuant<3>>(Side::key, 128, false), 0.0213);
  EXPECT_LE(distortion<TrellisQuant<4>>(Side::key, 128, false), 0.00588);
  EXPECT_LE(distortion<TrellisQuant<3>>(Side::key, 32, true), 0.0190);
  EXPECT_LE(distortion<TrellisQuant<3>>(Side::key, 64, true), 0.0199);
  EXPECT_LE(distortion<TrellisQuant<3>>(Side::key, 256, true), 0.0210);
}

TEST(TrellisQuant, DistortionOfValues) {
  EXPECT_LE(distortion<TrellisQuant<2>>(Side::value, 128, true), 0.0796);
  EXPECT_LE(distortion<TrellisQuant<3>>(Side::value, 128, true), 0.0213);
  EXPECT_LE(distortion<TrellisQuant<4>>(Side::value, 128, true), 0.00592);
}

// At equal bytes a good path leaves two thirds of the error of the nearest of 2^B levels. A trellis whose encoder or
// decoder forgot its memory is a scalar code of 2^B levels and cannot be below PolarQuant without search, the optimum
// of those.
template <unsigned B>
void expect_better_than_levels(double most) {
  for (const Side side : {Side::key, Side::value}) {
    const double levels = distortion<PolarQuant<B>>(side, 128, true);
    EXPECT_LE(distortion<TrellisQuant<B>>(side, 128, true), most * levels) << B << " bits";
  }
}

TEST(TrellisQuant, LeavesAThirdLessErrorThanNearestLevels) {
  expect_better_than_levels<2>(0.72);
  expect_better_than_levels<3>(0.72);
  expect_better_than_levels<4>(0.79);
}

// The same table without the search for a path: the best branch at every step. Worse than nearest-level coding, so the
// bounds above cannot be met by an encoder that does not look ahead.
TEST(TrellisQuant, AGreedyPathWouldFailTheseBounds) {
  constexpr std::size_t kDim = 128;
  constexpr auto codes = TrellisQuant<3>::codes();
  double sum = 0;
  for (std::uint64_t row = 0; row < 200; ++row) {
    const auto x = test::gaussian_rows(row, 1, kDim);
    double energy = 0, dot = 0, norm = 0;
    for (const float v : x) energy += static_cast<double>(v) * static_cast<double>(v);
    const double unit = kTrellisSpread / std::sqrt(energy / kDim);
    unsigned window = 0;
    for (const float v : x) {
      unsigned best = 0;
      for (unsigned bits = 1; bits < 8; ++bits) {
        const auto miss = [&](unsigned n) {
          return std::abs(unit * static_cast<double>(v) - codes.level((window << 3 | n) & 255u));
        };
        if (miss(bits) < miss(best)) best = bits;
      }
      window = (window << 3 | best) & 255u;
      dot += static_cast<double>(v) * codes.level(window);
      norm += codes.level(window) * codes.level(window);
    }
    sum += 1 - dot * dot / (norm * energy);
  }
  EXPECT_GE(sum / 200, 1.5 * 0.0206);
}

// The unbiased scale: <x, x'> = |x|^2 up to the rounding of the bf16 scale.
TEST(TrellisQuant, UnbiasedScale) {
  for (const Side side : {Side::key, Side::value}) {
    const auto rows = test::gaussian_rows(5, 32, 96);
    const test::CodedSide<TrellisQuant<3>> coded(side, rows, 96, 32, {ScaleRule::unbiased, true});
    for (std::size_t t = 0; t < 32; ++t) {
      const auto y = coded.decode(t);
      double dot = 0, energy = 0;
      for (std::size_t i = 0; i < 96; ++i) {
        dot += static_cast<double>(rows[t * 96 + i]) * static_cast<double>(y[i]);
        energy += static_cast<double>(rows[t * 96 + i]) * static_cast<double>(rows[t * 96 + i]);
      }
      EXPECT_NEAR(dot / energy, 1, 0x1p-8 + 1e-4);  // 1e-4: 15-bit input
    }
  }
}

// ---- bits
// ----------------------------------------------------------------------------------------------------------------

// The new bits of one position, from the layout law: half h of a fragment is B planes of 16 bytes; in lane l, the
// planes are the big-endian bytes of W = sum over i of n_i << B (7 - i), n_i the new bits of position 8 h + i.
unsigned new_bits(const std::uint8_t* fragment, unsigned bits, std::size_t lane, std::size_t position) {
  const std::uint8_t* planes = fragment + position / 8 * bits * 16;
  unsigned value = 0;
  for (unsigned b = 0; b < bits; ++b) {
    const std::size_t at = position % 8 * bits + b;  // bit of W, the highest first
    value = value << 1 | (planes[at / 8 * 16 + lane] >> (7 - at % 8) & 1u);
  }
  return value;
}

// Level of one token and coordinate, from the bytes of the whole side: walks back as far as the window of 8 bits
// reaches.
template <unsigned B>
int slow_level(const test::CodedSide<TrellisQuant<B>>& coded, std::size_t token, std::size_t coordinate) {
  const std::uint8_t* fragments = coded.memory.data() + coded.kBefore;
  const std::size_t groups = coded.dim / 16, tokens = coded.page_tokens;
  const bool key = coded.side == Side::key;
  // A sequence and its length: a key's coordinates; or the tokens of the coordinates lane, 16 + lane, 32 + lane, ...
  const std::size_t length = key ? coded.dim : groups * tokens;
  const std::size_t position = key ? coordinate : coordinate / 16 * tokens + token;
  const std::size_t lane = key ? token % 16 : coordinate % 16;
  const std::uint8_t* first = fragments + (key ? token / 16 * groups : 0) * 32 * B;
  unsigned window = 0;
  for (std::size_t back = 4; back-- > 0;) {
    const std::size_t at = (position + length - back) % length;
    window = (window << B | new_bits(first + at / 16 * 32 * B, B, lane, at % 16)) & 255u;
  }
  const auto& table = kTrellisConstants<B>;
  const int magnitude = table[window % 16] + table[16 + window / 16 % 8];
  return window >= 128 ? -magnitude : magnitude;
}

template <unsigned B>
void expect_slow_decoder_agrees() {
  for (const Side side : {Side::key, Side::value}) {
    for (const auto& [dim, page, count] :
         {std::array<std::size_t, 3>{32, 16, 16}, {80, 48, 48}, {128, 64, 64}, {96, 64, 37}, {1024, 256, 256}}) {
      const auto rows = test::gaussian_rows(dim + page, count, dim);
      const test::CodedSide<TrellisQuant<B>> coded(side, rows, dim, page);
      for (std::size_t t = 0; t < count; t += dim == 1024 ? 51 : 1) {
        const auto y = coded.decode(t);
        const float scale = to_float(coded.scales[t]);
        for (std::size_t i = 0; i < dim; ++i) {
          ASSERT_EQ(y[i], scale * static_cast<float>(slow_level(coded, t, i)))
              << B << " bits, dim " << dim << " token " << t << " coordinate " << i;
        }
      }
    }
  }
}

TEST(TrellisQuant, DecodesByTheLayoutLaw) {
  expect_slow_decoder_agrees<2>();
  expect_slow_decoder_agrees<3>();
  expect_slow_decoder_agrees<4>();
}

TEST(TrellisQuant, LevelsFitInt8) {
  const auto check = [](const auto& codes) {
    int largest = 0;
    for (unsigned w = 0; w < 256; ++w) largest = std::max(largest, std::abs(codes.level(w)));
    EXPECT_LE(largest, 127);
    EXPECT_GE(largest, 85);  // 2.5 standard deviations
  };
  check(TrellisQuant<2>::codes());
  check(TrellisQuant<3>::codes());
  check(TrellisQuant<4>::codes());
}

// ---- paths
// ---------------------------------------------------------------------------------------------------------------

// All paths of `length` steps from `start` to `end`. Of equal costs the lowest end state wins, then, from the end
// backwards, the lowest state before.
template <unsigned B>
struct Exhaustive {
  static constexpr unsigned kStates = kernels::TrellisCodes<B>::states;
  const std::vector<std::int16_t>& target;
  const std::int16_t* levels;
  std::int64_t cost = -1;
  std::vector<unsigned> states{};  // from the end backwards, the start last

  void search(unsigned start, unsigned end) {
    for (unsigned first = 0; first < kStates; ++first) {
      if (start != test::Kernels::kAnyState && first != start) continue;
      std::vector<unsigned> walked{first};
      step(walked, 0, end);
    }
  }
  void step(std::vector<unsigned>& walked, std::int64_t sum, unsigned end) {
    const std::size_t i = walked.size() - 1;
    if (i == target.size()) {
      if (end != test::Kernels::kAnyState && walked.back() != end) return;
      std::vector<unsigned> backwards(walked.rbegin(), walked.rend());
      if (cost < 0 || sum < cost || (sum == cost && backwards < states)) cost = sum, states = backwards;
      return;
    }
    for (unsigned bits = 0; bits < 1u << B; ++bits) {
      const unsigned window = walked.back() << B | bits;
      const std::int64_t difference = target[i] - levels[window];
      walked.push_back(window % kStates);
      step(walked, sum + (difference * difference >> 16), end);
      walked.pop_back();
    }
  }
  std::vector<std::uint8_t> path() const {
    std::vector<std::uint8_t> bits;
    for (std::size_t i = states.size() - 1; i-- > 0;) bits.push_back(static_cast<std::uint8_t>(states[i] % (1u << B)));
    return bits;
  }
};

template <unsigned B>
void expect_optimal(std::size_t length, std::int64_t step, std::uint64_t seed) {
  std::int16_t levels[256];
  test::Kernels::list_trellis_levels(TrellisQuant<B>::codes(), levels);
  const auto coarse = [&](std::int64_t x) { return static_cast<std::int16_t>(x / step * step); };
  for (std::int16_t& level : levels) level = coarse(level);
  std::vector<std::int16_t> target;
  for (std::size_t i = 0; i < length; ++i) {
    const double x = 34 * 128 * 1.5 * oracle::gaussian(seed, 1, i);
    target.push_back(coarse(static_cast<std::int64_t>(std::clamp(x, -16256.0, 16256.0))));
  }
  constexpr unsigned kStates = kernels::TrellisCodes<B>::states, kAny = test::Kernels::kAnyState;
  const unsigned some = static_cast<unsigned>(oracle::hash(seed, 2, 0) % kStates),
                 other = static_cast<unsigned>(oracle::hash(seed, 2, 1) % kStates);
  for (const auto& [start, end] : {std::array<unsigned, 2>{0, kAny}, {some, kAny}, {some, other}, {some, some}}) {
    Exhaustive<B> truth{target, levels};
    truth.search(start, end);
    std::vector<std::uint8_t> path(length), back(length * kStates);
    test::Kernels::find_trellis_path<B>(target.data(), length, levels, start, end, back.data(), path.data());
    EXPECT_EQ(path, truth.path()) << B << " bits, seed " << seed << " from " << start << " to " << end;
  }
}

// Step 1: the real levels. Step 2048: many paths of equal cost, which the tie rule decides.
TEST(TrellisPath, IsTheBestOfAll) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    for (const std::int64_t step : {1, 2048}) {
      expect_optimal<2>(7, step, seed);
      expect_optimal<3>(5, step, seed);
      expect_optimal<4>(4, step, seed);
    }
  }
}

// Targets at both ends of the range, where sums grow fastest: the 16-bit sums of the kernel against 64-bit ones.
TEST(TrellisPath, SumsDoNotOverflow) {
  constexpr std::size_t kLength = 400;
  constexpr unsigned kStates = kernels::TrellisCodes<2>::states;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::int16_t levels[256];
    for (unsigned w = 0; w < 256; ++w)
      levels[w] = oracle::hash(seed, 3, w) % 2 == 0 ? std::int16_t{16256} : std::int16_t{-16256};
    std::vector<std::int16_t> target(kLength);
    for (std::size_t i = 0; i < kLength; ++i)
      target[i] = oracle::hash(seed, 4, i) % 2 == 0 ? std::int16_t{16256} : std::int16_t{-16256};
    std::vector<std::uint8_t> path(kLength), back(kLength * kStates);
    test::Kernels::find_trellis_path<2>(target.data(), kLength, levels, 0, test::Kernels::kAnyState, back.data(),
                                        path.data());
    std::vector<std::int64_t> cost(kStates, std::int64_t{1} << 40);
    cost[0] = 0;
    for (const std::int16_t aim : target) {
      std::vector<std::int64_t> next(kStates, std::int64_t{1} << 40);
      for (unsigned w = 0; w < 256; ++w) {
        const std::int64_t difference = aim - levels[w];
        next[w % kStates] = std::min(next[w % kStates], cost[w >> 2] + (difference * difference >> 16));
      }
      cost = next;
    }
    std::int64_t found = 0;
    unsigned window = 0;
    for (std::size_t i = 0; i < kLength; ++i) {
      window = (window << 2 | path[i]) & 255u;
      const std::int64_t difference = target[i] - levels[window];
      found += difference * difference >> 16;
    }
    EXPECT_EQ(found, *std::min_element(cost.begin(), cost.end()));
  }
}

// ---- rows that are not Gaussian
// ------------------------------------------------------------------------------------------

TEST(TrellisQuant, ZeroRowsDecodeToZeroBetweenOthers) {
  for (const Side side : {Side::key, Side::value}) {
    auto rows = test::gaussian_rows(8, 20, 128);
    for (const std::size_t t : {0u, 7u, 19u})
      std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(t * 128), 128, 0.0f);
    const test::CodedSide<TrellisQuant<3>> coded(side, rows, 128, 32);
    for (std::size_t t = 0; t < 20; ++t) {
      const auto y = coded.decode(t);
      if (t == 0 || t == 7 || t == 19) {
        for (const float v : y) EXPECT_EQ(v, 0.0f);
      } else {
        EXPECT_LT(test::relative_error(rows.data() + t * 128, y), 0.035);
      }
    }
    const test::CodedSide<TrellisQuant<3>> nothing(side, std::vector<float>(16 * 128, 0.0f), 128, 16);
    for (std::size_t t = 0; t < 16; ++t) {
      for (const float v : nothing.decode(t)) EXPECT_EQ(v, 0.0f);
    }
  }
}

// Tokens of very different size share the paths of values and do not disturb each other.
TEST(TrellisQuant, TokensOfAnySizeShareAPage) {
  auto rows = test::gaussian_rows(12, 64, 128);
  for (std::size_t t = 0; t < 64; ++t) {
    for (std::size_t i = 0; i < 128; ++i) rows[t * 128 + i] *= std::ldexp(1.0f, static_cast<int>(t % 7) * 15 - 45);
  }
  const test::CodedSide<TrellisQuant<3>> coded(Side::value, rows, 128, 64);
  for (std::size_t t = 0; t < 64; ++t) EXPECT_LT(test::relative_error(rows.data() + t * 128, coded.decode(t)), 0.035);
}

// One coordinate holds all: beyond every table. The scale grows with it, and the rest of the row decodes to what the
// small levels make of that; the row stays nearer than the zero vector.
TEST(TrellisQuant, ASingleLargeCoordinate) {
  for (const Side side : {Side::key, Side::value}) {
    std::vector<float> rows(16 * 128, 0.0f);
    for (std::size_t t = 0; t < 16; ++t) rows[t * 128 + 8 * t] = t % 2 == 0 ? 3.0f : -3.0f;
    const test::CodedSide<TrellisQuant<3>> coded(side, rows, 128, 16);
    for (std::size_t t = 0; t < 16; ++t)
      EXPECT_LT(test::relative_error(rows.data() + t * 128, coded.decode(t)), 0.7) << t;
  }
}

// ---- frozen bytes
// --------------------------------------------------------------------------------------------------------

template <unsigned B>
std::uint64_t digest(Side side) {
  std::vector<float> rows(50 * 96);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::int32_t sum = 0;  // of four uniform numbers: exact everywhere
    for (unsigned k = 0; k < 4; ++k) sum += static_cast<std::int32_t>(oracle::hash(1, k, i) % 4001) - 2000;
    rows[i] = static_cast<float>(sum) * 0x1p-10f;
  }
  const test::CodedSide<TrellisQuant<B>> coded(side, rows, 96, 64, {ScaleRule::unbiased, true});
  std::uint64_t state = 0;
  for (std::size_t i = coded.kBefore; i < coded.memory.size(); ++i) state = oracle::hash(state, coded.memory[i], i);
  for (const bfloat16 scale : coded.scales) state = oracle::hash(state, scale.bits, 7);
  return state;
}

// The same on every compiler and optimisation level; a change here makes stored pages unreadable or different.
TEST(TrellisQuant, BytesAreFrozen) {
  EXPECT_EQ(digest<2>(Side::key), 5645502201753905922u);
  EXPECT_EQ(digest<2>(Side::value), 10333453072718239386u);
  EXPECT_EQ(digest<3>(Side::key), 106408130453342031u);
  EXPECT_EQ(digest<3>(Side::value), 6366686305589076791u);
  EXPECT_EQ(digest<4>(Side::key), 1699060453194976509u);
  EXPECT_EQ(digest<4>(Side::value), 6936864102299540929u);
}

// ---- through a cache
// -----------------------------------------------------------------------------------------------------

// Squared error of a page's rows over the energy, with the unbiased scale of keys and a quarter for the scatter of a
// page.
constexpr double bound_of(double distortion) { return 1.25 * distortion / (1 - distortion); }

template <class F>
void expect_attention(double key_distortion, double value_distortion, std::uint32_t head_dim) {
  CacheConfig config;
  config.layers = {LayerShape{.kv_heads = 2, .head_dim = head_dim}};
  config.page_tokens = 32;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  KVCache<F> cache(config);
  const SequenceId id = tests::new_sequence(cache);
  tests::Mirror mirror(config, 0, {bound_of(key_distortion), bound_of(value_distortion), 127});
  const auto step = [&](std::size_t count, std::size_t asking) {
    const std::size_t before = mirror.length();
    const auto keys = tests::gaussian_block(1, count, 2, head_dim, 1, before),
               values = tests::gaussian_block(2, count, 2, head_dim, 1, before);
    const auto queries = tests::gaussian_block(3, asking, 4, head_dim, 1, before + count - asking);
    const auto outcome = tests::attend_one(cache, 0, id, keys, values, queries);
    mirror.append(keys, values);
    mirror.learn(cache, id);
    mirror.check(queries, outcome, {}, {.position = before + count - asking});
  };
  step(150, 20);
  for (int n = 0; n < 40 && !testing::Test::HasFailure(); ++n) step(1, 1);
}

TEST(TrellisQuant, AttentionThroughACache) {
  expect_attention<Format<TrellisQuant<3>, TrellisQuant<3>>>(0.0206, 0.0213, 128);
  expect_attention<Format<TrellisQuant<3>, TrellisQuant<3>>>(0.0212, 0.0220, 80);
  expect_attention<Format<TrellisQuant<2>, TrellisQuant<2>>>(0.0786, 0.0800, 128);
  expect_attention<Format<TrellisQuant<4>, TrellisQuant<4>>>(0.0056, 0.0060, 128);
  expect_attention<Format<TrellisQuant<4>, TrellisQuant<3>>>(0.0056, 0.0213, 64);
}

}  // namespace
