// Collecting and checking the layers of the input files.
#include "layer_set.hpp"

#include "npy.hpp"
#include "safetensors.hpp"

#include <turboquant/transform/hadamard.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

namespace turboquant_eval {
namespace {

using turboquant::DType;

struct Parts {
  std::optional<Tensor> keys, values, queries;
};

std::vector<std::filesystem::path> npy_files(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (npy_tensor_name(entry->path())) files.push_back(entry->path());
  }
  if (error) throw FileError(directory, "directory", "read permission", error.message());
  if (files.empty()) throw FileError(directory, "directory", "files named <prefix>layers.N.k.npy", "none");
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<Tensor> read_tensors(const std::filesystem::path& input) {
  std::error_code error;
  std::vector<Tensor> tensors;
  if (std::filesystem::is_directory(input, error)) {
    for (const auto& file : npy_files(input)) tensors.push_back(read_npy(file));
  } else if (input.extension() == ".npy") {
    tensors.push_back(read_npy(input));
  } else {
    tensors = read_safetensors(input);
  }
  return tensors;
}

float element(const Tensor& tensor, std::size_t index) {
  if (tensor.type == DType::f32) {
    float value = 0;
    std::memcpy(&value, tensor.bytes.data() + 4 * index, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, tensor.bytes.data() + 2 * index, sizeof bits);
  return tensor.type == DType::f16 ? turboquant::to_float(turboquant::half{bits})
                                   : turboquant::to_float(turboquant::bfloat16{bits});
}

void check_shape(const Tensor& tensor, const char* shape) {
  const bool is_empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0U) != tensor.shape.end();
  const bool is_too_large =
      std::any_of(tensor.shape.begin(), tensor.shape.end(), [](std::size_t extent) { return extent > 0xFFFFFFFFU; });
  if (tensor.shape.size() != 3 || is_empty || is_too_large) tensor.refuse(shape, to_string(tensor.shape));
}

void check_dim(const Tensor& tensor) {
  const std::string why = turboquant::why_unsupported_dim(tensor.shape[2]);
  if (!why.empty()) tensor.refuse("a supported head size: " + why, fmt::to_string(tensor.shape[2]));
}

// `limit`: what the cache accepts of keys and values; queries may be any finite number.
void check_numbers(const Tensor& tensor, float limit) {
  const std::size_t tokens = tensor.shape[1], dim = tensor.shape[2], count = tensor.shape[0] * tokens * dim;
  for (std::size_t i = 0; i < count; ++i) {
    const float value = element(tensor, i);
    if (value >= -limit && value <= limit) continue;
    tensor.refuse(fmt::format("finite numbers of at most {:g}", limit),
                  fmt::format("{} at [{}, {}, {}]", value, i / dim / tokens, i / dim % tokens, i % dim));
  }
}

void check(const LayerTensors& layer) {
  constexpr float kLargestStored = 0x1p96F, kLargestFinite = 0x1.fffffep127F;
  const Tensor &keys = layer.keys, &values = layer.values;
  check_shape(keys, "a shape [kv_heads, tokens, head_dim] without zeros");
  check_shape(values, "a shape [kv_heads, tokens, value_dim] without zeros");
  if (keys.shape[0] != values.shape[0] || keys.shape[1] != values.shape[1]) {
    values.refuse(fmt::format("the heads and tokens of {}, [{}, {}, ...]", keys.name, keys.shape[0], keys.shape[1]),
                  to_string(values.shape));
  }
  check_dim(keys);
  check_dim(values);
  check_numbers(keys, kLargestStored);
  check_numbers(values, kLargestStored);
  if (!layer.queries) return;
  const Tensor& queries = *layer.queries;
  check_shape(queries, "a shape [heads, tokens, head_dim] without zeros");
  if (queries.shape[0] % keys.shape[0] != 0 || queries.shape[1] != keys.shape[1] || queries.shape[2] != keys.shape[2]) {
    queries.refuse(
        fmt::format("[a multiple of {}, {}, {}] to go with {}", keys.shape[0], keys.shape[1], keys.shape[2], keys.name),
        to_string(queries.shape));
  }
  check_numbers(queries, kLargestFinite);
}

}  // namespace

LayerSet read_layers(std::span<const std::filesystem::path> inputs, const std::set<unsigned>& wanted) {
  std::map<unsigned, Parts> found;
  std::set<unsigned> present;
  for (const auto& input : inputs) {
    for (Tensor& tensor : read_tensors(input)) {
      const TensorRole role = *role_of(tensor.name);
      present.insert(role.layer);
      if (!wanted.empty() && !wanted.contains(role.layer)) continue;
      Parts& parts = found[role.layer];
      auto& slot = role.kind == 'k' ? parts.keys : role.kind == 'v' ? parts.values : parts.queries;
      if (slot) tensor.refuse("each tensor once", "one of this name in " + slot->file.string() + " too");
      slot = std::move(tensor);
    }
  }
  for (const unsigned layer : wanted) {
    if (!present.contains(layer)) {
      throw FileError(inputs.front(), fmt::format("layer {}", layer),
                      fmt::format("one of the layers {}", fmt::join(present, ", ")), fmt::to_string(layer));
    }
  }
  LayerSet layers;
  for (auto& [number, parts] : found) {
    const Tensor& any = parts.keys ? *parts.keys : parts.values ? *parts.values : *parts.queries;
    for (const auto& [part, kind] : {std::pair(&parts.keys, 'k'), std::pair(&parts.values, 'v')}) {
      if (*part) continue;
      throw FileError(any.file, fmt::format("tensor layers.{}.{}", number, kind), "to be there with " + any.name,
                      "none");
    }
    LayerTensors layer{std::move(*parts.keys), std::move(*parts.values), std::move(parts.queries)};
    check(layer);
    layers.emplace(number, std::move(layer));
  }
  return layers;
}

}  // namespace turboquant_eval
