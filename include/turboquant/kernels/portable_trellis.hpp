// The trellis code in portable C++: the search for the best path, packing, and reading through a sliding window.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include <turboquant/core/dtype.hpp>
#include <turboquant/kernels/operands.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant::kernels {

/// Codes of B bits (2, 3 or 4) that are read through a window of 8 bits: position i of a sequence decodes to
/// level(w_i), w_i = (w_(i-1) << B | n_i) & 255, with n_i the new bits of position i. Sequences are closed: the last
/// position comes before the first. A key is one sequence along its coordinates. Of the values of a page, lane l is one
/// sequence: the tokens of coordinate l, then those of coordinate 16 + l, and so on, as the fragments follow each other
/// in memory.
template <unsigned B>
struct TrellisCodes {
  static_assert(B >= 2 && B <= 4, "a window of 8 bits and bytes of back pointers suit 2 to 4 bits");
  static constexpr unsigned bits = B;
  static constexpr unsigned states = 1u << (8 - B);  ///< what the next window keeps of this one
  static constexpr unsigned reach = 7 / B;           ///< earlier positions that a window reads: their bits must stay
  const std::int8_t* table = nullptr;                ///< A[16], then B[8]; every A + B in [-127, 127]

  /// +-(A[w & 15] + B[w >> 4 & 7]), minus if bit 7, the oldest, is set.
  constexpr int level(unsigned window) const {
    const int magnitude = table[window & 15u] + table[16 + (window >> 4 & 7u)];
    return (window & 128u) != 0 ? -magnitude : magnitude;
  }
};

/// Bytes of the paths of one side of a page: new bits, keys as [token][coordinate], values as [lane][group][token].
constexpr std::size_t trellis_path_bytes(std::size_t page_tokens, std::size_t dim) { return page_tokens * dim; }

/// Work space of encode_trellis_keys and encode_trellis_values.
template <unsigned B>
constexpr std::size_t trellis_scratch_bytes(std::size_t page_tokens, std::size_t dim) {
  const std::size_t length = page_tokens * dim / 16;                 // of a sequence of values
  const std::size_t keys = 3 * dim * (TrellisCodes<B>::states + 1);  // for three searches
  const std::size_t values = 2 * page_tokens * dim + length * TrellisCodes<B>::states;
  return (std::max)(keys, values);
}

/// The trellis part of a set of kernels `K`, of which it uses `to_fixed`, `final_scale` and `fragment_index`. Paths,
/// scales and bytes are the same for every compiler and optimisation level: integers after one rounding of each row.
template <class K>
struct PortableTrellis {
  /// Levels and targets of a search are in 1/128 of a level, so that (target - level)^2 >> 16 is a cost below 2^14.
  static constexpr int kTrellisUnit = 128;
  static constexpr int kTrellisRange = 127 * kTrellisUnit;
  static constexpr unsigned kAnyState = 256;

  /// levels[w] = 128 level(w), 256 of them.
  template <unsigned B>
  static void list_trellis_levels(const TrellisCodes<B>& codes, std::int16_t* levels) {
    for (unsigned w = 0; w < 256; ++w) levels[w] = static_cast<std::int16_t>(kTrellisUnit * codes.level(w));
  }

  /// path[0, length): the new bits of the sequence from state `start` to state `end` that costs least, sum of
  /// (target[i] - levels[w_i])^2 >> 16, each term rounded down. A state is the low 8 - B bits of a window; kAnyState
  /// leaves the choice. Viterbi: among equals the lowest predecessor and the lowest end state win. target and levels
  /// (256) within kTrellisRange; length >= 4; back: length * states bytes of work space. Sums are exact in 16 bits:
  /// three steps lead from any state to any other, so that no two differ by more than 3 * 16129.
  template <unsigned B>
  static void find_trellis_path(const std::int16_t* target, std::size_t length, const std::int16_t* levels,
                                unsigned start, unsigned end, std::uint8_t* back, std::uint8_t* path) {
    constexpr unsigned kStates = TrellisCodes<B>::states, kBranches = 1u << B;
    // A sum s is kept as s - 32768. A state not reached yet costs more than any path of three steps.
    constexpr std::int16_t kNothing = -32768, kUnreached = kNothing + 49151;
    std::int16_t cost[kStates];
    for (unsigned state = 0; state < kStates; ++state) {
      cost[state] = start == kAnyState || start == state ? kNothing : kUnreached;
    }
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
    unsigned state = end == kAnyState ? 0 : end;
    for (unsigned other = 1; other < kStates && end == kAnyState; ++other)
      state = cost[other] < cost[state] ? other : state;
    for (std::size_t i = length; i-- > 0;) {
      path[i] = static_cast<std::uint8_t>(state & (kBranches - 1));
      state = static_cast<unsigned>(back[i * kStates + state]) << (8 - 2 * B) | state >> B;
    }
  }

