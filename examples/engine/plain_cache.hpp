// Keys and values as they are, in f32 or f16, with the fastest attention over them that we can write: what every other
// cache is measured against.
#pragma once

#include "kv_cache.hpp"

#include <cstddef>
#include <memory>
#include <type_traits>

namespace engine {

/// Attention of one query token: queries and out [heads][head_dim] of the heads of one KV head, keys and values
/// [tokens][head_dim]. Vectorised for this CPU (bench/baseline.hpp). head_dim: a multiple of 16.
template <class T>
requires std::is_same_v<T, float> || std::is_same_v<T, std::uint16_t>
void attend_rows(const float* queries, std::size_t heads, const T* keys, const T* values, std::size_t tokens,
                 std::size_t head_dim, float* out);

/// A cache in f32 or in f16 (IEEE half). Sequences are contiguous; a fork is a copy.
std::unique_ptr<KvCache> make_f32_cache(const AttentionShape& shape);
std::unique_ptr<KvCache> make_f16_cache(const AttentionShape& shape);

}  // namespace engine
