// One-bit sketches of inner products, Qjl and TurboProd<B>: encode and estimate, to reproduce the papers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include <turboquant/codec/codebook.hpp>
#include <turboquant/core/random.hpp>
#include <turboquant/kernels/portable.hpp>
#include <turboquant/transform/rotation.hpp>

namespace turboquant {

/// Quantized Johnson-Lindenstrauss: k becomes |k| and the signs of S k, one bit per coordinate.
///   <q, k> ~ |k| sqrt(pi / 2) / sqrt(dim) <S q, sign(S k)>,   S orthonormal, sign(0) = +1
/// Unbiased over seeds up to 1 / (4 dim), which the asymptotic constant leaves. S is two random rotations in a row: one
/// alone does not make every vector look Gaussian. Source: QJL, arXiv 2406.03482, definition 3.1 (there with Gaussian
/// rows).
class Qjl {
 public:
  /// Requires is_supported_dim(dim).
  Qjl(std::uint64_t seed, std::size_t dim) noexcept
      : first_(random_bits(seed, kStream, 0), dim), second_(random_bits(seed, kStream, 1), dim) {}

  /// Coordinates of a vector.
  std::size_t dim() const noexcept { return first_.dim(); }

  /// out = S x. x, out: [dim], may be the same.
  void project(const float* x, float* out) const noexcept {
    kernels::Portable::rotate(detail::view_of(first_), x, out);
    kernels::Portable::rotate(detail::view_of(second_), out, out);
  }

  /// Stores sign(S k) as dim bits (bit i % 8 of byte i / 8; 1: not negative) and returns |k|. signs: [dim / 8].
  float encode(const float* k, std::uint8_t* signs) const noexcept {
    float projected[kMaxDim];
    project(k, projected);
    std::fill_n(signs, dim() / 8, std::uint8_t{0});
    double energy = 0;
    for (std::size_t i = 0; i < dim(); ++i) {
      if (projected[i] >= 0) signs[i / 8] = static_cast<std::uint8_t>(signs[i / 8] | 1u << i % 8);
      energy += static_cast<double>(k[i]) * static_cast<double>(k[i]);
    }
    return static_cast<float>(std::sqrt(energy));
  }

  /// The estimate of <q, k> from S q [dim] and what encode left. A zero vector gives exactly 0.
  float estimate(const float* projected_q, float norm, const std::uint8_t* signs) const noexcept {
    double sum = 0;
    for (std::size_t i = 0; i < dim(); ++i) {
      const auto q = static_cast<double>(projected_q[i]);
      sum += (signs[i / 8] >> i % 8 & 1) != 0 ? q : -q;
    }
    constexpr double kHalfPi = 1.5707963267948966;
    return static_cast<float>(static_cast<double>(norm) * std::sqrt(kHalfPi / static_cast<double>(dim())) * sum);
  }

 private:
  static constexpr std::uint64_t kStream = 0x514a4c;  // "QJL"

  Rotation first_, second_;
};

/// B bits per coordinate: `PolarQuant<B - 1>` of the rotated vector (plain nearest level, least-squares scale) and a
/// Qjl sketch of what is left. Unbiased like Qjl, with variance about pi/2 times the residual energy over dim. Source:
/// TurboQuant, arXiv 2504.19874, algorithm 2 (TurboQuant_prod). `PolarQuant<B>` with the unbiased scale has no bias
/// either and less variance at equal bits; tests/codec/qjl_test.cpp shows it.
template <unsigned B>
class TurboProd {
  static_assert(B == 2 || B == 3 || B == 4, "TurboProd has 2, 3 or 4 bits");

 public:
  /// A coded key.
  struct Code {
    float scale = 0;                  ///< of the levels
    float residual_norm = 0;          ///< length of what the levels leave
    std::uint8_t levels[kMaxDim];     ///< dim() indices into `Codebook<B - 1>::levels`
    std::uint8_t signs[kMaxDim / 8];  ///< of the sketch, dim() bits as in Qjl::encode
  };
  /// A query, prepared for any number of keys.
  struct Query {
    float rotated[kMaxDim];    ///< R q, dim() coordinates
    float projected[kMaxDim];  ///< S R q, dim() coordinates
  };

  /// Requires is_supported_dim(dim).
  TurboProd(std::uint64_t seed, std::size_t dim) noexcept : rotation_(seed, dim), sketch_(seed, dim) {}

  /// Coordinates of a vector.
  std::size_t dim() const noexcept { return rotation_.dim(); }

  /// k: [dim].
  void encode(const float* k, Code& code) const noexcept {
    float rotated[kMaxDim], residual[kMaxDim];
    kernels::Portable::rotate(detail::view_of(rotation_), k, rotated);
    code.scale = to_float(kernels::Portable::template encode_levels<B - 1>(
        rotated, dim(), Book::magnitudes.data(), Book::kSpread, kernels::ScaleRule::least_squares, false, code.levels));
    for (std::size_t i = 0; i < dim(); ++i) residual[i] = rotated[i] - code.scale * level(code, i);
    code.residual_norm = sketch_.encode(residual, code.signs);
  }

  /// q: [dim].
  void prepare(const float* q, Query& query) const noexcept {
    kernels::Portable::rotate(detail::view_of(rotation_), q, query.rotated);
    sketch_.project(query.rotated, query.projected);
  }

  /// The estimate of <q, k>; `sketch` false leaves the second stage out (biased).
  float estimate(const Query& query, const Code& code, bool sketch = true) const noexcept {
    double sum = 0;
    for (std::size_t i = 0; i < dim(); ++i)
      sum += static_cast<double>(query.rotated[i]) * static_cast<double>(level(code, i));
    const auto coarse = static_cast<float>(static_cast<double>(code.scale) * sum);
    return sketch ? coarse + sketch_.estimate(query.projected, code.residual_norm, code.signs) : coarse;
  }

 private:
  using Book = Codebook<B - 1>;

  static float level(const Code& code, std::size_t i) noexcept {
    return static_cast<float>(Book::levels[code.levels[i]]);
  }

  Rotation rotation_;
  Qjl sketch_;
};

}  // namespace turboquant
