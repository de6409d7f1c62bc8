// Strict reader of numpy's .npy format, one tensor a file.
#pragma once

#include "tensor.hpp"

#include <filesystem>
#include <optional>
#include <string>

namespace turboquant_eval {

/// The tensor's name in a file name: `<prefix>layers.N.k.npy` gives `layers.N.k` (k, v or q), for any prefix
/// that is empty or ends in '.', '_' or '-'. Nothing for other names.
std::optional<std::string> npy_tensor_name(const std::filesystem::path& file);

/// Reads an array of '<f4' or '<f2' in C order. (numpy has no bfloat16: save such arrays as float32.)
/// Throws FileError, also when the file's name gives no tensor name.
Tensor read_npy(const std::filesystem::path& file);

}  // namespace turboquant_eval
