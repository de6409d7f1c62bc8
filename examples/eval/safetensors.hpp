// Strict reader of the safetensors format: u64 header length, JSON header, contiguous tensor bytes.
#pragma once

#include "tensor.hpp"

#include <filesystem>
#include <functional>
#include <string_view>
#include <vector>

namespace turboquant_eval {

/// Reads every tensor named `layers.N.k|v|q` (F32, F16 or BF16). Tensors of other names are checked but not read.
/// Nothing in the file is believed: lengths, offsets and shapes must agree with each other and with the file's size,
/// and the tensors must cover the data exactly (no overlap, no hole), before any memory is taken for them.
/// Throws FileError.
std::vector<Tensor> read_safetensors(const std::filesystem::path& file);

using IsWanted = std::function<bool(std::string_view name)>;

/// The same for the tensors whose names are wanted; there may be none.
std::vector<Tensor> read_safetensors(const std::filesystem::path& file, const IsWanted& is_wanted);

}  // namespace turboquant_eval
