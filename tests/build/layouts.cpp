// Types have one layout whatever the flags of a unit, and objects may lie wherever their alignment allows (B05).
#include "layouts.hpp"

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include <turboquant/turboquant.hpp>

namespace {

using Cache = turboquant::KVCache<turboquant::TQ4>;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::puts(what);
}

void compare(const Extents& wanted, const Extents& found) {
  expect(wanted.count == found.count, "the units list different types");
  for (std::size_t i = 0; i < wanted.count; ++i) {
    const Extent &a = wanted.first[i], &b = found.first[i];
    expect(std::strcmp(a.type, b.type) == 0 && a.size == b.size && a.alignment == b.alignment, a.type);
    expect(a.alignment <= 64, a.type);
  }
}

static_assert(alignof(Cache) <= alignof(std::max_align_t), "malloc and char arrays would not do");

// A cache at an address that is a multiple of its alignment and of nothing more.
void place_anywhere() {
  alignas(64) static std::byte memory[sizeof(Cache) + 128];
  turboquant::CacheConfig config;
  config.layers[0].head_dim = 64;
  for (std::size_t at = alignof(Cache); at <= 64; at += alignof(Cache)) {
    auto* cache = ::new (memory + at) Cache(config);
    turboquant::SequenceId id;
    expect(cache->create_sequence(id) == turboquant::Status::ok, "create_sequence");
    std::vector<float> rows(80 * 64, 0.5F), out(64);
    turboquant::BatchItem item;
    item.sequence = id;
    item.keys = item.values = {rows.data(), 80, 1, 64};
    item.queries = {rows.data(), 1, 1, 64};
    item.out = {out.data(), 1, 1, 64};
    expect(turboquant::attend(*cache, 0, std::span<const turboquant::BatchItem>(&item, 1)) == turboquant::Status::ok,
           "attend");
    expect(out[0] > 0.49F && out[0] < 0.51F, "output");
    cache->~Cache();
  }
}

// Types that are values, in containers that move them about.
void keep_in_containers() {
  std::map<int, std::unique_ptr<Cache>> caches;
  std::vector<turboquant::CacheConfig> configs;
  std::vector<turboquant::AttentionPlan> plans(3);
  for (int i = 0; i < 20; ++i) {
    configs.emplace_back().layers[0].head_dim = 64;
    caches.emplace(i, std::make_unique<Cache>(configs.back()));
  }
  plans.resize(100);
  for (const auto& [key, cache] : caches) expect(cache->config().layers[0].head_dim == 64, "a cache in a map");
}

}  // namespace

int main() {
  compare(plain_extents(), avx2_extents());
  compare(plain_extents(), avx512_extents());
  place_anywhere();
  keep_in_containers();
  return failures == 0 ? 0 : 1;
}
