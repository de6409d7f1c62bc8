// A program built and linked with -ffast-math (B03): the compiler takes infinities and NaN for impossible, and
// subnormal numbers are flushed to zero. What depends on them must not: refusals, sequences without keys, masked and
// padded keys. Nor may rounding; the error of the codes is held to what it is without the flag.
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <span>
#include <vector>

#include <turboquant/turboquant.hpp>

namespace {

using turboquant::Status;
using Cache = turboquant::KVCache<turboquant::TQ4>;

constexpr std::size_t kDim = 64;
constexpr std::uint32_t kMinusInfinity = 0xff800000U;

int failures = 0;

void expect(bool holds, const char* what, std::size_t where = 0) {
  if (holds) return;
  ++failures;
  std::printf("%s (%zu)\n", what, where);
}

// Comparisons of floats are the compiler's to fold, those of bits are not.
std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
bool is_finite(float x) { return (bits_of(x) & 0x7f800000U) != 0x7f800000U; }
bool is_near(float x, double wanted, double tolerance) {
  return is_finite(x) && std::fabs(static_cast<double>(x) - wanted) <= tolerance;
}

// A number of which the compiler knows nothing.
float number(std::uint32_t bits) {
  volatile std::uint32_t hidden = bits;
  return std::bit_cast<float>(std::uint32_t{hidden});
}

std::vector<float> gaussian(std::size_t count, unsigned seed, float mean = 0) {
  std::mt19937 random(seed);
  std::vector<float> numbers(count);
  for (float& x : numbers) {
    int sum = 0;
    for (int k = 0; k < 12; ++k) sum += static_cast<int>(random() >> 16);
    x = static_cast<float>(sum - 6 * 65536) / 65536.0F + mean;
  }
  return numbers;
}

struct Partial {
  std::vector<float> out = std::vector<float>(kDim, number(0x7fc00000));
  float lse = number(0x7fc00000);
  Status status{};
};

struct Sequence {
  Cache& cache;
  turboquant::SequenceId id{};

  explicit Sequence(Cache& of) : cache(of) { expect(cache.create_sequence(id) == Status::ok, "create_sequence"); }
  ~Sequence() { cache.release(id); }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  Status append(const std::vector<float>& keys, const std::vector<float>& values) {
    turboquant::BatchItem item;
    item.sequence = id;
    item.keys = {keys.data(), keys.size() / kDim, 1, kDim};
    item.values = {values.data(), values.size() / kDim, 1, kDim};
    return turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1));
  }
  Partial attend(const std::vector<float>& query, std::size_t begin = 0, std::size_t end = turboquant::npos,
                 const turboquant::AttentionParams& params = {}) {
    Partial partial;
    turboquant::BatchItem item;
    item.sequence = id;
    item.queries = {query.data(), 1, 1, kDim};
    item.out = {partial.out.data(), 1, 1, kDim};
    item.lse = &partial.lse;
    item.position = cache.length(id) == 0 ? 0 : turboquant::npos;
    item.key_begin = begin;
    item.key_end = end;
    partial.status = turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1), params);
    expect(partial.status == Status::ok, "attend");
    return partial;
  }
};

void merge(Partial& into, const Partial& other) {
  turboquant::merge_partials({into.out.data(), 1, 1, kDim}, &into.lse,
                             turboquant::ConstRows(other.out.data(), 1, 1, kDim), &other.lse);
}

void non_finite_numbers_are_refused(Cache& cache) {
  Sequence sequence(cache);
  const std::vector<float> good = gaussian(3 * kDim, 1);
  expect(sequence.append(good, good) == Status::ok, "append");
  for (const std::uint32_t bits : {0x7fc00000U, 0x7f800001U, 0xffc12345U, 0x7f800000U, 0xff800000U, 0x7149f2caU}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{kDim + 2}, 3 * kDim - 1}) {
      std::vector<float> bad = good;
      bad[place] = number(bits);
      expect(sequence.append(bad, good) == Status::non_finite_input, "a key was accepted", place);
      expect(sequence.append(good, bad) == Status::non_finite_input, "a value was accepted", place);
    }
  }
  std::vector<float> query(good.begin(), good.begin() + kDim), out(kDim);
  query[5] = number(0x7fc00000);
  turboquant::BatchItem item;
  item.sequence = sequence.id;
  item.queries = {query.data(), 1, 1, kDim};
  item.out = {out.data(), 1, 1, kDim};
  expect(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1)) == Status::non_finite_input,
         "a query was accepted");
  query[5] = 0;
  for (const std::uint32_t bits : {0x7fc00000U, 0x7f800000U}) {
    const float bad = number(bits);
    turboquant::AttentionParams scaled, capped, sloped;
    scaled.scale = capped.softcap = bad;
    sloped.alibi_slopes = std::span<const float>(&bad, 1);
    for (const turboquant::AttentionParams& params : {scaled, capped, sloped}) {
      expect(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1), params) ==
                 Status::non_finite_input,
             "a parameter was accepted");
    }
  }
  expect(cache.length(sequence.id) == 3, "a refused token was counted");
}

