// Deterministic test data: Gaussian numbers from an integer hash, equal on every platform.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace oracle {

/// A well mixed 64-bit hash of three integers (the finaliser of splitmix64 after each).
constexpr std::uint64_t hash(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t state = 0;
  for (const std::uint64_t word : {a, b, c}) {
    state += word + 0x9e3779b97f4a7c15U;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9U;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebU;
    state ^= state >> 31;
  }
  return state;
}

/// Uniform in (0, 1), a function of its arguments alone.
constexpr double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return (static_cast<double>(hash(seed, stream, index) >> 11) + 0.5) * 0x1p-53;
}

/// N(0, 1) by Box and Muller, a function of its arguments alone. Snapped to multiples of 2^-20, because log and cos of
/// two C libraries differ in the last bit.
double gaussian(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

}  // namespace oracle
