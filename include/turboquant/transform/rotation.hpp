// The random rotation of a cache: its signs. The arithmetic is a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include <turboquant/core/random.hpp>
#include <turboquant/kernels/operands.hpp>
#include <turboquant/transform/hadamard.hpp>

namespace turboquant {

/// R = H diag(s) / sqrt(d): signs first, then the Hadamard matrix of transform/hadamard.hpp.
///
/// The signs are a function of (seed, dim) alone, the same on every platform; seed 0 is a seed like any other.
/// Orthogonal, so R^-1 = diag(s) H^T / sqrt(d). Allocates nothing, throws nothing.
class Rotation {
 public:
  /// Requires is_supported_dim(dim); any other size gives dim() == 0, a rotation of nothing.
  explicit constexpr Rotation(std::uint64_t seed, std::size_t dim) noexcept : dim_(is_supported_dim(dim) ? dim : 0) {
    for (std::size_t i = 0; i < dim_; ++i) {
      signs_[i] = random_bits(seed, kSignStream | dim, i) >> 63 != 0 ? -1.0f : 1.0f;
    }
  }

  /// Coordinates; 0 for an unsupported size.
  [[nodiscard]] constexpr std::size_t dim() const noexcept { return dim_; }

  /// dim() signs, each +1.0f or -1.0f, aligned to 64 bytes.
  [[nodiscard]] constexpr const float* signs() const noexcept { return signs_; }

 private:
  // "SIGN" above the dimension: no other use of the seed shares these bits.
  static constexpr std::uint64_t kSignStream = std::uint64_t(0x5349474e) << 32;

  alignas(64) float signs_[kMaxDim]{};
  std::size_t dim_;
};

namespace detail {

/// The rotation as kernels take it.
inline kernels::RotationView view_of(const Rotation& rotation) noexcept {
  const std::size_t order = base_order(rotation.dim());
  return {rotation.dim(), rotation.signs(), base_matrix(order), order};
}

}  // namespace detail

}  // namespace turboquant
