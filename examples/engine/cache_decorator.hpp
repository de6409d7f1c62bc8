// A cache in front of another one.
#pragma once

#include "kv_cache.hpp"

#include <ctime>
#include <memory>
#include <utility>

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

/// Processor time of this process: on one thread the time that work takes when nothing else runs.
inline double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// What asking for it takes: about a microsecond, where the attention of one layer takes tens of them.
inline double processor_clock_seconds() {
  constexpr int kCalls = 1000;
  const double begin = processor_seconds();
  for (int call = 1; call < kCalls; ++call) static_cast<void>(processor_seconds());
  return (processor_seconds() - begin) / kCalls;
}

/// Adds up the processor time of `attend` in steps of decoding: without a prompt's tokens among them.
class TimedCache final : public CacheDecorator {
 public:
  /// A part of more tokens than `most_tokens`, drafts included, is of a prompt.
  TimedCache(std::unique_ptr<KvCache> inner, std::size_t most_tokens)
      : CacheDecorator(std::move(inner)), most_tokens_(most_tokens) {}

  void attend(std::size_t layer, std::span<const AttentionPart> parts) override {
    const double begin = processor_seconds();
    CacheDecorator::attend(layer, parts);
    const double end = processor_seconds();
    for (const AttentionPart& part : parts) {
      if (part.tokens > most_tokens_) return;
    }
    seconds_ += end - begin - clock_seconds_;
  }

  double seconds() const { return seconds_; }

 private:
  std::size_t most_tokens_;
  double seconds_ = 0, clock_seconds_ = processor_clock_seconds();
};

}  // namespace engine
