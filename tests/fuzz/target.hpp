// What fuzz targets share: numbers decoded from an input, a check that ends the program, and seeds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>

namespace fuzz {

inline void require(bool holds, std::string_view what) {
  if (holds) return;
  std::fprintf(stderr, "a check failed: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

/// Numbers taken from an input one after the other; zeros behind its end.
class Numbers {
 public:
  Numbers(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  std::size_t left() const { return left_; }
  template <class Int>
  Int take() {
    Int number{};
    const std::size_t count = left_ < sizeof(Int) ? left_ : sizeof(Int);
    if (count > 0) std::memcpy(&number, data_, count);
    data_ += count;
    left_ -= count;
    return number;
  }
  /// 0 <= result < sides; one byte for up to 256 sides, else two.
  std::size_t below(std::size_t sides) { return (sides <= 256 ? take<std::uint8_t>() : take<std::uint16_t>()) % sides; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

/// The files to start from, in the first folder that the command line names.
class Seeds {
 public:
  Seeds(int argc, char** argv) {
    for (int i = 1; i < argc && folder_.empty(); ++i) {
      if (argv[i][0] != '-') folder_ = argv[i];
    }
  }

  /// False: nowhere to write to.
  explicit operator bool() const { return !folder_.empty(); }
  void write(std::string_view bytes) {
    std::ofstream file(folder_ + "/seed" + std::to_string(count_++), std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    require(static_cast<bool>(file.flush()), "no seed could be written");
  }

 private:
  std::string folder_;
  unsigned count_ = 0;
};

}  // namespace fuzz
