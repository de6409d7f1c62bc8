// What the two plug-ins and their host hand to each other.
#pragma once

#include <cstddef>
#include <span>
#include <turboquant/turboquant.hpp>
#include <vector>

using SharedCache = turboquant::KVCache<turboquant::TQ4>;

/// The functions of a plug-in, as describe_plugin fills them in.
struct Plugin {
  SharedCache* (*create)();
  void (*destroy)(SharedCache*);
  /// Appends `count` tokens that follow from `first`. False if refused.
  bool (*append)(SharedCache&, turboquant::SequenceId, std::size_t first, std::size_t count);
  /// Sum over the output of one query; negative if refused.
  float (*attend)(SharedCache&, turboquant::SequenceId);
};

inline Plugin functions_of_this_module() {
  constexpr std::size_t kDim = 64;
  return {[]() -> SharedCache* {
            turboquant::CacheConfig config;
            config.layers[0].head_dim = kDim;
            config.recent_tokens = 16;
            return new SharedCache(config);
          },
          [](SharedCache* cache) { delete cache; },
          [](SharedCache& cache, turboquant::SequenceId id, std::size_t first, std::size_t count) {
            std::vector<float> rows(count * kDim);
            for (std::size_t i = 0; i < rows.size(); ++i)
              rows[i] = static_cast<float>((first * kDim + i) * 37 % 23) - 11.0F;
            turboquant::BatchItem item;
            item.sequence = id;
            item.keys = item.values = {rows.data(), count, 1, kDim};
            return turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1)) ==
                   turboquant::Status::ok;
          },
          [](SharedCache& cache, turboquant::SequenceId id) {
            std::vector<float> query(kDim, 0.25F), out(kDim);
            turboquant::BatchItem item;
            item.sequence = id;
            item.queries = {query.data(), 1, 1, kDim};
            item.out = {out.data(), 1, 1, kDim};
            if (!(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1)) ==
                  turboquant::Status::ok)) {
              return -1.0F;
            }
            float sum = 1000;
            for (const float x : out) sum += x;
            return sum;
          }};
}
