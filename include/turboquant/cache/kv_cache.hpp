// KVCache<F...>: the compressed KV cache of a model, layers of one or several formats.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <turboquant/cache/cache_core.hpp>

namespace turboquant {

namespace detail {

// Reaches what stands behind a cache and a page codec; for the functions of attention/attend.hpp, pages.hpp and of
// files.
struct CacheAccess {
  template <class Cache>
  static auto& core(Cache& cache) noexcept {
    return cache.core_;
  }
  template <class Codec>
  static const Layer& layer(const Codec& codec) noexcept {
    return codec.layer_;
  }
};

}  // namespace detail

/// The KV cache of a model. Each layer has one of the formats F... (LayerShape::format).
///
/// Tokens are appended by `attend` (attention/attend.hpp). A call that fails changes nothing and says why. Calls on
/// different sequences may run concurrently, also if they share pages; on one sequence const calls (length, read,
/// logits, attend-only items) may run concurrently with each other, all others need it for themselves. The object can
/// be neither copied nor moved.
template <class... F>
class KVCache {
  static_assert(sizeof...(F) > 0, "KVCache needs at least one format, e.g. KVCache<TQ4>");

 public:
  /// Throws std::invalid_argument with why_invalid(config), or std::bad_alloc. Takes no page memory yet. isa: the
  /// kernels to use, portable ones if it is not supported; bytes do not depend on it.
  explicit KVCache(CacheConfig config, Isa isa = best_isa())
      : isa_(is_supported(isa) ? isa : Isa::portable),
        core_(std::move(config),
              std::array<const detail::Operations*, sizeof...(F)>{detail::OperationsOf<F>::on(isa_)...}) {}

  /// The kernels that run.
  Isa isa() const noexcept { return isa_; }

  /// As given.
  const CacheConfig& config() const noexcept { return core_.config(); }

  /// An empty sequence. Errors: out_of_memory.
  Status create_sequence(SequenceId& created) noexcept { return core_.create_sequence(created); }

  /// A new sequence with the first `length` tokens of `source`, sharing its pages and raw tiles; afterwards the two are
  /// independent. Errors: unknown_sequence, bad_shape (beyond the length), behind_window, out_of_memory.
  Status fork(SequenceId source, std::size_t length, SequenceId& created) noexcept {
    return core_.fork(source, length, created);
  }

  /// Shortens all layers to `length`, layers ahead of others included. By at most rollback_tokens below the longest
  /// length it has had, it leaves no trace; deeper, later tokens start a new page. Errors: unknown_sequence, bad_shape
  /// (beyond the length), behind_window.
  Status truncate(SequenceId sequence, std::size_t length) noexcept { return core_.truncate(sequence, length); }

  /// Removes the positions [begin, end), of all layers; later tokens move down by end - begin. Codes stay as they are,
  /// in split entries, and raw rows are moved. Where the range is raw, and no page that is read holds a token behind
  /// it, it is as if the tokens had never come; otherwise later tokens start a new page, and a rollback below the codes
  /// is no longer exact. Layers decide that for themselves: in one with a window, which has let go of pages, the next
  /// page may begin elsewhere than in one without. Erasing among first_tokens leaves fewer of them raw. Keys keep the
  /// rotary positions they came with: docs/engines.md. Errors: unknown_sequence, bad_shape (beyond the length, or
  /// layers of unequal length), behind_window (a windowed layer would have to show tokens that it has freed),
  /// out_of_memory.
  Status erase(SequenceId sequence, std::size_t begin, std::size_t end) noexcept {
    return core_.erase(sequence, begin, end);
  }

  /// After the verification of a tree (BatchItem::tree): of the tokens from `begin` on keeps those at begin +
  /// tokens[i], i ascending, as if the others had never come. They must be raw, which holds for a tree of at most
  /// min(recent_tokens, rollback_tokens) tokens at the end. Errors: unknown_sequence, bad_shape (not ascending, beyond
  /// the length, coded already, or layers of unequal length), behind_window, out_of_memory.
  Status keep(SequenceId sequence, std::size_t begin, std::span<const std::uint32_t> tokens) noexcept {
    return core_.keep(sequence, begin, tokens);
  }

  /// Sets memory aside so that `tokens` more tokens cannot fail for lack of memory, in any layer, nor wait for the
  /// operating system to provide it; what is left of it is freed when they have come, or with the sequence, or by a
  /// reserve of 0 tokens. A later fork shares raw tiles and so may use some of it up: reserve again. Errors:
  /// unknown_sequence, bad_shape (above kMostTokens), out_of_memory.
  Status reserve(SequenceId sequence, std::size_t tokens) noexcept { return core_.reserve(sequence, tokens); }

  /// Codes the raw tail into pages, the last of them short; first_tokens stay raw. For idle, static or exported
  /// sequences: it gives up exact rollback below the sealed length. Errors: unknown_sequence, bad_shape (layers of
  /// unequal length), out_of_memory.
  Status seal(SequenceId sequence) noexcept { return core_.seal(sequence); }

  /// Ends a sequence; its id is stale from now on. Unknown ids are ignored, and so are sequences of a pending plan:
  /// they live on; drop the plan and release again. length() tells.
  void release(SequenceId sequence) noexcept { core_.release(sequence); }

  /// Committed tokens: the minimum over the layers. 0 for an unknown sequence.
  std::size_t length(SequenceId sequence) const noexcept { return core_.length(sequence); }

  /// Keys and values from position `begin` on, as the newest position sees them: raw rows as stored (bf16), codes
  /// decoded and rotated back. keys: [tokens][kv_heads][head_dim], values: [tokens][kv_heads][value_dim]; either may be
  /// no rows. Errors: unknown_sequence, bad_layer, bad_shape, behind_window.
  Status read(SequenceId sequence, std::size_t layer, std::size_t begin, Rows keys, Rows values) const noexcept {
    return core_.read(sequence, layer, begin, keys, values);
  }

  /// Bytes in pages, tails and tables; true bits per coordinate.
  MemoryUse memory() const noexcept { return core_.memory(); }

 private:
  friend struct detail::CacheAccess;
  Isa isa_;
  detail::CacheCore core_;
};

}  // namespace turboquant
