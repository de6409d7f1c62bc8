// Opening and reading input files.
#include "input_file.hpp"

#include "tensor.hpp"

#include <fmt/format.h>

#include <system_error>

namespace turboquant_eval {

InputFile::InputFile(const std::filesystem::path& path) : path_(path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) refuse("file", "an existing file", "none of this name");
  if (!std::filesystem::is_regular_file(status)) refuse("file", "a regular file", "something else");
  size_ = std::filesystem::file_size(path, error);
  if (error) refuse("file", "a file of known size", error.message());
  stream_.open(path, std::ios::binary);
  if (!stream_) refuse("file", "read permission", "a file that cannot be opened");
}

void InputFile::read(std::uint64_t offset, std::span<std::byte> out, std::string_view part) {
  if (offset > size_ || out.size() > size_ - offset) {
    refuse(part, fmt::format("{} bytes at offset {}", out.size(), offset), fmt::format("a file of {} bytes", size_));
  }
  stream_.seekg(static_cast<std::streamoff>(offset));
  stream_.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
  if (!stream_) refuse(part, fmt::format("{} bytes at offset {}", out.size(), offset), "a read error");
}

void InputFile::refuse(std::string_view part, std::string_view expected, std::string_view found) const {
  throw FileError(path_, part, expected, found);
}

}  // namespace turboquant_eval
