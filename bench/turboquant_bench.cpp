// Google Benchmark suite: rotation, encoding, logits and decode attention for every width, at several head sizes and
// contexts. One KV head, one thread. The counter per_unit is the time per vector (rotate, encode) or per token of
// context (logits, attend).
#include <benchmark/benchmark.h>

#include <turboquant/kernels/portable.hpp>
#include <turboquant/transform/rotation.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "filled_cache.hpp"

namespace {

using turboquant::TQ2, turboquant::TQ3, turboquant::TQ4, turboquant::TQ8;

void count_units(benchmark::State& state, std::size_t units) {
  state.counters["per_unit"] = benchmark::Counter(
      static_cast<double>(units), benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

std::size_t argument(const benchmark::State& state, std::size_t index) {
  return static_cast<std::size_t>(state.range(index));
}

void rotate(benchmark::State& state) {
  const std::size_t dim = argument(state, 0);
  const turboquant::Rotation rotation(42, dim);
  const std::size_t order = turboquant::base_order(dim);
  const turboquant::kernels::RotationView view{dim, rotation.signs(),
                                               order > 1 ? turboquant::base_matrix(order) : nullptr, order};
  std::vector<float> row = random_floats(dim, 1);
  for (auto _ : state) {
    turboquant::kernels::Portable::rotate(view, row.data(), row.data());
    benchmark::ClobberMemory();
  }
  count_units(state, 1);
}

template <class F>
void encode(benchmark::State& state) {
  const std::size_t dim = argument(state, 0);
  turboquant::CacheConfig config;
  config.layers[0].head_dim = static_cast<std::uint32_t>(dim);
  turboquant::KVCache<F> cache(config);
  constexpr std::size_t kCoded = 1024;
  const RandomTokens source(kCoded + config.recent_tokens, dim);
  for (auto _ : state) {
    turboquant::SequenceId sequence;
    require_ok(cache.create_sequence(sequence), "create_sequence");
    source.append_to(cache, sequence, source.tokens);
    cache.release(sequence);
  }
  count_units(state, 2 * kCoded);
}

template <class F>
void logits(benchmark::State& state) {
  const std::size_t dim = argument(state, 0);
  const FilledCache<F> cache(argument(state, 1), dim);
  const std::vector<float> query = random_floats(dim, 3);
  std::vector<float> out(cache.tokens());
  for (auto _ : state) {
    cache.compute_logits(query.data(), 1, out.data());
    benchmark::ClobberMemory();
  }
  count_units(state, cache.tokens());
}

template <class F>
void attend(benchmark::State& state) {
  const std::size_t dim = argument(state, 0), heads = argument(state, 2);
  FilledCache<F> cache(argument(state, 1), dim);
  const std::vector<float> queries = random_floats(heads * dim, 3);
  std::vector<float> out(heads * dim);
  for (auto _ : state) {
    cache.attend(queries.data(), heads, out.data());
    benchmark::ClobberMemory();
  }
  count_units(state, cache.tokens());
}

void encode_sizes(benchmark::internal::Benchmark* b) { b->ArgNames({"dim"})->ArgsProduct({{64, 128, 256}}); }
void logits_sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"dim", "tokens"})->ArgsProduct({{64, 128, 256}, {1024, 4096, 65536}});
}
void attend_sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"dim", "tokens", "heads"})->ArgsProduct({{64, 128, 256}, {1024, 4096, 65536}, {1, 4, 8}});
}

BENCHMARK(rotate)->ArgNames({"dim"})->ArgsProduct({{64, 96, 128, 256, 576}});
BENCHMARK_TEMPLATE(encode, TQ8)->Apply(encode_sizes);
BENCHMARK_TEMPLATE(encode, TQ4)->Apply(encode_sizes);
BENCHMARK_TEMPLATE(encode, TQ3)->Apply(encode_sizes);
BENCHMARK_TEMPLATE(encode, TQ2)->Apply(encode_sizes);
BENCHMARK_TEMPLATE(logits, TQ8)->Apply(logits_sizes);
BENCHMARK_TEMPLATE(logits, TQ4)->Apply(logits_sizes);
BENCHMARK_TEMPLATE(logits, TQ3)->Apply(logits_sizes);
BENCHMARK_TEMPLATE(logits, TQ2)->Apply(logits_sizes);
BENCHMARK_TEMPLATE(attend, TQ8)->Apply(attend_sizes);
BENCHMARK_TEMPLATE(attend, TQ4)->Apply(attend_sizes);
BENCHMARK_TEMPLATE(attend, TQ3)->Apply(attend_sizes);
BENCHMARK_TEMPLATE(attend, TQ2)->Apply(attend_sizes);

}  // namespace

BENCHMARK_MAIN();
