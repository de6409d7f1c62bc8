// What kernels work on: plain views without ownership. Tables come in as arguments, so that no kernel knows a codec.
#pragma once

#include <cstddef>
#include <cstdint>

#include <turboquant/core/dtype.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant::kernels {

/// R = H diag(signs) / sqrt(dim), H = base (order x order, row-major, +-1) Kronecker Sylvester(dim / order).
struct RotationView {
  std::size_t dim = 0;
  const float* signs = nullptr;  ///< dim entries +-1.0f
  const float* base = nullptr;   ///< order x order entries +-1.0f; null if order is 1
  std::size_t order = 1;
};

/// Codes of `B` bits, each an index into a table of 2^B signed levels; width 8 holds the level itself.
template <unsigned B>
struct LevelCodes {
  static constexpr unsigned bits = B;
  const std::int8_t* levels = nullptr;  ///< 2^B levels in [-127, 127] (width 8: unused)
};

/// How the scale of a coded vector follows from the vector x and its chosen levels c.
enum class ScaleRule : std::uint8_t {
  unbiased,      ///< |x|^2 / <x, c>: the estimate of <q, x> has no bias. Squared error D / (1 - D).
  least_squares  ///< <x, c> / |c|^2: the least squared error D. Shrinks by 1 - D.
};

/// The coded part of one side of one KV head of a page.
///   x[t][i] = center_scale * center[i] + scales[t] * level(t, i) + zero_points[t]
struct CodedPart {
  std::size_t dim = 0;
  std::size_t page_tokens = 0;           ///< tokens the page has room for: the stride of value fragments
  unsigned center_bits = 0;              ///< 0, 8 or 16
  const std::uint8_t* center = nullptr;  ///< dim int8 or int16 (little-endian)
  float center_scale = 0;
  const bfloat16* scales = nullptr;       ///< page_tokens
  const bfloat16* zero_points = nullptr;  ///< page_tokens, or null
  const std::uint8_t* fragments = nullptr;
  /// `begin()` of a part that is read later, to be fetched into the caches while this one is read: a hint; or null.
  const std::uint8_t* next = nullptr;

  /// The first byte of the part: its sections lie one behind the other, fragments last.
  const std::uint8_t* begin() const {
    return center_bits != 0 ? center : reinterpret_cast<const std::uint8_t*>(scales);
  }
};

/// Asks for the cache line at `address`, which need not be readable.
inline void fetch_line(const void* address) {
  // By name: g++ takes inlined functions that only fetch for ones without effect, and drops the calls.
#if defined(__GNUC__) && defined(__x86_64__)
  __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(address)));
#elif defined(__GNUC__) && defined(__aarch64__)
  __asm__ volatile("prfm pldl1keep, [%0]" : : "r"(address));
#elif defined(__GNUC__)
  __builtin_prefetch(address, 0, 3);
#else
  static_cast<void>(address);
#endif
}

/// Fetches what lies before the fragments of the part that is read later. Returns how far behind a byte of `part` the
/// same byte of that part lies; 0 without such a part.
inline std::ptrdiff_t fetch_head(const CodedPart& part) {
  if (part.next == nullptr) return 0;
  for (std::ptrdiff_t at = 0; at < part.fragments - part.begin(); at += 64) fetch_line(part.next + at);
  return static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(part.next) -
                                     reinterpret_cast<std::uintptr_t>(part.begin()));
}

/// Queries of one block, prepared: q[r] = unit[r] * normal[r], |normal| in [1, 4) at its largest coordinate, so that no
/// dot product with a stored key (at most 2^96) overflows.
struct QueryBlock {
  std::size_t rows = 0, dim = 0;
  float* normal = nullptr;   ///< [rows][dim], not rotated: for raw keys
  float* rotated = nullptr;  ///< [rows][dim]: for centres
  std::int8_t* planes =
      nullptr;  ///< [rows][plane_count][dim]: for codes. One plane: rotated ~ step * p0, p0 in [-127, 127].
  unsigned plane_count = 1;      ///< Two planes: rotated ~ step * (128 p0 + p1), p0 in [-127, 127], p1 in [-64, 63].
  float* step = nullptr;         ///< [rows]
  float* unit = nullptr;         ///< [rows], a power of two
  std::int32_t* sums = nullptr;  ///< [rows][plane_count]: of the numbers of a plane
};

/// Running softmax of one query: the largest logit seen and the sum of exp(logit - largest). sum == 0: no key seen yet.
struct SoftmaxState {
  float largest;
  float sum;
};

/// Weights of one query for the values of one part of a softmax step: p[t] * scales[t] ~ coefficient * weights[t].
struct WeightSums {
  float coefficient;  ///< 1/16383 of the largest weight of the step; 0: all weights vanish
  float probability;  ///< sum of p: weight of the value centre
  float zero_point;   ///< sum of p[t] * zero_points[t]
};

inline constexpr int kWeightMax = 16383;  // two planes of 7 bits

}  // namespace turboquant::kernels