void zeros_stay_zeros(Cache& cache) {
  Sequence sequence(cache);
  constexpr std::size_t kTokens = 150;
  const std::vector<float> zeros(kTokens * kDim), query(kDim, 1.0F);
  expect(sequence.append(zeros, zeros) == Status::ok, "append");
  std::vector<float> keys(kTokens * kDim, 1.0F), values(keys), logits(kTokens, 1.0F);
  expect(
      cache.read(sequence.id, 0, 0, {keys.data(), kTokens, 1, kDim}, {values.data(), kTokens, 1, kDim}) == Status::ok,
      "read");
  expect(turboquant::logits(cache, sequence.id, 0, {query.data(), 1, 1, kDim}, logits.data()) == Status::ok, "logits");
  Partial partial = sequence.attend(query);
  for (std::vector<float>* numbers : {&keys, &values, &logits, &partial.out}) {
    for (std::size_t i = 0; i < numbers->size(); ++i)
      expect((bits_of((*numbers)[i]) & 0x7fffffffU) == 0, "zeros became something", i);
  }
  expect(is_near(partial.lse, std::log(static_cast<double>(kTokens)), 1e-5), "lse of zeros");
}

// All logits zero, all values one: a slot too many or too few shows in the sum.
void padded_slots_take_no_part(Cache& cache) {
  turboquant::AttentionParams capped;
  capped.softcap = 2;
  for (const std::size_t tokens : {1U, 15U, 16U, 17U, 64U, 65U, 127U, 128U, 129U, 193U}) {
    Sequence sequence(cache);
    const std::vector<float> keys(tokens * kDim), values(tokens * kDim, 1.0F), query(kDim);
    expect(sequence.append(keys, values) == Status::ok, "append");
    for (const turboquant::AttentionParams& params : {turboquant::AttentionParams(), capped}) {
      const Partial partial = sequence.attend(query, 0, turboquant::npos, params);
      for (const float x : partial.out) expect(is_near(x, 1, 1e-3), "a constant changed", tokens);
      expect(is_near(partial.lse, std::log(static_cast<double>(tokens)), 1e-5), "keys were miscounted", tokens);
    }
  }
}

void no_keys_are_minus_infinity(Cache& cache) {
  Sequence empty(cache), three(cache), many(cache);
  const std::vector<float> query = gaussian(kDim, 1);
  const std::vector<float> some = gaussian(3 * kDim, 2), more = gaussian(130 * kDim, 3);
  expect(three.append(some, some) == Status::ok && many.append(more, more) == Status::ok, "append");

  const Partial nothing = empty.attend(query), whole = three.attend(query);
  expect(bits_of(nothing.lse) == kMinusInfinity, "lse of no keys");
  for (const float x : nothing.out) expect((bits_of(x) & 0x7fffffffU) == 0, "output of no keys");
  Partial first = nothing, second = whole;
  merge(first, whole);
  merge(second, nothing);
  for (const Partial* merged : {&first, &second}) {
    expect(bits_of(merged->lse) == bits_of(whole.lse), "lse merged with nothing");
    for (std::size_t i = 0; i < kDim; ++i)
      expect(bits_of(merged->out[i]) == bits_of(whole.out[i]), "output merged with nothing", i);
  }
  // Sinks of minus infinity are none.
  const float no_sink = number(kMinusInfinity);
  turboquant::finish_partials({first.out.data(), 1, 1, kDim}, &first.lse, std::span<const float>(&no_sink, 1));
  expect(bits_of(first.lse) == bits_of(whole.lse), "a sink of nothing");

  // Splits, of which most are empty.
  const Partial all = many.attend(query);
  for (const std::size_t width : {1U, 7U, 60U, 130U, 500U}) {
    Partial joined = nothing;
    for (std::size_t begin = 0; begin < 1000; begin += width) merge(joined, many.attend(query, begin, begin + width));
    expect(is_near(joined.lse, static_cast<double>(all.lse), 1e-5), "lse of splits", width);
    for (std::size_t i = 0; i < kDim; ++i)
      expect(is_near(joined.out[i], static_cast<double>(all.out[i]), 1e-3), "output of splits", width);
  }
}

// Keys with an offset, as centres take it: 0.00138 of their energy with and without the flag.
void codes_are_as_exact_as_ever(Cache& cache) {
  Sequence sequence(cache);
  constexpr std::size_t kTokens = 64 * 20;
  const std::vector<float> keys = gaussian(kTokens * kDim, 4, 2), values = gaussian(kTokens * kDim, 5);
  expect(sequence.append(keys, values) == Status::ok && cache.seal(sequence.id) == Status::ok, "append");
  std::vector<float> found(kTokens * kDim);
  expect(cache.read(sequence.id, 0, 0, {found.data(), kTokens, 1, kDim}, {}) == Status::ok, "read");
  double error = 0, energy = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    error += std::pow(static_cast<double>(found[i]) - static_cast<double>(keys[i]), 2);
    energy += std::pow(static_cast<double>(keys[i]), 2);
  }
  std::printf("relative error of keys: %.6f\n", error / energy);
  expect(error / energy < 0.00138 * 1.02, "the codes lose more");
}

}  // namespace

int main() {
  for (const turboquant::Isa isa : {turboquant::Isa::portable, turboquant::best_isa()}) {
    turboquant::CacheConfig config;
    config.layers[0].head_dim = kDim;
    Cache cache(config, isa);
    std::puts(to_string(isa));
    non_finite_numbers_are_refused(cache);
    zeros_stay_zeros(cache);
    padded_slots_take_no_part(cache);
    no_keys_are_minus_infinity(cache);
    codes_are_as_exact_as_ever(cache);
  }
  return failures == 0 ? 0 : 1;
}
