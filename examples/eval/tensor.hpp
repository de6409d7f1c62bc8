// A named tensor read from a file, and the error that tells what is wrong with a file.
#pragma once

#include <turboquant/core/dtype.hpp>
#include <turboquant/core/rows.hpp>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace turboquant_eval {

/// A file that cannot be used. what() names the file, the part of it, what was expected and what was found.
class FileError : public std::runtime_error {
 public:
  FileError(const std::filesystem::path& file, std::string_view part, std::string_view expected,
            std::string_view found);
};

/// Floating-point numbers of one type, row-major, as they lie in the file (little-endian).
struct Tensor {
  std::filesystem::path file;
  std::string name;  // as in the file
  turboquant::DType type = turboquant::DType::f32;
  std::vector<std::size_t> shape;
  std::vector<std::byte> bytes;

  /// The same memory as rows [tokens][heads][dim]. Requires a shape [heads, tokens, dim].
  turboquant::ConstRows rows() const;

  /// Throws FileError that names this tensor.
  [[noreturn]] void refuse(std::string_view expected, std::string_view found) const;
};

/// What a tensor is for, parsed from `layers.N.k`, `layers.N.v` or `layers.N.q`.
struct TensorRole {
  unsigned layer;
  char kind;  // 'k', 'v' or 'q'
};

/// The role of a tensor called `name`; nothing for any other name. N has at most six digits and no leading zero.
std::optional<TensorRole> role_of(std::string_view name);

/// Number of bytes of a tensor; nothing if that overflows std::size_t.
std::optional<std::size_t> byte_count(std::span<const std::size_t> shape, std::size_t element_bytes);

/// "[2, 99, 256]"
std::string to_string(std::span<const std::size_t> shape);

}  // namespace turboquant_eval
