// ScalarQuant<B>: values on a min-max grid per token, with scale and zero point.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <turboquant/codec/codec.hpp>

namespace turboquant {

/// x ~ zero_point + scale * level, level = code - 2^(B-1); B = 2, 3, 4 or 8 bits per coordinate plus two bf16 per
/// vector. Values only. Without search the error of a coordinate is at most half a step of the stored grid, one more
/// rounding of the zero point (2^-8 of it) at the ends; with search less on average. `PolarQuant<B>` has less error in
/// fewer bytes: see docs. Known as the value codec of the QJL write-ups (arXiv 2406.03482, section 3.2).
template <unsigned B>
struct ScalarQuant {
  static_assert(B == 2 || B == 3 || B == 4 || B == 8, "ScalarQuant has 2, 3, 4 or 8 bits");
  static constexpr unsigned bits = B;              ///< per coordinate, without scales
  static constexpr std::uint16_t id = 0x0200 + B;  ///< frozen number in files
  /// As in messages and tables.
  static constexpr const char* name = B == 2 ? "scalar2" : B == 3 ? "scalar3" : B == 4 ? "scalar4" : "scalar8";
  static constexpr bool zero_points = true;  ///< stored beside the scales

  /// The code family, for kernels.
  static constexpr kernels::LevelCodes<B> codes() {
    if constexpr (B == 8) {
      return {};
    } else {
      return {levels_};
    }
  }

  /// Bytes of work space of encode_parts.
  static constexpr std::size_t scratch_bytes(std::size_t page_tokens, std::size_t dim) { return page_tokens * dim; }

  /// A part is a token.
  /// @{
  static constexpr bool by_token(Side) { return true; }
  static constexpr std::size_t parts(Side, std::size_t page_tokens) { return page_tokens; }
  /// @}

  /// rows: of the tokens [begin, min(end, count)), rotated and centred; scratch: scratch_bytes(). The scale rule does
  /// not matter; with options.search grids narrower than minimum to maximum are tried.
  template <class K>
  static void encode_parts(Side side, const float* rows, std::size_t count, std::size_t begin, std::size_t end,
                           EncodeOptions options, const CodedTarget& target, std::uint8_t* scratch) {
    if (begin == 0) {
      std::fill(target.scales + count, target.scales + target.page_tokens, bfloat16{0});
      std::fill(target.zero_points + count, target.zero_points + target.page_tokens, bfloat16{0});
    }
    end = (std::min)(end, count);
    if (begin >= end && begin != 0) return;
    for (std::size_t t = begin; t < end; ++t) {
      target.scales[t] = K::template encode_minmax<B>(rows + (t - begin) * target.dim, target.dim, options.search,
                                                      target.zero_points[t], scratch + (t - begin) * target.dim);
    }
    K::template pack<B>(side, scratch, begin, end, target.page_tokens, target.dim, target.fragments);
  }

 private:
  static constexpr std::int8_t levels_[16] = {
      -(1 << (B - 1)) + 0,  -(1 << (B - 1)) + 1,  -(1 << (B - 1)) + 2,  -(1 << (B - 1)) + 3,
      -(1 << (B - 1)) + 4,  -(1 << (B - 1)) + 5,  -(1 << (B - 1)) + 6,  -(1 << (B - 1)) + 7,
      -(1 << (B - 1)) + 8,  -(1 << (B - 1)) + 9,  -(1 << (B - 1)) + 10, -(1 << (B - 1)) + 11,
      -(1 << (B - 1)) + 12, -(1 << (B - 1)) + 13, -(1 << (B - 1)) + 14, -(1 << (B - 1)) + 15};
};

}  // namespace turboquant
