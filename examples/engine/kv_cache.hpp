// What the engine wants from a KV cache. Nothing here knows how keys and values are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace engine {

/// Sizes of one layer; all layers of a model are alike.
struct AttentionShape {
  std::size_t layers = 1, heads = 1, kv_heads = 1, head_dim = 128;
  std::size_t group() const { return heads / kv_heads; }  // query heads per KV head
};

/// One sequence's part of a step, in one layer. Keys and queries come after rotary embedding.
struct AttentionPart {
  std::size_t sequence = 0, tokens = 0;
  const float* queries = nullptr;  // [tokens][heads][head_dim]
  const float* keys = nullptr;     // [tokens][kv_heads][head_dim]
  const float* values = nullptr;   // the same
  float* out = nullptr;            // [tokens][heads][head_dim]
  std::size_t first_key = 0;       // keys before this one are there, but no query attends to them
};

/// Calls throw std::runtime_error if the cache refuses them.
class KvCache {
 public:
  KvCache() = default;
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
  virtual ~KvCache() = default;

  virtual std::size_t create() = 0;
  virtual std::size_t fork(std::size_t sequence, std::size_t length) = 0;
  virtual void truncate(std::size_t sequence, std::size_t length) = 0;
  virtual void release(std::size_t sequence) = 0;
  virtual std::size_t length(std::size_t sequence) const = 0;  // tokens that all layers have

  /// Appends the keys and values of all parts to one layer and attends with their queries, each to the tokens up to its
  /// own.
  virtual void attend(std::size_t layer, std::span<const AttentionPart> parts) = 0;

  virtual std::size_t bytes() const = 0;  // keys and values of all sequences, everything included
};

}  // namespace engine
