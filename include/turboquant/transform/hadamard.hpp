// Hadamard matrices of the supported head sizes: which sizes there are, and the Paley matrices they are built from.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <string>

namespace turboquant {

inline constexpr std::size_t kMinDim = 32;    ///< smallest head size
inline constexpr std::size_t kMaxDim = 1024;  ///< largest head size

/// Order m of the base matrix of size `dim`: H(dim) = base(m) Kronecker Sylvester(dim / m), that is
/// `H[a * 2^k + i][b * 2^k + j] = base[a][b] * (-1)^popcount(i & j)` with 2^k = dim / m.
/// 1, 12, 20, 28 or 36; 0 for an unsupported size.
[[nodiscard]] constexpr std::size_t base_order(std::size_t dim) noexcept {
  if (dim < kMinDim || dim > kMaxDim || dim % 16 != 0) return 0;
  const std::size_t odd = dim >> std::countr_zero(dim);
  return odd == 1 ? 1 : odd <= 9 ? odd * 4 : 0;
}

/// True for the head sizes that have an exact rotation: multiples of 16 of the form 2^k * {1, 3, 5, 7, 9} from 32 to
/// 1024.
[[nodiscard]] constexpr bool is_supported_dim(std::size_t dim) noexcept { return base_order(dim) != 0; }

/// Empty for a supported size; else a sentence with the rule and the two nearest supported sizes, the next below and
/// the next above, or the two at the end of the list.
[[nodiscard]] inline std::string why_unsupported_dim(std::size_t dim) {
  if (is_supported_dim(dim)) return {};
  // Clamped so that both exist: 48 is the second smallest size, 896 the second largest.
  std::size_t below = dim < kMinDim ? kMinDim : dim > 896 ? 896 : dim;
  std::size_t above = dim < 48 ? 48 : dim > kMaxDim ? kMaxDim : dim;
  while (!is_supported_dim(below)) --below;
  while (!is_supported_dim(above)) ++above;
  return "head size " + std::to_string(dim) +
         " is not supported: it must be a multiple of 16 of the form 2^k * {1, 3, 5, 7, 9} from 32 to 1024; the "
         "nearest supported sizes are " +
         std::to_string(below) + " and " + std::to_string(above);
}

namespace detail {

/// A base matrix, row-major, of entries +-1.0f.
template <std::size_t kOrder>
struct alignas(64) BaseMatrix {
  std::array<float, kOrder * kOrder> entries{};
};

/// The quadratic character modulo a prime q: 0 for 0, +1 for squares, -1 for the others.
template <std::size_t kPrime>
[[nodiscard]] constexpr std::array<int, kPrime> quadratic_character() noexcept {
  std::array<int, kPrime> character{};
  for (std::size_t i = 1; i < kPrime; ++i) character[i] = -1;
  for (std::size_t i = 1; i < kPrime; ++i) character[i * i % kPrime] = 1;
  return character;
}

/// Entry (row, column) of Paley's bordered matrix of order q + 1: zero on the diagonal, +1 in the first row, `corner`
/// in the first column, elsewhere the character of row - column.
template <std::size_t kPrime>
[[nodiscard]] constexpr int bordered_entry(const std::array<int, kPrime>& character, int corner, std::size_t row,
                                           std::size_t column) noexcept {
  if (row == column) return 0;
  if (row == 0) return 1;
  if (column == 0) return corner;
  return character[(row + kPrime - column) % kPrime];
}

/// Paley's first construction, for q = 3 modulo 4: I + S of order q + 1, with S skew-symmetric.
/// Source: Paley, On orthogonal matrices, 1933.
template <std::size_t kPrime>
[[nodiscard]] constexpr BaseMatrix<kPrime + 1> paley_one() noexcept {
  static_assert(kPrime % 4 == 3);
  constexpr std::size_t kOrder = kPrime + 1;
  const auto character = quadratic_character<kPrime>();
  BaseMatrix<kOrder> matrix;
  for (std::size_t row = 0; row < kOrder; ++row) {
    for (std::size_t column = 0; column < kOrder; ++column) {
      matrix.entries[row * kOrder + column] = float(int(row == column) + bordered_entry(character, -1, row, column));
    }
  }
  return matrix;
}

/// Paley's second construction, for q = 1 modulo 4: with C symmetric of order q + 1, the matrix of order 2 (q + 1)
/// whose 2 x 2 blocks are C[a][b] {{1, 1}, {1, -1}} off the diagonal and {{1, -1}, {-1, -1}} on it.
template <std::size_t kPrime>
[[nodiscard]] constexpr BaseMatrix<2 * (kPrime + 1)> paley_two() noexcept {
  static_assert(kPrime % 4 == 1);
  constexpr std::size_t kOrder = 2 * (kPrime + 1);
  const auto character = quadratic_character<kPrime>();
  BaseMatrix<kOrder> matrix;
  for (std::size_t row = 0; row < kOrder; ++row) {
    for (std::size_t column = 0; column < kOrder; ++column) {
      const bool first = row % 2 == 0 && column % 2 == 0, last = row % 2 == 1 && column % 2 == 1;
      matrix.entries[row * kOrder + column] =
          row / 2 == column / 2 ? (first ? 1.0f : -1.0f)
                                : float(bordered_entry(character, 1, row / 2, column / 2) * (last ? -1 : 1));
    }
  }
  return matrix;
}

inline constexpr BaseMatrix<1> kBase1{{1.0f}};
inline constexpr BaseMatrix<12> kBase12 = paley_one<11>();
inline constexpr BaseMatrix<20> kBase20 = paley_one<19>();
inline constexpr BaseMatrix<28> kBase28 = paley_two<13>();
inline constexpr BaseMatrix<36> kBase36 = paley_two<17>();

}  // namespace detail

/// The base matrix of an order that base_order returns: order x order entries +-1.0f, row-major, aligned to 64 bytes.
/// Exact: its rows are orthogonal in integers. Symmetric for 1, 28 and 36, not for 12 and 20. nullptr for any other
/// order.
[[nodiscard]] constexpr const float* base_matrix(std::size_t order) noexcept {
  switch (order) {
    case 1:
      return detail::kBase1.entries.data();
    case 12:
      return detail::kBase12.entries.data();
    case 20:
      return detail::kBase20.entries.data();
    case 28:
      return detail::kBase28.entries.data();
    case 36:
      return detail::kBase36.entries.data();
    default:
      return nullptr;
  }
}

}  // namespace turboquant
