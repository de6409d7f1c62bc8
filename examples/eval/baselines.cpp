// Rounding whole layers with the formats of others.
#include "baselines.hpp"

#include <turboquant/codec/codebook.hpp>
#include <turboquant/codec/qjl.hpp>
#include <turboquant/kernels/portable.hpp>
#include <turboquant/transform/rotation.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace turboquant_eval {
namespace {

float as_f16(float number) { return turboquant::to_float(turboquant::to_half(number)); }

// Rounds numbers [heads][tokens][dim] token by token.
std::vector<float> rounded(const std::vector<float>& numbers, std::size_t heads, std::size_t tokens, std::size_t dim,
                           const RoundRow& round_row) {
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

// `key_bits` and `value_bits` include everything.
Subject sized(std::string format, double key_bits, double value_bits, const ExactLayer& layer) {
  Subject result;
  result.format = std::move(format);
  result.key_bits = key_bits;
  result.value_bits = value_bits;
  const auto keys = static_cast<double>(layer.head_dim), values = static_cast<double>(layer.value_dim);
  result.bits_per_coordinate = (key_bits * keys + value_bits * values) / (keys + values);
  result.bytes_per_token = result.bits_per_coordinate * static_cast<double>(layer.coordinates()) / 8;
  result.is_coded.assign(layer.tokens, 1);
  return result;
}

// Keys and values in rows of whole blocks.
Subject in_blocks(const char* format, double bits, std::size_t block, const ExactLayer& layer,
                  const RoundRow& round_keys, const RoundRow& round_values) {
  Subject result = sized(format, bits, bits, layer);
  if (layer.kv_heads * layer.head_dim % block == 0 && layer.kv_heads * layer.value_dim % block == 0) {
    result.keys = rounded(layer.keys, layer.kv_heads, layer.tokens, layer.head_dim, round_keys);
    result.values = rounded(layer.values, layer.kv_heads, layer.tokens, layer.value_dim, round_values);
  }
  return result;
}

using RotateRow = void (*)(const turboquant::kernels::RotationView&, const float*, float*);

void rotate_heads(std::span<float> row, const turboquant::Rotation& rotation, RotateRow rotate) {
  const std::size_t dim = rotation.dim(), order = turboquant::base_order(dim);
  const turboquant::kernels::RotationView view{dim, rotation.signs(), turboquant::base_matrix(order), order};
  for (std::size_t begin = 0; begin < row.size(); begin += dim) rotate(view, row.data() + begin, row.data() + begin);
}

// Rounds in the rotated domain.
RoundRow rotated(std::uint64_t seed, std::size_t dim, const RoundRow& round_row) {
  using Kernels = turboquant::kernels::Portable;
  return [rotation = turboquant::Rotation(seed, dim), round_row](std::span<float> row) {
    rotate_heads(row, rotation, &Kernels::rotate);
    round_row(row);
    rotate_heads(row, rotation, &Kernels::rotate_back);
  };
}

// One vector to the nearest levels of a normal distribution of its own root mean square.
template <unsigned B>
void round_to_levels(std::span<float> vector) {
  constexpr auto& kLevels = turboquant::Codebook<B>::levels;
  double squares = 0;
  for (const float x : vector) squares += static_cast<double>(x) * static_cast<double>(x);
  const double deviation = std::sqrt(squares / static_cast<double>(vector.size()));
  const float stored = turboquant::to_float(turboquant::to_bfloat16(static_cast<float>(deviation)));
  const float step = stored / static_cast<float>(turboquant::Codebook<B>::kSpread);
  for (float& x : vector) {
    const auto is_closer = [x, step](int a, int b) {
      return std::abs(static_cast<float>(a) * step - x) < std::abs(static_cast<float>(b) * step - x);
    };
    x = static_cast<float>(*std::min_element(kLevels.begin(), kLevels.end(), is_closer)) * step;
  }
}

template <unsigned B>
void decode_turbo_prod(const ExactLayer& layer, std::uint64_t seed, std::vector<float>& keys) {
  const turboquant::TurboProd<B> codec(seed, layer.head_dim);
  std::vector<typename turboquant::TurboProd<B>::Query> units(layer.head_dim);
  std::vector<float> unit(layer.head_dim);
  for (std::size_t i = 0; i < layer.head_dim; ++i) {
    unit[i] = 1;
    codec.prepare(unit.data(), units[i]);
    unit[i] = 0;
  }
  const auto code = std::make_unique<typename turboquant::TurboProd<B>::Code>();
  keys.resize(layer.keys.size());
  for (std::size_t row = 0; row < keys.size(); row += layer.head_dim) {
    codec.encode(layer.keys.data() + row, *code);
    code->residual_norm = turboquant::to_float(turboquant::to_bfloat16(code->residual_norm));
    for (std::size_t i = 0; i < layer.head_dim; ++i) keys[row + i] = codec.estimate(units[i], *code);
  }
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

RoundRow rotated_q4_0(std::uint64_t seed, std::size_t dim) { return rotated(seed, dim, round_q4_0); }

RoundRow rotated_levels(unsigned bits, std::uint64_t seed, std::size_t dim) {
  const auto round_vector = bits == 4 ? round_to_levels<4> : bits == 3 ? round_to_levels<3> : round_to_levels<2>;
  return rotated(seed, dim, [dim, round_vector](std::span<float> row) {
    for (std::size_t begin = 0; begin < row.size(); begin += dim) round_vector(row.subspan(begin, dim));
  });
}

void round_min_max(std::span<float> group, unsigned bits) {
  const auto [least, most] = std::minmax_element(group.begin(), group.end());
  const float last = static_cast<float>((1U << bits) - 1);
  const float zero = as_f16(*least), step = as_f16((*most - *least) / last), inverse = step > 0 ? 1 / step : 0;
  for (float& x : group) x = zero + step * std::clamp(std::round((x - zero) * inverse), 0.0F, last);
}

void round_tokens(std::span<float> rows, std::size_t width, unsigned bits) {
  for (std::size_t row = 0; row < rows.size(); row += width) {
    for (std::size_t i = 0; i < width; i += kBlock) {
      round_min_max(rows.subspan(row + i, (std::min)(kBlock, width - i)), bits);
    }
  }
}

void round_channels(std::span<float> rows, std::size_t width, unsigned bits, std::size_t group) {
  const std::size_t tokens = rows.size() / width;
  std::vector<float> channel;
  for (std::size_t first = 0; first < tokens; first += group) {
    channel.resize((std::min)(group, tokens - first));
    for (std::size_t i = 0; i < width; ++i) {
      for (std::size_t t = 0; t < channel.size(); ++t) channel[t] = rows[(first + t) * width + i];
      round_min_max(channel, bits);
      for (std::size_t t = 0; t < channel.size(); ++t) rows[(first + t) * width + i] = channel[t];
    }
  }
}

double min_max_bits(unsigned bits, std::size_t count, std::size_t group) {
  const std::size_t groups = (count + group - 1) / group;
  return bits + 32 * static_cast<double>(groups) / static_cast<double>(count);
}

Subject subject_f16(const ExactLayer& layer) { return in_blocks("f16", 16, 1, layer, round_f16, round_f16); }

Subject subject_q8_0(const ExactLayer& layer) { return in_blocks("q8_0", 8.5, kBlock, layer, round_q8_0, round_q8_0); }

Subject subject_q4_0(const ExactLayer& layer) { return in_blocks("q4_0", 4.5, kBlock, layer, round_q4_0, round_q4_0); }

Subject subject_rotated_q4_0(const ExactLayer& layer, std::uint64_t seed) {
  return in_blocks("q4_0, rotated", 4.5, kBlock, layer, rotated_q4_0(seed, layer.head_dim),
                   rotated_q4_0(seed, layer.value_dim));
}

Subject subject_kivi(const ExactLayer& layer, unsigned bits, std::size_t key_group) {
  Subject result =
      sized(fmt::format("KIVI-{}, {} tokens", bits, key_group), min_max_bits(bits, layer.tokens, key_group),
            min_max_bits(bits, layer.value_dim, kBlock), layer);
  result.keys = layer.keys;
  for (std::size_t head = 0; head < layer.kv_heads; ++head) {
    const std::size_t size = layer.tokens * layer.head_dim;
    round_channels(std::span(result.keys).subspan(head * size, size), layer.head_dim, bits, key_group);
  }
  result.values = layer.values;
  round_tokens(result.values, layer.value_dim, bits);
  return result;
}

Subject subject_turbo_prod(const ExactLayer& layer, unsigned bits, std::uint64_t seed) {
  Subject result;
  result.format = fmt::format("TurboProd{}, keys", bits);
  result.key_bits = result.bits_per_coordinate = bits + 32 / static_cast<double>(layer.head_dim);
  result.bytes_per_token = result.key_bits * static_cast<double>(layer.kv_heads * layer.head_dim) / 8;
  result.is_coded.assign(layer.tokens, 1);
  bits == 4 ? decode_turbo_prod<4>(layer, seed, result.keys) : decode_turbo_prod<3>(layer, seed, result.keys);
  return result;
}

std::vector<Subject> baselines(const ExactLayer& layer, std::uint64_t seed) {
  std::vector<Subject> result{subject_q8_0(layer), subject_q4_0(layer), subject_rotated_q4_0(layer, seed)};
  for (const std::size_t group : {kBlock, 4 * kBlock}) {
    for (const unsigned bits : {4U, 3U, 2U}) result.push_back(subject_kivi(layer, bits, group));
  }
  for (const unsigned bits : {4U, 3U}) result.push_back(subject_turbo_prod(layer, bits, seed));
  return result;
}

}  // namespace turboquant_eval
