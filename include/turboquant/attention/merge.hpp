// Merging of partial attention results: exact, for split contexts and for sinks.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <turboquant/core/rows.hpp>

namespace turboquant {
namespace detail {

// Minus infinity: no key. A test of bits, so that -ffast-math cannot remove it.
inline bool is_nothing(float lse) { return std::bit_cast<std::uint32_t>(lse) == 0xff800000u; }

// exp(lse - largest), 0 for no key.
inline float weight_of(float lse, float largest) { return is_nothing(lse) ? 0.0f : std::exp(lse - largest); }

}  // namespace detail

/// out, lse := the attention over both key sets, of which `out`, `lse` and `other_out`, `other_lse` are the partial
/// results:
///   out = (e^lse out + e^other_lse other_out) / (e^lse + e^other_lse),   lse = log(e^lse + e^other_lse)
/// out, other_out: [tokens][heads][dim], same shape; lse, other_lse: [tokens][heads]. Exact up to rounding, associative
/// up to rounding. A part over no keys (lse -infinity) changes nothing, bit for bit. Requires equal
/// shapes and no null pointer; `out` and `other_out` may not overlap.
inline void merge_partials(Rows out, float* lse, ConstRows other_out, const float* other_lse) {
  for (std::size_t t = 0; t < out.tokens; ++t) {
    for (std::size_t h = 0; h < out.heads; ++h) {
      float& a = lse[t * out.heads + h];
      const float b = other_lse[t * out.heads + h];
      if (detail::is_nothing(b)) continue;
      const bool fresh = detail::is_nothing(a);
      const float largest = fresh ? b : (std::max)(a, b);
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
        if (fresh) {
          store_row(to, t, h, y);
        } else {
          for (std::size_t i = 0; i < n; ++i) x[i] = (weight_a * x[i] + weight_b * y[i]) / sum;
          store_row(to, t, h, x);
        }
      }
      a = fresh ? b : largest + std::log(sum);
    }
  }
}

/// Lets the sinks take part: out *= e^lse / (e^lse + e^sink), lse = log(e^lse + e^sink). sink_logits: one per head, or
/// empty: nothing to do. Over no keys the output stays zero and lse becomes the sink. Requires as many sinks as heads.
inline void finish_partials(Rows out, float* lse, std::span<const float> sink_logits) {
  if (sink_logits.empty()) return;
  for (std::size_t t = 0; t < out.tokens; ++t) {
    for (std::size_t h = 0; h < out.heads; ++h) {
      float& a = lse[t * out.heads + h];
      if (detail::is_nothing(sink_logits[h])) continue;
      const float largest = detail::is_nothing(a) ? sink_logits[h] : (std::max)(a, sink_logits[h]);
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
