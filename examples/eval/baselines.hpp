// The formats that others use, from their public definitions: f16, and the block formats q8_0 and q4_0.
#pragma once

#include "exact_layer.hpp"
#include "subject.hpp"

#include <span>

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

/// The layer in each of these formats. A token's row is its KV heads one after another, as block formats store it;
/// rows that are not a whole number of blocks leave the subject without keys and values.
Subject subject_f16(const ExactLayer& layer);
Subject subject_q8_0(const ExactLayer& layer);
Subject subject_q4_0(const ExactLayer& layer);

}  // namespace turboquant_eval
