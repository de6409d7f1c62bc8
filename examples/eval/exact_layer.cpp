// Widening tensors, rounding them to bf16, and drawing queries.
#include "exact_layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <random>

namespace turboquant_eval {
namespace {

std::vector<float> widened(const Tensor& tensor) {
  const turboquant::ConstRows rows = tensor.rows();
  std::vector<float> numbers(rows.tokens * rows.heads * rows.dim);
  for (std::size_t head = 0; head < rows.heads; ++head) {
    for (std::size_t token = 0; token < rows.tokens; ++token) {
      turboquant::load_row(rows, token, head, numbers.data() + (head * rows.tokens + token) * rows.dim);
    }
  }
  return numbers;
}

// Rounds in place; returns the error energy relative to the energy, 0 for zeros.
double round_to_bfloat16(std::vector<float>& numbers) {
  double error = 0, energy = 0;
  for (float& number : numbers) {
    const float rounded = turboquant::to_float(turboquant::to_bfloat16(number));
    const double change = static_cast<double>(rounded) - static_cast<double>(number);
    error += change * change;
    energy += static_cast<double>(number) * static_cast<double>(number);
    number = rounded;
  }
  return energy > 0 ? error / energy : 0;
}

double centred_rms(const ExactLayer& layer) {
  double energy = 0;
  for (std::size_t head = 0; head < layer.kv_heads; ++head) {
    for (std::size_t i = 0; i < layer.head_dim; ++i) {
      double sum = 0, squares = 0;
      for (std::size_t token = 0; token < layer.tokens; ++token) {
        const double x = static_cast<double>(layer.key(head, token)[i]);
        sum += x;
        squares += x * x;
      }
      energy += squares - sum * sum / static_cast<double>(layer.tokens);
    }
  }
  return std::sqrt(energy / static_cast<double>(layer.keys.size()));
}

}  // namespace

const float* ExactLayer::key(std::size_t kv_head, std::size_t token) const {
  return keys.data() + (kv_head * tokens + token) * head_dim;
}

const float* ExactLayer::value(std::size_t kv_head, std::size_t token) const {
  return values.data() + (kv_head * tokens + token) * value_dim;
}

const float* ExactLayer::query(std::size_t head, std::size_t token) const {
  return queries.data() + (head * tokens + token) * head_dim;
}

ExactLayer exact_layer(const LayerTensors& tensors) {
  ExactLayer layer;
  layer.kv_heads = tensors.keys.shape[0];
  layer.tokens = tensors.keys.shape[1];
  layer.head_dim = tensors.keys.shape[2];
  layer.value_dim = tensors.values.shape[2];
  layer.keys = widened(tensors.keys);
  layer.values = widened(tensors.values);
  layer.key_rounding = round_to_bfloat16(layer.keys);
  layer.value_rounding = round_to_bfloat16(layer.values);
  if (tensors.queries) {
    layer.heads = tensors.queries->shape[0];
    layer.queries = widened(*tensors.queries);
  }
  return layer;
}

LayerTensors with_offset(const LayerTensors& tensors, double deviations) {
  LayerTensors result = tensors;
  std::vector<float> keys = widened(tensors.keys);
  double sum = 0, squares = 0;
  for (const float x : keys) {
    sum += static_cast<double>(x);
    squares += static_cast<double>(x) * static_cast<double>(x);
  }
  const auto count = static_cast<double>(keys.size());
  const double deviation = std::sqrt((std::max)(squares - sum * sum / count, 0.0) / count);
  for (float& x : keys) x += static_cast<float>(deviations * deviation);
  result.keys.type = turboquant::DType::f32;
  result.keys.bytes.resize(keys.size() * sizeof(float));
  std::memcpy(result.keys.bytes.data(), keys.data(), result.keys.bytes.size());
  return result;
}

void draw_queries(ExactLayer& layer, std::uint64_t seed, std::size_t heads_per_kv_head) {
  layer.heads = layer.kv_heads * heads_per_kv_head;
  layer.queries.resize(layer.keys.size() * heads_per_kv_head);
  const double deviation = centred_rms(layer);
  // std::normal_distribution differs between standard libraries; the generator does not.
  std::mt19937_64 generator(seed);
  const auto uniform = [&] { return (static_cast<double>(generator() >> 11) + 0.5) * 0x1p-53; };
  for (float& number : layer.queries) {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    number = static_cast<float>(deviation * radius * std::cos(2 * std::numbers::pi * uniform()));
  }
}

}  // namespace turboquant_eval
