// Names, shapes and messages of tensors.
#include "tensor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

namespace turboquant_eval {

FileError::FileError(const std::filesystem::path& file, std::string_view part, std::string_view expected,
                     std::string_view found)
    : std::runtime_error(fmt::format("{}: {}: expected {}, found {}", file.string(), part, expected, found)) {}

turboquant::ConstRows Tensor::rows() const {
  const std::size_t heads = shape[0], tokens = shape[1], dim = shape[2];
  turboquant::ConstRows rows(bytes.data(), type, tokens, heads, dim);
  rows.token_stride = static_cast<std::ptrdiff_t>(dim);
  rows.head_stride = static_cast<std::ptrdiff_t>(tokens * dim);
  return rows;
}

void Tensor::refuse(std::string_view expected, std::string_view found) const {
  throw FileError(file, "tensor " + name, expected, found);
}

std::optional<TensorRole> role_of(std::string_view name) {
  constexpr std::string_view kPrefix = "layers.";
  constexpr std::size_t kMaxDigits = 6;
  if (name.substr(0, kPrefix.size()) != kPrefix) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::size_t digits = 0;
  unsigned layer = 0;
  while (digits < name.size() && digits < kMaxDigits && name[digits] >= '0' && name[digits] <= '9') {
    layer = 10 * layer + static_cast<unsigned>(name[digits++] - '0');
  }
  if (digits == 0 || (digits > 1 && name[0] == '0')) return std::nullopt;
  name.remove_prefix(digits);
  if (name == ".k" || name == ".v" || name == ".q") return TensorRole{layer, name[1]};
  return std::nullopt;
}

std::optional<std::size_t> byte_count(std::span<const std::size_t> shape, std::size_t element_bytes) {
  std::size_t count = element_bytes;
  for (const std::size_t extent : shape) {
    if (extent != 0 && count > std::numeric_limits<std::size_t>::max() / extent) return std::nullopt;
    count *= extent;
  }
  return count;
}

std::string to_string(std::span<const std::size_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace turboquant_eval