  /// A closed path of low cost: the last state is the first one's predecessor. The best path around the seam, free at
  /// both ends, tells which state to begin and end with. length >= 2 kTrellisSeam; otherwise as above.
  template <unsigned B>
  static void find_closed_trellis_path(const std::int16_t* target, std::size_t length, const std::int16_t* levels,
                                       std::uint8_t* back, std::uint8_t* path) {
    std::int16_t around[2 * kTrellisSeam];
    std::copy_n(target + length - kTrellisSeam, kTrellisSeam, around);
    std::copy_n(target, kTrellisSeam, around + kTrellisSeam);
    K::template find_trellis_path<B>(around, 2 * kTrellisSeam, levels, kAnyState, kAnyState, back, path);
    const unsigned seam = state_after<B>(path, kTrellisSeam);
    K::template find_trellis_path<B>(target, length, levels, seam, seam, back, path);
  }

  /// `count` searches of the same length: targets and paths [count][length], back: count * length * states bytes.
  template <unsigned B>
  static void find_closed_trellis_paths(const std::int16_t* targets, std::size_t count, std::size_t length,
                                        const std::int16_t* levels, std::uint8_t* back, std::uint8_t* paths) {
    for (std::size_t n = 0; n < count; ++n) {
      find_closed_trellis_path<B>(targets + n * length, length, levels, back, paths + n * length);
    }
  }

  static constexpr std::size_t kTrellisSeam = 16;  ///< positions on either side of the seam of a closed path

  /// The state that the first `length` new bits of a path lead to.
  template <unsigned B>
  static unsigned state_after(const std::uint8_t* path, std::size_t length) {
    unsigned state = 0;
    for (std::size_t i = 0; i < length; ++i) state = (state << B | path[i]) & (TrellisCodes<B>::states - 1);
    return state;
  }

  /// Codes `count` keys x [dim]. spread: standard deviation of the source in levels. With `search` targets are tried at
  /// several scales and the path with the largest <x, c>^2 / |c|^2 wins, the first among equals. rows: [count][dim];
  /// paths: [count][dim]; scales: [count], zero for the zero row, whose path is zero too. scratch:
  /// trellis_scratch_bytes(), aligned to 2.
  template <unsigned B>
  static void encode_trellis_keys(const float* rows, std::size_t count, std::size_t dim, const TrellisCodes<B>& codes,
                                  double spread, ScaleRule rule, bool search, bfloat16* scales, std::uint8_t* paths,
                                  std::uint8_t* scratch) {
    constexpr std::size_t kMost = std::size(kTrellisSearch);
    const std::size_t tries = search ? kMost : 1;
    std::int16_t levels[256], fixed[kLongest], targets[kMost * kLongest];
    list_trellis_levels(codes, levels);
    std::uint8_t* back = scratch;
    std::uint8_t* paths_tried = scratch + kMost * dim * TrellisCodes<B>::states;
    for (std::size_t t = 0; t < count; ++t) {
      const auto row = K::to_fixed(rows + t * dim, dim, fixed);
      std::uint8_t* path = paths + t * dim;
      std::memset(path, 0, dim);
      scales[t] = bfloat16{0};
      double best = 0;
      if (row.energy == 0) continue;
      for (std::size_t g = 0; g < tries; ++g) {
        const std::int32_t factor = target_factor(row.energy, dim, spread * kTrellisSearch[g]);
        for (std::size_t i = 0; i < dim; ++i) targets[g * dim + i] = target_of(fixed[i], factor);
      }
      K::template find_closed_trellis_paths<B>(targets, tries, dim, levels, back, paths_tried);
      for (std::size_t g = 0; g < tries; ++g) {
        const std::uint8_t* tried = paths_tried + g * dim;
        std::int64_t dot = 0, norm = 0;
        unsigned window = last_window<B>(tried, dim);
        for (std::size_t i = 0; i < dim; ++i) {
          window = (window << B | tried[i]) & 255u;
          const std::int32_t level = levels[window] / kTrellisUnit;
          dot += fixed[i] * level;
          norm += level * level;
        }
        if (dot <= 0) continue;
        const auto d = static_cast<double>(dot), n = static_cast<double>(norm);
        const double quality = d * d / n;
        if (quality > best) {
          best = quality;
          std::memcpy(path, tried, dim);
          scales[t] = K::final_scale(row, d, n, rule);
        }
      }
    }
  }

