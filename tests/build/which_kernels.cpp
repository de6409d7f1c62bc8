// Names the kernels that a program built without any flag for the CPU runs, after comparing what they write and compute
// with the portable ones.
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <span>
#include <turboquant/turboquant.hpp>
#include <vector>

namespace {

constexpr std::size_t kTokens = 200, kDim = 128, kHeads = 6;

using Cache = turboquant::KVCache<turboquant::TQ4, turboquant::TQ3>;

// The output of the last token's queries over keys and values with a pattern; empty if the library refuses.
std::vector<float> attend_with(turboquant::Isa isa, std::uint32_t format) {
  turboquant::CacheConfig config;
  config.layers = {{.kv_heads = 2, .head_dim = kDim, .format = format}};
  Cache cache(config, isa);
  std::vector<float> rows(kTokens * 2 * kDim), queries(kHeads * kDim), out(kHeads * kDim);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>((i * 37 + i / 256) % 23) - 11.0f;
  for (std::size_t i = 0; i < queries.size(); ++i) queries[i] = static_cast<float>(i % 7) / 16 - 0.2f;
  turboquant::BatchItem item;
  if (cache.create_sequence(item.sequence) != turboquant::Status::ok) return {};
  item.keys = item.values = {rows.data(), kTokens, 2, kDim};
  item.queries = {queries.data(), 1, kHeads, kDim};
  item.out = {out.data(), 1, kHeads, kDim};
  const std::span<const turboquant::BatchItem> batch(&item, 1);
  return turboquant::attend(cache, 0, batch) == turboquant::Status::ok ? out : std::vector<float>();
}

}  // namespace

int main() {
  for (const std::uint32_t format : {0u, 1u}) {
    const std::vector<float> expected = attend_with(turboquant::Isa::portable, format);
    const std::vector<float> found = attend_with(turboquant::best_isa(), format);
    if (expected.empty() || found.size() != expected.size()) return 1;
    double error = 0, energy = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      error += std::pow(static_cast<double>(found[i]) - static_cast<double>(expected[i]), 2);
      energy += std::pow(static_cast<double>(expected[i]), 2);
    }
    if (!(std::sqrt(error / energy) < 2e-4)) return 1;  // the bound between any two sets
  }
  std::puts(to_string(turboquant::best_isa()));
}
