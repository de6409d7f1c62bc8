// f16, q8_0 and q4_0.
#include "baselines.hpp"

#include <algorithm>
#include <cmath>

namespace turboquant_eval {
namespace {

float as_f16(float number) { return turboquant::to_float(turboquant::to_half(number)); }

using RoundRow = void (*)(std::span<float>);

// Rounds numbers [heads][tokens][dim] token by token.
std::vector<float> rounded(const std::vector<float>& numbers, std::size_t heads, std::size_t tokens, std::size_t dim,
                           RoundRow round_row) {
  std::vector<float> result(numbers.size()), row(heads * dim);
  for (std::size_t token = 0; token < tokens; ++token) {
    for (std::size_t head = 0; head < heads; ++head) {
      std::copy_n(numbers.begin() + static_cast<std::ptrdiff_t>((head * tokens + token) * dim), dim,
                  row.begin() + static_cast<std::ptrdiff_t>(head * dim));
    }
    round_row(row);
    for (std::size_t head = 0; head < heads; ++head) {
      std::copy_n(row.begin() + static_cast<std::ptrdiff_t>(head * dim), dim,
                  result.begin() + static_cast<std::ptrdiff_t>((head * tokens + token) * dim));
    }
  }
  return result;
}

Subject subject(const char* format, double bits, std::size_t block, RoundRow round_row, const ExactLayer& layer) {
  Subject result;
  result.format = format;
  result.bits_per_coordinate = bits;
  result.bytes_per_token = bits * static_cast<double>(layer.coordinates()) / 8;
  result.is_coded.assign(layer.tokens, 1);
  if (layer.kv_heads * layer.head_dim % block == 0 && layer.kv_heads * layer.value_dim % block == 0) {
    result.keys = rounded(layer.keys, layer.kv_heads, layer.tokens, layer.head_dim, round_row);
    result.values = rounded(layer.values, layer.kv_heads, layer.tokens, layer.value_dim, round_row);
  }
  return result;
}

}  // namespace

void round_f16(std::span<float> numbers) {
  for (float& x : numbers) x = as_f16(x);
}

void round_q8_0(std::span<float> numbers) {
  for (std::size_t begin = 0; begin < numbers.size(); begin += kBlock) {
    const std::span<float> block = numbers.subspan(begin, kBlock);
    float largest = 0;
    for (const float x : block) largest = (std::max)(largest, std::abs(x));
    // Indices come from the scale before it is rounded to f16, as in the format's reference encoder.
    const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0, stored = as_f16(scale);
    for (float& x : block) x = std::round(x * inverse) * stored;
  }
}

void round_q4_0(std::span<float> numbers) {
  for (std::size_t begin = 0; begin < numbers.size(); begin += kBlock) {
    const std::span<float> block = numbers.subspan(begin, kBlock);
    float largest = 0;
    for (const float x : block) largest = std::abs(x) > std::abs(largest) ? x : largest;
    const float scale = largest / -8, inverse = scale != 0 ? 1 / scale : 0, stored = as_f16(scale);
    for (float& x : block) x = (std::clamp(std::floor(x * inverse + 8.5F), 0.0F, 15.0F) - 8) * stored;
  }
}

Subject subject_f16(const ExactLayer& layer) { return subject("f16", 16, 1, round_f16, layer); }
Subject subject_q8_0(const ExactLayer& layer) { return subject("q8_0", 8.5, kBlock, round_q8_0, layer); }
Subject subject_q4_0(const ExactLayer& layer) { return subject("q4_0", 4.5, kBlock, round_q4_0, layer); }

}  // namespace turboquant_eval
