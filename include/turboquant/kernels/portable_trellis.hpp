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

/// The trellis part of a set of kernels `K`, which gives `to_fixed` and `final_scale`. Path, bytes and scale are the same for
/// every compiler and optimisation level: 16-bit integers after one rounding of the row.
template <class K>
struct PortableTrellis {
  /// Levels and targets of the search are in 1/128 of a level, so that a squared difference shifted right by 16 bits is a cost
  /// below 2^14.
  static constexpr int kTrellisUnit = 128;
  static constexpr int kTrellisRange = 127 * kTrellisUnit;

  /// levels[w] = 128 level(w), 256 of them.
  template <unsigned B>
  static void list_trellis_levels(const TrellisCodes<B>& codes, std::int16_t* levels) {
    for (unsigned w = 0; w < 256; ++w) levels[w] = static_cast<std::int16_t>(kTrellisUnit * codes.level(w));
  }

  /// The new bits path[0, length) of the sequence with the least sum of costs (target[i] - levels[w_i])^2 >> 16, each rounded
  /// down, from window 0. Viterbi: of equal costs the lowest predecessor and the lowest end state win. target, levels:
  /// within kTrellisRange; back: work space of length * states bytes. Costs are exact in 16 bits: a path reaches any state from
  /// any other in three steps, so that no two states differ by more than 3 * 16129.
  template <unsigned B>
  static void find_trellis_path(const std::int16_t* target, std::size_t length, const std::int16_t* levels,
                                std::uint8_t* back, std::uint8_t* path) {
    constexpr unsigned kStates = TrellisCodes<B>::states, kBranches = 1u << B;
    // A cost c is kept as c - 32768. What state 0 has not reached yet costs more than any path of three steps.
    constexpr std::int16_t kLowest = -32768, kUnreached = kLowest + 49151;
    std::int16_t cost[kStates];
    std::fill_n(cost, kStates, kUnreached);
    cost[0] = kLowest;
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
        for (unsigned state = 0; state < kStates; ++state) {
          const auto better = static_cast<std::int16_t>(-static_cast<int>(other[state] < cost[state]));
          from[state] = (std::max)(from[state], static_cast<std::int16_t>(better & static_cast<int>(top)));
          cost[state] = (std::min)(cost[state], other[state]);
        }
      }
      std::int16_t least = cost[0];
      for (unsigned state = 1; state < kStates; ++state) least = (std::min)(least, cost[state]);
      // At most 65535 apart, and the difference to `least` at most 49151.
      const auto excess = static_cast<std::int16_t>(i < 3 ? 0 : least - kLowest);
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
};

}  // namespace turboquant::kernels
