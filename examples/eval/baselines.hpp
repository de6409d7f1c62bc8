// What others use, from public definitions: f16, the block formats q8_0 and q4_0, KIVI and TurboQuant_prod.
#pragma once

#include "exact_layer.hpp"
#include "subject.hpp"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace turboquant_eval {

constexpr std::size_t kBlock = 32;  // numbers that share one scale

/// x' = f16(x). 16 bits per coordinate.
void round_f16(std::span<float> numbers);

/// Per block d = f16(max|x| / 127), q = round(x / d), x' = q d. 8.5 bits per coordinate.
/// Requires a multiple of kBlock numbers.
void round_q8_0(std::span<float> numbers);

/// Per block d = f16(m / -8), m the number of largest magnitude with its sign, q = floor(x / d + 8.5) limited to
/// 0..15, x' = (q - 8) d. 4.5 bits per coordinate. Requires a multiple of kBlock numbers.
void round_q4_0(std::span<float> numbers);

/// Rounds a token's row, its heads one after another.
using RoundRow = std::function<void(std::span<float>)>;

/// q4_0 after the library's own rotation of every head, rotated back. 4.5 bits per coordinate.
RoundRow rotated_q4_0(std::uint64_t seed, std::size_t dim);

/// The nearest Lloyd-Max levels for the head's root mean square, in bf16, after the same rotation: TurboQuant's Q_mse.
/// `bits` is 4, 3 or 2; bits + 16 / dim per coordinate.
RoundRow rotated_levels(unsigned bits, std::uint64_t seed, std::size_t dim);

/// The numbers of one group between their minimum and maximum: z = f16(min), d = f16((max - min) / (2^bits - 1)),
/// q = round((x - z) / d) limited to 0 .. 2^bits - 1, x' = z + q d.
void round_min_max(std::span<float> group, unsigned bits);

/// KIVI's values, rows [tokens][width]: round_min_max of each token's groups of kBlock numbers.
void round_tokens(std::span<float> rows, std::size_t width, unsigned bits);

/// KIVI's keys, rows [tokens][width]: round_min_max of each channel's groups of `group` tokens.
void round_channels(std::span<float> rows, std::size_t width, unsigned bits, std::size_t group);

/// True bits per number of `count` numbers in such groups: 32 bits of every group are z and d, also of a last short
/// one.
double min_max_bits(unsigned bits, std::size_t count, std::size_t group);

/// The layer in each of these formats. A token's row is its KV heads one after another, as block formats store it;
/// rows that are not a whole number of blocks leave the subject without keys and values.
Subject subject_f16(const ExactLayer& layer);
Subject subject_q8_0(const ExactLayer& layer);
Subject subject_q4_0(const ExactLayer& layer);

/// q4_0 of every head's vector after the library's own rotation, rotated back: "q4_0, rotated".
Subject subject_rotated_q4_0(const ExactLayer& layer, std::uint64_t seed);

/// KIVI (arXiv 2402.02750) with every token coded: keys per channel in groups of `key_group` tokens, values per token
/// in groups of kBlock channels, both with round_min_max. Bits are those of this many tokens.
Subject subject_kivi(const ExactLayer& layer, unsigned bits, std::size_t key_group);

/// Keys in TurboProd<bits>, 3 or 4; values are not stored. Its estimate of <q, k> is linear in q, so that a decoded key
/// is the estimates of the unit vectors. bits + 32 / head_dim: scale and residual norm are a bf16 each.
Subject subject_turbo_prod(const ExactLayer& layer, unsigned bits, std::uint64_t seed);

/// All of the above but f16, KIVI in groups of 32 and 128 tokens at 4, 3 and 2 bits.
std::vector<Subject> baselines(const ExactLayer& layer, std::uint64_t seed);

}  // namespace turboquant_eval
