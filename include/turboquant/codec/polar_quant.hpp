// PolarQuant<B>: length and direction; a rotated coordinate becomes the index of the nearest Lloyd-Max level.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <turboquant/codec/codebook.hpp>
#include <turboquant/codec/codec.hpp>

namespace turboquant {

/// x ~ scale * level(code), B = 1, 2, 3, 4 or 8 bits per coordinate plus a bf16 scale per vector. B = 8 is the uniform
/// int8 grid. The name follows the community's use; the paper of that name (arXiv 2502.02617) codes polar angles. Mean
/// squared error of random directions, least-squares scale, d = 128, with scale search: see docs and tests/codec.
/// Source: TurboQuant, arXiv 2504.19874, section 3.1 (MSE-optimal quantizer), with integer levels and a searched scale.
template <unsigned B>
struct PolarQuant {
  static_assert(B == 1 || B == 2 || B == 3 || B == 4 || B == 8, "PolarQuant has 1, 2, 3, 4 or 8 bits");
  static constexpr unsigned bits = B;              ///< per coordinate, without scales
  static constexpr std::uint16_t id = 0x0100 + B;  ///< frozen number in files
  /// As in messages and tables.
  static constexpr const char* name = B == 1   ? "polar1"
                                      : B == 2 ? "polar2"
                                      : B == 3 ? "polar3"
                                      : B == 4 ? "polar4"
                                               : "polar8";
  static constexpr bool zero_points = false;                ///< stored beside the scales
  static constexpr unsigned query_planes = B == 8 ? 2 : 1;  ///< int8 planes of the query

  /// The code family, for kernels.
  static constexpr kernels::LevelCodes<B> codes() {
    if constexpr (B == 8) {
      return {};
    } else {
      return {Codebook<B>::levels.data()};
    }
  }

  /// Bytes of work space of encode_parts.
  static constexpr std::size_t scratch_bytes(std::size_t page_tokens, std::size_t dim) { return page_tokens * dim; }

  /// A part is a token.
  /// @{
  static constexpr bool by_token(Side) { return true; }
  static constexpr std::size_t parts(Side, std::size_t page_tokens) { return page_tokens; }
  /// @}

  /// rows: of the tokens [begin, min(end, count)), rotated and centred; scratch: scratch_bytes().
  template <class K>
  static void encode_parts(Side side, const float* rows, std::size_t count, std::size_t begin, std::size_t end,
                           EncodeOptions options, const CodedTarget& target, std::uint8_t* scratch) {
    if (begin == 0) std::fill(target.scales + count, target.scales + target.page_tokens, bfloat16{0});
    end = (std::min)(end, count);
    if (begin >= end && begin != 0) return;
    for (std::size_t t = begin; t < end; ++t) {
      const float* row = rows + (t - begin) * target.dim;
      std::uint8_t* row_codes = scratch + (t - begin) * target.dim;
      if constexpr (B == 8) {
        target.scales[t] = K::encode_int8(row, target.dim, options.scale, row_codes);
      } else {
        target.scales[t] = K::template encode_levels<B>(row, target.dim, Codebook<B>::magnitudes.data(),
                                                        Codebook<B>::kSpread, options.scale, options.search, row_codes);
      }
    }
    K::template pack<B>(side, scratch, begin, end, target.page_tokens, target.dim, target.fragments);
  }
};

}  // namespace turboquant
