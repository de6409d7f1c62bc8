// The smallest program that uses the library: one sequence, created and counted.
#include <turboquant/turboquant.hpp>

int main() {
  turboquant::KVCache<turboquant::TQ4> cache(turboquant::CacheConfig{});
  turboquant::SequenceId id;
  const bool created = cache.create_sequence(id) == turboquant::Status::ok;
  return created && cache.length(id) == 0 ? 0 : 1;
}