  /// Paths of the lanes [lane_begin, lane_end) of the values of a page, each token relative to its own root mean
  /// square; tokens from `count` to `page_tokens` count as zeros. rows: [count][dim]; paths: [lane][dim /
  /// 16][page_tokens], from lane_begin on. scratch as above.
  template <unsigned B>
  static void encode_trellis_values(const float* rows, std::size_t count, std::size_t page_tokens, std::size_t dim,
                                    const TrellisCodes<B>& codes, double spread, std::size_t lane_begin,
                                    std::size_t lane_end, std::uint8_t* paths, std::uint8_t* scratch) {
    const std::size_t groups = dim / 16, length = groups * page_tokens, lanes = lane_end - lane_begin;
    std::int16_t levels[256], row[kLongest];
    list_trellis_levels(codes, levels);
    auto* targets = reinterpret_cast<std::int16_t*>(scratch);  // as the paths
    std::uint8_t* back = scratch + 2 * lanes * length;
    std::memset(targets, 0, 2 * lanes * length);
    for (std::size_t t = 0; t < count; ++t) {
      const std::int32_t factor = target_factor(K::to_fixed(rows + t * dim, dim, row).energy, dim, spread);
      for (std::size_t group = 0; group < groups; ++group) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
          targets[(lane * groups + group) * page_tokens + t] = target_of(row[group * 16 + lane_begin + lane], factor);
        }
      }
    }
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      find_closed_trellis_path<B>(targets + lane * length, length, levels, back, paths + lane * length);
    }
  }

  /// Scales of the values of a page whose codes are all packed. scales: [count], zero for rows that their codes do not
  /// resemble. scratch as above.
  template <unsigned B>
  static void scale_trellis_values(const float* rows, std::size_t count, std::size_t page_tokens, std::size_t dim,
                                   const TrellisCodes<B>& codes, ScaleRule rule, const std::uint8_t* fragments,
                                   bfloat16* scales, std::uint8_t* scratch) {
    const std::size_t tiles = page_tokens / 16, groups = dim / 16;
    auto* fixed = reinterpret_cast<std::int16_t*>(scratch);  // [16][dim]
    std::int16_t levels[layout::kFragmentCodes];
    for (std::size_t tile = 0; tile * 16 < count; ++tile) {
      const std::size_t tokens = (std::min)(count - tile * 16, std::size_t{16});
      decltype(K::to_fixed(rows, dim, fixed)) whole[16];
      std::int64_t dot[16] = {}, norm[16] = {};
      for (std::size_t t = 0; t < tokens; ++t) {
        whole[t] = K::to_fixed(rows + (tile * 16 + t) * dim, dim, fixed + t * dim);
      }
      for (std::size_t group = 0; group < groups; ++group) {
        const std::size_t index = group * tiles + tile;
        const std::size_t before = (index == 0 ? groups * tiles : index) * layout::fragment_bytes(B);
        unpack(fragments + index * layout::fragment_bytes(B), codes, fragments + before - 16, levels);
        for (std::size_t t = 0; t < tokens; ++t) {
          std::int32_t d = 0, n = 0;
          for (std::size_t lane = 0; lane < 16; ++lane) {
            const std::int32_t level = levels[t * 16 + lane];
            d += fixed[t * dim + group * 16 + lane] * level;
            n += level * level;
          }
          dot[t] += d, norm[t] += n;
        }
      }
      for (std::size_t t = 0; t < tokens; ++t) {
        // clang turns the loop into vectors, and divides before it chooses.
        const bool resembles = dot[t] > 0;
        const double d = resembles ? static_cast<double>(dot[t]) : 1.0;
        const double n = resembles ? static_cast<double>(norm[t]) : 1.0;
        const bfloat16 scale = K::final_scale(whole[t], d, n, rule);
        scales[tile * 16 + t] = resembles ? scale : bfloat16{0};
      }
    }
  }

  /// Packs paths of one side of a page. Half h of a fragment covers the positions 8h to 8h + 7 of 16 sequences, one per
  /// lane: W = sum of n_(8h + i) << B (7 - i), plane p, byte `lane` = W >> 8 (B - 1 - p) & 255. Keys: the paths of the
  /// tokens [begin, end), as [token][dim], and with begin == 0 all codes of the page are cleared first. Values: the
  /// paths of the lanes [begin, end), as [lane][dim / 16][page_tokens].
  template <unsigned B>
  static void pack_trellis(layout::Side side, const std::uint8_t* paths, std::size_t begin, std::size_t end,
                           std::size_t page_tokens, std::size_t dim, std::uint8_t* fragments) {
    const std::size_t tiles = page_tokens / 16, groups = dim / 16;
    const bool keys = side == layout::Side::key;
    if (keys && begin == 0) std::memset(fragments, 0, tiles * groups * layout::fragment_bytes(B));
    for (std::size_t sequence = begin; sequence < end; ++sequence) {
      const std::uint8_t* path = paths + (sequence - begin) * (keys ? dim : groups * page_tokens);
      for (std::size_t group = 0; group < groups; ++group) {
        for (std::size_t tile = keys ? sequence / 16 : 0; tile < (keys ? sequence / 16 + 1 : tiles); ++tile) {
          std::uint8_t* to = fragments +
                             K::fragment_index(side, tile, group, tiles, groups) * layout::fragment_bytes(B) +
                             sequence % 16;
          for (std::size_t half = 0; half < 2; ++half) {
            std::uint32_t word = 0;
            for (std::size_t i = 0; i < 8; ++i) word = word << B | *path++;
            for (std::size_t plane = 0; plane < B; ++plane) {
              to[(half * B + plane) * 16] = static_cast<std::uint8_t>(word >> 8 * (B - 1 - plane));
            }
          }
        }
      }
    }
  }

 protected:
  // levels[16 * depth + lane] of a fragment. history: the last 16 bytes of the fragment before, its last plane.
  template <unsigned B>
  static void unpack(const std::uint8_t* fragment, const TrellisCodes<B>& codes, const std::uint8_t* history,
                     std::int16_t* levels) {
    for (std::size_t half = 0; half < 2; ++half) {
      const std::uint8_t* planes = fragment + half * B * 16;
      if (half == 1) history = planes - 16;
      for (std::size_t lane = 0; lane < 16; ++lane) {
        std::uint64_t bits = history[lane];
        for (std::size_t plane = 0; plane < B; ++plane) bits = bits << 8 | planes[16 * plane + lane];
        for (std::size_t i = 0; i < 8; ++i) {
          const auto window = static_cast<unsigned>(bits >> (7 - i) * B & 255u);
          levels[(8 * half + i) * 16 + lane] = static_cast<std::int16_t>(codes.level(window));
        }
      }
    }
  }

 private:
  static constexpr std::size_t kLongest = 1024;  // coordinates

  // Scales tried, as multiples of the root mean square.
  static constexpr double kTrellisSearch[3] = {1.0, 0.92, 1.08};

  // 128 spread / sqrt(energy / dim) in 13 binary places. The largest magnitude is at most 32 root mean squares, so that
  // products with it stay below 2^31 for spread < 63.
  static std::int32_t target_factor(std::int64_t energy, std::size_t dim, double spread) {
    if (energy == 0) return 0;
    const double deviation = std::sqrt(static_cast<double>(energy) / static_cast<double>(dim));
    return static_cast<std::int32_t>(spread * (kTrellisUnit * 8192) / deviation);
  }
  static std::int16_t target_of(std::int16_t fixed, std::int32_t factor) {
    return static_cast<std::int16_t>(
        (std::min)((std::max)((fixed * factor + 4096) >> 13, -kTrellisRange), kTrellisRange));
  }

  // The window of the last position, which comes before the first.
  template <unsigned B>
  static unsigned last_window(const std::uint8_t* path, std::size_t length) {
    unsigned window = 0;
    for (std::size_t i = length - 4; i < length; ++i) window = (window << B | path[i]) & 255u;
    return window;
  }
};

}  // namespace turboquant::kernels
