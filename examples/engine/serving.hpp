// Many requests at once: continuous batching, a shared prompt, chunked prefill, speculative decoding.
#pragma once

#include "kv_cache.hpp"
#include "model.hpp"
#include "sampler.hpp"

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace engine {

struct Request {
  std::vector<Token> prompt;    // behind the shared one
  std::size_t new_tokens = 64;  // to generate
};

struct ServingOptions {
  std::size_t batch = 16;         // sequences at a time
  std::size_t chunk_tokens = 64;  // of prompts per step, of all sequences together, at least one
  std::size_t draft_tokens = 0;   // proposed per sequence and step; 0: no speculation
  Sampling sampling{};
};

struct ServingReport {
  std::vector<std::vector<Token>> texts;  // the new tokens of each request
  std::size_t steps = 0, new_tokens = 0, drafted = 0, accepted = 0;
  std::size_t largest_bytes = 0;  // of the cache, after a step
  double decode_seconds = 0;      // of steps without prompt tokens
  std::size_t decode_tokens = 0;  // generated in them
  double prompt_seconds = 0;      // of all other steps, the shared prompt's included
};

/// Answers all requests, each behind `shared_prompt`, which is computed once and forked. What a request is answered
/// depends on neither batch, chunks nor drafts. A request needs a prompt, or there must be a shared one. `advance` is
/// called once per finished request.
ServingReport serve(const Model& model, KvCache& cache, std::span<const Token> shared_prompt,
                    std::span<const Request> requests, const ServingOptions& options,
                    const std::function<void()>& advance = {});

/// What followed the last occurrence, before the end, of the longest possible ending of `text` of 2 to 6 tokens; at
/// most `count` tokens, none if no ending has occurred before.
std::vector<Token> draft_by_lookup(std::span<const Token> text, std::size_t count);

}  // namespace engine
