// TrellisQuant<B>: the codes of a vector are one path through a trellis, read through a sliding window of 8 bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <turboquant/codec/codec.hpp>
#include <turboquant/kernels/portable_trellis.hpp>

namespace turboquant {

/// Standard deviation of the source of a trellis code, in level units.
inline constexpr double kTrellisSpread = 34;
/// Constants of the levels, A[16] then B[8]: window w decodes to +-(A[w & 15] + B[w >> 4 & 7]). Trained on normal
/// numbers of standard deviation kTrellisSpread; bench/train_trellis.cpp reproduces them. Frozen: stored codes mean
/// nothing without them.
template <unsigned B>
inline constexpr std::array<std::int8_t, 24> kTrellisConstants{};
/// @cond
template <>
inline constexpr std::array<std::int8_t, 24> kTrellisConstants<2>{-22, 16,  -7,  47, 40, 12,  -32, -12,
                                                                  5,   -37, -5,  28, -7, -60, 20,  -26,  //
                                                                  31,  29,  -28, 4,  -5, -8,  11,  -31};
template <>
inline constexpr std::array<std::int8_t, 24> kTrellisConstants<3>{-1, 44, -53, -33, 26,  13, -10, -21,
                                                                  17, 33, -34, -20, 53,  7,  -5,  -74,  //
                                                                  15, -9, 0,   -31, -19, 16, 29,  -1};
template <>
inline constexpr std::array<std::int8_t, 24> kTrellisConstants<4>{-48, -32, 17, -18, 34,  25,  -39, -1,
                                                                  -25, 81,  10, 44,  -59, -12, -7,  5,  //
                                                                  7,   13,  21, -3,  -13, 33,  -24, -36};
/// @endcond

/// x ~ scale * level(window), B = 2, 3 or 4 new bits per coordinate plus a bf16 scale per vector: the bytes of
/// `PolarQuant<B>`, about a third less error. A level depends on the last 8 bits, so each code also chooses what the
/// next ones can say, and the encoder (Viterbi) looks for the best sequence instead of the nearest level. Sequences are
/// closed, so that no bits are spent on a start. Keys: one sequence along the coordinates of a token. Values: each
/// token relative to its own root mean square; 16 sequences, each along the page's tokens of every 16th coordinate, one
/// coordinate after the other. Mean squared error of random directions, d = 128, least-squares scale, search:
/// 0.077, 0.0203, 0.0055; values of pages of 64: 0.078, 0.0210, 0.0058.
/// Source: trellis-coded quantization, Marcellin and Fischer, IEEE Trans. Commun. 38 (1990); a table computed from the
/// window, and closed sequences, as in QTIP, arXiv 2406.11235, sections 3 and 4.
template <unsigned B>
struct TrellisQuant {
  static_assert(B >= 2 && B <= 4, "TrellisQuant has 2, 3 or 4 bits");
  static constexpr unsigned bits = B;              ///< per coordinate, without scales
  static constexpr std::uint16_t id = 0x0300 + B;  ///< frozen number in files
  /// As in messages and tables.
  static constexpr const char* name = B == 2 ? "trellis2" : B == 3 ? "trellis3" : "trellis4";
  static constexpr bool zero_points = false;   ///< stored beside the scales
  static constexpr unsigned query_planes = 1;  ///< int8 planes of the query

  /// The code family, for kernels.
  static constexpr kernels::TrellisCodes<B> codes() { return {kTrellisConstants<B>.data()}; }

  /// Bytes of work space of encode_parts.
  static constexpr std::size_t scratch_bytes(std::size_t page_tokens, std::size_t dim) {
    return kernels::trellis_path_bytes(page_tokens, dim) + kernels::trellis_scratch_bytes<B>(page_tokens, dim);
  }

  /// Keys: a part is a token. Values: 16 parts are a lane each, the last one finds the scales.
  /// @{
  static constexpr bool by_token(Side side) { return side == Side::key; }
  static constexpr std::size_t parts(Side side, std::size_t page_tokens) {
    return side == Side::key ? page_tokens : kLanes + 1;
  }
  /// @}

  /// rows: keys of the tokens [begin, min(end, count)), all values; rotated and centred. scratch: scratch_bytes(),
  /// aligned to 2. The scale search is for keys: the tokens of a page share the paths of values.
  template <class K>
  static void encode_parts(Side side, const float* rows, std::size_t count, std::size_t begin, std::size_t end,
                           EncodeOptions options, const CodedTarget& target, std::uint8_t* scratch) {
    std::uint8_t* work = scratch + kernels::trellis_path_bytes(target.page_tokens, target.dim);
    if (begin == 0) std::fill(target.scales + count, target.scales + target.page_tokens, bfloat16{0});
    if (side == Side::key) {
      end = (std::min)(end, count);
      if (begin >= end && begin != 0) return;
      K::template encode_trellis_keys<B>(rows, end - begin, target.dim, codes(), kTrellisSpread, options.scale,
                                         options.search, target.scales + begin, scratch, work);
      K::template pack_trellis<B>(side, scratch, begin, end, target.page_tokens, target.dim, target.fragments);
      return;
    }
    const std::size_t lanes = (std::min)(end, kLanes);
    if (begin < lanes) {
      K::template encode_trellis_values<B>(rows, count, target.page_tokens, target.dim, codes(), kTrellisSpread, begin,
                                           lanes, scratch, work);
      K::template pack_trellis<B>(side, scratch, begin, lanes, target.page_tokens, target.dim, target.fragments);
    }
    if (end > kLanes) {
      K::template scale_trellis_values<B>(rows, count, target.page_tokens, target.dim, codes(), options.scale,
                                          target.fragments, target.scales, work);
    }
  }

 private:
  static constexpr std::size_t kLanes = 16;
};

}  // namespace turboquant
