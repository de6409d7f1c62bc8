// The trellis code in portable C++: codes read through a sliding window, the search for the best path, packing, unpacking.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/core/dtype.hpp>
#include <turboquant/kernels/operands.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant::kernels {

/// Codes of B bits (2, 3 or 4) that are read through a window of 8 bits: position i of a sequence decodes to level(w_i),
/// w_i = (w_(i-1) << B | n_i) & 255, with n_i the new bits of position i and w_(-1) = 0. A key is one sequence along its
/// coordinates, a coordinate of the values of a page is one along the tokens.
template <unsigned B>
struct TrellisCodes {
  static_assert(B >= 2 && B <= 4, "a window of 8 bits and bytes of back pointers suit 2 to 4 bits");
  static constexpr unsigned bits = B;
  static constexpr unsigned states = 1u << (8 - B);  ///< what the next window remembers of this one
  const std::int8_t* table = nullptr;                ///< A[16], then B[8]; every A + B in [-127, 127]

  /// +-(A[w & 15] + B[w >> 4 & 7]), minus if bit 7, the oldest, is set.
  constexpr int level(unsigned window) const {
    const int magnitude = table[window & 15u] + table[16 + (window >> 4 & 7u)];
    return (window & 128u) != 0 ? -magnitude : magnitude;
  }
};

/// The trellis part of a set of kernels `K`, of which it uses `to_fixed` and `final_scale`. Paths, scales and bytes are the
/// same for every compiler and optimisation level: integers after one rounding of each row.
template <class K>
struct PortableTrellis {
  /// Levels and targets of a search are in 1/128 of a level, so that (target - level)^2 >> 16 is a cost below 2^14.
  static constexpr int kTrellisUnit = 128;
  static constexpr int kTrellisRange = 127 * kTrellisUnit;

  /// levels[w] = 128 level(w), 256 of them.
  template <unsigned B>
  static void list_trellis_levels(const TrellisCodes<B>& codes, std::int16_t* levels) {
    for (unsigned w = 0; w < 256; ++w) levels[w] = static_cast<std::int16_t>(kTrellisUnit * codes.level(w));
  }

  /// path[0, length): the new bits of the sequence that costs least, sum of (target[i] - levels[w_i])^2 >> 16, each term
  /// rounded down. Viterbi: among equals the lowest predecessor and the lowest end state win. target and levels (256) within
  /// kTrellisRange; back: length * states bytes of work space. Sums are exact in 16 bits: three steps lead from any state to
  /// any other, so that no two differ by more than 3 * 16129.
  template <unsigned B>
  static void find_trellis_path(const std::int16_t* target, std::size_t length, const std::int16_t* levels,
                                std::uint8_t* back, std::uint8_t* path) {
    constexpr unsigned kStates = TrellisCodes<B>::states, kBranches = 1u << B;
    // A sum s is kept as s - 32768. A state not reached yet costs more than any path of three steps.
    constexpr std::int16_t kNothing = -32768, kUnreached = kNothing + 49151;
    std::int16_t cost[kStates];
    std::fill_n(cost, kStates, kUnreached);
    cost[0] = kNothing;
    for (std::size_t i = 0; i < length; ++i) {
      std::int16_t arriving[256];
      for (unsigned state = 0; state < kStates; ++state) {
        for (unsigned bits = 0; bits < kBranches; ++bits) arriving[state * kBranches + bits] = cost[state];
      }
      const std::int16_t aim = target[i];
      for (unsigned w = 0; w < 256; ++w) {
        const auto difference = static_cast<std::int16_t>(aim - levels[w]);
        arriving[w] = static_cast<std::int16_t>(arriving[w] + (difference * difference >> 16));
      }
      // Window w = top << (8 - B) | state leads to `state`: the best of the tops.
      std::int16_t from[kStates] = {};
      std::copy_n(arriving, kStates, cost);
      for (unsigned top = 1; top < kBranches; ++top) {
        const std::int16_t* other = arriving + top * kStates;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 1  // unrolled, g++ does not vectorise it
#endif
        for (unsigned state = 0; state < kStates; ++state) {
          const bool better = other[state] < cost[state];
          from[state] = better ? static_cast<std::int16_t>(top) : from[state];
          cost[state] = better ? other[state] : cost[state];
        }
      }
      std::int16_t least = cost[0];
      for (unsigned state = 1; state < kStates; ++state) least = (std::min)(least, cost[state]);
      const int excess = i < 3 ? 0 : least - kNothing;
      for (unsigned state = 0; state < kStates; ++state) {
        cost[state] = (std::min)(static_cast<std::int16_t>(cost[state] - excess), kUnreached);
        back[i * kStates + state] = static_cast<std::uint8_t>(from[state]);
      }
    }
    unsigned state = 0;
    for (unsigned other = 1; other < kStates; ++other) state = cost[other] < cost[state] ? other : state;
    for (std::size_t i = length; i-- > 0;) {
      path[i] = static_cast<std::uint8_t>(state & (kBranches - 1));
      state = static_cast<unsigned>(back[i * kStates + state]) << (8 - 2 * B) | state >> B;
    }
  }

 protected:
  // levels[16 * depth + lane] of a fragment; `first`: it starts its sequences. Otherwise the 16 bytes before it, the last plane
  // of the fragment before, are the history.
  template <unsigned B>
  static void unpack(const std::uint8_t* fragment, const TrellisCodes<B>& codes, bool first, std::int16_t* levels) {
    for (std::size_t half = 0; half < 2; ++half) {
      const std::uint8_t* planes = fragment + half * B * 16;
      for (std::size_t lane = 0; lane < 16; ++lane) {
        std::uint64_t bits = first && half == 0 ? 0 : (planes - 16)[lane];
        for (std::size_t plane = 0; plane < B; ++plane) bits = bits << 8 | planes[16 * plane + lane];
        for (std::size_t i = 0; i < 8; ++i) {
          const auto window = static_cast<unsigned>(bits >> (7 - i) * B & 255u);
          levels[(8 * half + i) * 16 + lane] = static_cast<std::int16_t>(codes.level(window));
        }
      }
    }
  }
};

}  // namespace turboquant::kernels
