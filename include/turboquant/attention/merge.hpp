// Merging of partial attention results: exact, for split contexts and for sinks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include <turboquant/core/rows.hpp>

namespace turboquant {
namespace detail {

// exp(x) for x <= 0, without a result or an intermediate that is NaN for x = -infinity.
inline float weight_of(float lse, float largest) {
  return lse == -std::numeric_limits<float>::infinity() ? 0.0f : std::exp(lse - largest);
}

}  // namespace detail

/// out, lse := the attention over both key sets, of which `out`, `lse` and `other_out`, `other_lse` are the partial results:
///   out = (e^lse out + e^other_lse other_out) / (e^lse + e^other_lse),   lse = log(e^lse + e^other_lse)
/// out, other_out: [tokens][heads][dim], same shape; lse, other_lse: [tokens][heads]. Exact up to rounding, associative up to
/// rounding. A part over no keys (lse -infinity) changes nothing, bit for bit. `out` and `other_out` may not overlap.
inline void merge_partials(Rows out, float* lse, ConstRows other_out, const float* other_lse) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (std::size_t t = 0; t < out.tokens; ++t) {
    for (std::size_t h = 0; h < out.heads; ++h) {
      float& a = lse[t * out.heads + h];
      const float b = other_lse[t * out.heads + h];
      if (b == kNothing) continue;
      const float largest = (std::max)(a, b);
      const float weight_a = detail::weight_of(a, largest), weight_b = detail::weight_of(b, largest);
      const float sum = weight_a + weight_b;
      constexpr std::size_t kChunk = 256;
      for (std::size_t begin = 0; begin < out.dim; begin += kChunk) {
        const std::size_t n = (std::min)(kChunk, out.dim - begin);
        Rows to = out;
        to.data = static_cast<std::byte*>(out.data) + begin * size_of(out.type);
        to.dim = n;
        ConstRows from = other_out;
        from.data = static_cast<const std::byte*>(other_out.data) + begin * size_of(other_out.type);
        from.dim = n;
        float x[kChunk], y[kChunk];
        load_row(ConstRows(to), t, h, x);
        load_row(from, t, h, y);
        if (a == kNothing) {
          store_row(to, t, h, y);
        } else {
          for (std::size_t i = 0; i < n; ++i) x[i] = (weight_a * x[i] + weight_b * y[i]) / sum;
          store_row(to, t, h, x);
        }
      }
      a = a == kNothing ? b : largest + std::log(sum);
    }
  }
}

/// Lets the sinks take part: out *= e^lse / (e^lse + e^sink), lse = log(e^lse + e^sink). sink_logits: one per head, or empty:
/// nothing to do. Over no keys the output stays zero and lse becomes the sink.
inline void finish_partials(Rows out, float* lse, std::span<const float> sink_logits) {
  if (sink_logits.empty()) return;
  for (std::size_t t = 0; t < out.tokens; ++t) {
    for (std::size_t h = 0; h < out.heads; ++h) {
      float& a = lse[t * out.heads + h];
      const float largest = (std::max)(a, sink_logits[h]);
      const float weight = detail::weight_of(a, largest), sink = detail::weight_of(sink_logits[h], largest);
      const float factor = weight / (weight + sink);
      constexpr std::size_t kChunk = 256;
      for (std::size_t begin = 0; begin < out.dim; begin += kChunk) {
        Rows part = out;
        part.data = static_cast<std::byte*>(out.data) + begin * size_of(out.type);
        part.dim = (std::min)(kChunk, out.dim - begin);
        float x[kChunk];
        load_row(ConstRows(part), t, h, x);
        for (std::size_t i = 0; i < part.dim; ++i) x[i] *= factor;
        store_row(part, t, h, x);
      }
      a = largest + std::log(weight + sink);
    }
  }
}

}  // namespace turboquant
