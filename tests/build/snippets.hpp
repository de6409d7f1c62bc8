// The names that the code in README.md and docs/ takes for granted: an engine around the library. Only compiled.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <span>
#include <vector>

#include <turboquant/cache/stream.hpp>
#include <turboquant/turboquant.hpp>

namespace engine {

struct Request {
  turboquant::SequenceId id;
  std::size_t new_tokens;
};
struct Arena {
  std::byte* take(std::size_t bytes, std::size_t alignment);
  void give_back(void* memory, std::size_t bytes);
};
struct Pool {
  template <class Body>
  void run(std::size_t tasks, Body&& body) {
    for (std::size_t i = 0; i < tasks; ++i) body(i);
  }
};

extern turboquant::CacheConfig config;
extern turboquant::KVCache<turboquant::TQ4> cache;
extern turboquant::AttentionParams params;
extern turboquant::Status status;
extern turboquant::SequenceId sequence, prompt;
extern turboquant::BatchItem item;
extern std::array<turboquant::BatchItem, 2> items;
extern std::vector<turboquant::BatchItem> batch;
extern std::vector<Request> sequences;
extern std::size_t layers, layer, kv_heads, heads, head_dim, length_before, begin, m, s, mine, threads;
extern std::vector<const float*> k, v, q;
extern std::vector<float*> out;
extern turboquant::ConstRows keys, values, queries;
extern turboquant::Rows output;
extern std::byte *block, *workspace;
extern Arena arena;
extern Pool pool;

turboquant::ConstRows rotated(const std::vector<const float*>& rows, std::size_t position);
void barrier();

}  // namespace engine
