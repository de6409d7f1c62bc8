// A regular file of known size, read at given places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string_view>

namespace turboquant_eval {

class InputFile {
 public:
  /// Opens `path`. Throws FileError if it is not a readable regular file.
  explicit InputFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }

  /// Fills `out` from byte `offset` on. Throws FileError that names `part` if the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> out, std::string_view part);

  /// Throws FileError about a part of this file.
  [[noreturn]] void refuse(std::string_view part, std::string_view expected, std::string_view found) const;

 private:
  std::filesystem::path path_;
  std::uint64_t size_ = 0;
  std::ifstream stream_;
};

}  // namespace turboquant_eval
