// Counter-based random bits: the same numbers on every platform, in any order, without state.
#pragma once

#include <cstdint>

namespace turboquant {
namespace detail {

inline constexpr std::uint64_t kGoldenGamma = 0x9e3779b97f4a7c15u;

/// The output function of SplitMix64: a bijection of 64 bits in which every input bit moves every output bit.
/// Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, with Stafford's variant 13.
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace detail

/// 64 random bits, a function of the three arguments alone, in integer arithmetic modulo 2^64.
///
/// As a function of `counter` this is the SplitMix64 sequence whose start state is mixed from `seed` and `stream`.
/// Seed 0 is a seed like any other. Pages and files depend on these bits: they never change.
[[nodiscard]] constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream,
                                                  std::uint64_t counter) noexcept {
  const std::uint64_t start =
      detail::mix_bits(detail::mix_bits(seed + detail::kGoldenGamma) + stream * 0xd1342543de82ef95u);
  return detail::mix_bits(start + (counter + 1) * detail::kGoldenGamma);
}

}  // namespace turboquant
