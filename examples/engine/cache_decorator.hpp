// A cache in front of another one.
#pragma once

#include "kv_cache.hpp"

#include <chrono>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

namespace engine {

/// Passes every call on.
class CacheDecorator : public KvCache {
 public:
  explicit CacheDecorator(std::unique_ptr<KvCache> inner) : inner_(std::move(inner)) {}

  std::size_t create() override { return inner_->create(); }
  std::size_t fork(std::size_t sequence, std::size_t length) override { return inner_->fork(sequence, length); }
  void truncate(std::size_t sequence, std::size_t length) override { inner_->truncate(sequence, length); }
  void release(std::size_t sequence) override { inner_->release(sequence); }
  std::size_t length(std::size_t sequence) const override { return inner_->length(sequence); }
  void attend(std::size_t layer, std::span<const AttentionPart> parts) override { inner_->attend(layer, parts); }
  std::size_t bytes() const override { return inner_->bytes(); }

 private:
  std::unique_ptr<KvCache> inner_;
};

/// Processor time of this process, in seconds: on one thread the time that work takes when nothing else runs. Asking
/// takes a microsecond in the kernel, after which caches are not what they were.
inline double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// Times `attend` in steps of decoding: those without a prompt's tokens among them. By the wall clock, as attention of
/// one layer may take less than ten microseconds.
class TimedCache final : public CacheDecorator {
 public:
  /// A part of more tokens than `most_tokens`, drafts included, is of a prompt.
  TimedCache(std::unique_ptr<KvCache> inner, std::size_t most_tokens)
      : CacheDecorator(std::move(inner)), most_tokens_(most_tokens) {}

  void attend(std::size_t layer, std::span<const AttentionPart> parts) override {
    const auto begin = std::chrono::steady_clock::now();
    CacheDecorator::attend(layer, parts);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    for (const AttentionPart& part : parts) {
      if (part.tokens > most_tokens_) return;
    }
    if (layer == 0) seconds_.push_back(0);
    seconds_.back() += time.count();
  }

  /// Seconds of each step, all layers.
  const std::vector<double>& seconds() const { return seconds_; }

 private:
  std::size_t most_tokens_;
  std::vector<double> seconds_;
};

}  // namespace engine
