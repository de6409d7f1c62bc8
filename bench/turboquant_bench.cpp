// Google Benchmark suite: rotation, encoding, logits and decode attention for every width, at several head sizes and
// contexts; loading a saved sequence. One KV head, one thread. The counter per_unit is the time per vector (rotate,
// encode) or per token of context (logits, attend). load reports bytes per second, beside a plain copy of the same
// bytes.
#include <benchmark/benchmark.h>

#include <turboquant/kernels/portable.hpp>
#include <turboquant/transform/rotation.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
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

/// Slabs that stay: neither side of the comparison pays for pages that the system hands out for the first time.
struct KeptSlabs {
  turboquant::MemorySource behind = turboquant::default_memory_source();
  std::vector<std::pair<void*, std::size_t>> free;

  ~KeptSlabs() {
    for (const auto& [memory, bytes] : free) behind.release(nullptr, memory, bytes);
  }
  turboquant::MemorySource source() { return {this, &take, &keep}; }

 private:
  static void* take(void* context, std::size_t bytes, std::size_t alignment) {
    auto& self = *static_cast<KeptSlabs*>(context);
    for (auto& kept : self.free) {
      if (kept.second != bytes) continue;
      void* memory = kept.first;
      kept = self.free.back();
      self.free.pop_back();
      return memory;
    }
    return self.behind.allocate(nullptr, bytes, alignment);
  }
  static void keep(void* context, void* memory, std::size_t bytes) {
    static_cast<KeptSlabs*>(context)->free.emplace_back(memory, bytes);
  }
};

/// A saved sequence of 8 KV heads of 128 coordinates, all of it coded.
template <class F>
struct SavedSequence {
  KeptSlabs slabs;
  turboquant::KVCache<F> cache;
  std::vector<unsigned char> bytes;
  std::size_t read = 0;

  explicit SavedSequence(std::size_t tokens) : cache(config(slabs)) {
    turboquant::SequenceId sequence;
    require_ok(cache.create_sequence(sequence), "create_sequence");
    const std::vector<float> rows = random_floats(64 * 8 * 128, 1);
    turboquant::BatchItem item;
    item.sequence = sequence;
    item.keys = item.values = turboquant::ConstRows(rows.data(), 64, 8, 128);
    for (std::size_t t = 0; t < tokens; t += 64) {
      require_ok(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1)), "append");
    }
    require_ok(turboquant::save(cache, sequence, {this, &write_to}), "save");
    cache.release(sequence);
  }
  turboquant::ByteSource source() {
    read = 0;
    return {this, &read_from};
  }

 private:
  static turboquant::CacheConfig config(KeptSlabs& slabs) {
    turboquant::CacheConfig config;
    config.layers[0].kv_heads = 8;
    config.recent_tokens = config.rollback_tokens = 0;
    config.memory = slabs.source();
    return config;
  }
  static bool write_to(void* context, const void* from, std::size_t count) {
    const auto* begin = static_cast<const unsigned char*>(from);
    auto& to = static_cast<SavedSequence*>(context)->bytes;
    to.insert(to.end(), begin, begin + count);
    return true;
  }
  static std::size_t read_from(void* context, void* to, std::size_t count) {
    auto& self = *static_cast<SavedSequence*>(context);
    count = (std::min)(count, self.bytes.size() - self.read);
    std::memcpy(to, self.bytes.data() + self.read, count);
    self.read += count;
    return count;
  }
};

template <class F>
void load(benchmark::State& state) {
  SavedSequence<F> saved(argument(state, 0));
  for (auto _ : state) {
    turboquant::SequenceId sequence;
    require_ok(turboquant::load(saved.cache, saved.source(), sequence), "load");
    saved.cache.release(sequence);
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(saved.bytes.size()) * state.iterations());
}

template <class F>
void load_as_memcpy(benchmark::State& state) {
  const SavedSequence<F> saved(argument(state, 0));
  std::vector<unsigned char> copy(saved.bytes.size());
  for (auto _ : state) {
    std::memcpy(copy.data(), saved.bytes.data(), copy.size());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(saved.bytes.size()) * state.iterations());
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
BENCHMARK_TEMPLATE(load, TQ4)->ArgName("tokens")->Arg(32768);
BENCHMARK_TEMPLATE(load_as_memcpy, TQ4)->ArgName("tokens")->Arg(32768);

}  // namespace

BENCHMARK_MAIN();
