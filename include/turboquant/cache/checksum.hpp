// The checksum of saved sections: 64 bits, four independent lanes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/core/random.hpp>

namespace turboquant::detail {

// The 8 bytes at p as a little-endian number.
inline std::uint64_t word_at(const std::uint8_t* p) noexcept {
  std::uint64_t word = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&word, p, sizeof word);
  } else {
    for (unsigned i = 0; i < 8; ++i) word |= std::uint64_t{p[i]} << 8 * i;
  }
  return word;
}

// Checksum of `count` bytes; finds damage, not intent. Word i of 8 bytes goes to lane i % 4. Every step is a bijection
// of the lane for a given word and of the word for a given lane, and so is joining the lanes: two inputs of one length
// that differ in one aligned word only never have the same sum. The last 32 bytes are padded with zeros, which the
// length tells from zeros of the data. `seed` ties a section to the one before it.
inline std::uint64_t checksum(const std::uint8_t* bytes, std::size_t count, std::uint64_t seed) noexcept {
  const auto step = [](std::uint64_t lane, std::uint64_t word) noexcept {
    return std::rotl((lane ^ word) * 0xd6e8feb86659fd93u, 29);
  };
  std::uint64_t a = mix_bits(seed), b = mix_bits(seed + 1), c = mix_bits(seed + 2), d = mix_bits(seed + 3);
  const auto block = [&](const std::uint8_t* p) noexcept {
    a = step(a, word_at(p));
    b = step(b, word_at(p + 8));
    c = step(c, word_at(p + 16));
    d = step(d, word_at(p + 24));
  };
  std::size_t at = 0;
  for (; count - at >= 32; at += 32) block(bytes + at);
  if (at < count) {
    std::uint8_t last[32] = {};
    std::memcpy(last, bytes + at, count - at);
    block(last);
  }
  return mix_bits(step(step(step(step(count, a), b), c), d));
}

}  // namespace turboquant::detail
