// Where saved bytes go to and come from, and the sections they are made of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <turboquant/cache/checksum.hpp>
#include <turboquant/core/array.hpp>
#include <turboquant/core/status.hpp>

namespace turboquant {

/// Takes bytes in order. cache/stream.hpp makes one of a std::ostream.
struct ByteSink {
  void* context = nullptr;  ///< first argument of `write`
  /// Takes `count` bytes; false: they could not be written, and nothing more will come.
  bool (*write)(void* context, const void* bytes, std::size_t count) = nullptr;
};

/// Hands out bytes in order. cache/stream.hpp makes one of a std::istream.
struct ByteSource {
  void* context = nullptr;  ///< first argument of `read`
  /// Copies up to `count` bytes to `bytes` and returns how many; fewer than `count` only at the end or after an error.
  std::size_t (*read)(void* context, void* bytes, std::size_t count) = nullptr;
};

namespace detail {

// The bytes of one section; the memory stays from one section to the next.
class SectionBuffer {
 public:
  // Room for `count` more bytes, or null: out of memory. Invalidates earlier pointers.
  std::uint8_t* extend(std::size_t count) noexcept {
    if (used_ + count > bytes_.size() && !bytes_.resize(used_ + count)) return nullptr;
    std::uint8_t* begin = bytes_.data() + used_;
    used_ += count;
    return begin;
  }
  void clear() noexcept { used_ = 0; }
  std::uint8_t* data() noexcept { return bytes_.data(); }
  std::size_t size() const noexcept { return used_; }

 private:
  Array<std::uint8_t> bytes_;
  std::size_t used_ = 0;
};

inline constexpr std::size_t kChecksumBytes = 8;

// Puts a section together; `end` adds the checksum and hands it to the sink in one call. The first failure sticks.
class SectionWriter {
 public:
  explicit SectionWriter(const ByteSink& sink) noexcept : sink_(sink) {
    if (sink.write == nullptr) status_ = {Status::io_error, "sink"};
  }

  // The low `bytes` bytes of a number, little-endian.
  void put(std::uint64_t number, std::size_t bytes = 8) noexcept {
    std::uint8_t* to = extend(bytes);
    for (std::size_t i = 0; to != nullptr && i < bytes; ++i) to[i] = static_cast<std::uint8_t>(number >> 8 * i);
  }
  void put(const void* bytes, std::size_t count) noexcept {
    std::uint8_t* to = extend(count);
    if (to != nullptr && count != 0) std::memcpy(to, bytes, count);
  }
  // `count` bytes for the caller to fill before the next call; null after a failure.
  std::uint8_t* extend(std::size_t count) noexcept {
    if (status_.code != Status::ok) return nullptr;
    std::uint8_t* to = buffer_.extend(count);
    if (to == nullptr) status_ = {Status::out_of_memory, "section"};
    return to;
  }

  Status end() {
    if (status_.code != Status::ok) return status_;
    chain_ = checksum(buffer_.data(), buffer_.size(), chain_);
    put(chain_);
    if (status_.code == Status::ok && !sink_.write(sink_.context, buffer_.data(), buffer_.size())) {
      status_ = {Status::io_error, "sink", 0, static_cast<std::int64_t>(written_)};
    }
    written_ += buffer_.size();
    buffer_.clear();
    return status_;
  }

 private:
  ByteSink sink_;
  SectionBuffer buffer_;
  Status status_;
  std::uint64_t chain_ = 0;  // checksum of the section before
  std::size_t written_ = 0;
};

// Takes sections apart: `take` reads bytes, `end` the checksum, then the numbers can be believed. Memory grows with
// what has arrived, whatever was announced.
class SectionReader {
 public:
  explicit SectionReader(const ByteSource& source) noexcept : source_(source) {}

  // Starts a section; `place` names it in a refusal.
  void begin(const char* place) noexcept {
    place_ = place;
    offset_ += buffer_.size();
    start_ = offset_;
    buffer_.clear();
    next_ = 0;
  }

  // Reads `count` more bytes of the section.
  Status take(std::size_t count) {
    if (source_.read == nullptr) return {Status::io_error, "source"};
    while (count > 0) {
      const std::size_t step = (std::min)(count, (std::max)(buffer_.size(), kStep)), before = buffer_.size();
      std::uint8_t* to = buffer_.extend(step);
      if (to == nullptr) return {Status::out_of_memory, "section"};
      const std::size_t got = source_.read(source_.context, to, step);
      if (got > step) return {Status::io_error, "source"};
      if (got < step) return cut_off(before + count, before + got);
      count -= step;
    }
    return {};
  }

  // Compares the checksum that follows.
  Status end() { return end(buffer_.size(), nullptr); }

  // A whole section of `count` bytes, read to where it is to stay.
  Status take_to(std::uint8_t* to, std::size_t count) {
    const std::size_t got = source_.read(source_.context, to, count);
    if (got > count) return {Status::io_error, "source"};
    if (got < count) return cut_off(count, got);
    offset_ += count;
    return end(0, to, count);
  }

  // The next `bytes` bytes as a little-endian number. Requires that they were taken.
  std::uint64_t number(std::size_t bytes = 8) noexcept {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value |= std::uint64_t{buffer_.data()[next_ + i]} << 8 * i;
    next_ += bytes;
    return value;
  }
  // The bytes that follow what was read of the section.
  std::uint8_t* rest() noexcept { return buffer_.data() + next_; }

  // A refusal that names what is wrong and the byte at which the section begins.
  Status damaged(const char* what) const noexcept {
    return {Status::corrupt_file, what, 0, static_cast<std::int64_t>(start_)};
  }

 private:
  static constexpr std::size_t kStep = std::size_t{1} << 16;

  Status cut_off(std::size_t expected, std::size_t found) const noexcept {
    return {Status::corrupt_file, place_, static_cast<std::int64_t>(offset_ + expected),
            static_cast<std::int64_t>(offset_ + found)};
  }

  // Reads the checksum behind `taken` bytes of the buffer and compares it with that of them or of other bytes.
  Status end(std::size_t taken, const std::uint8_t* other, std::size_t count = 0) {
    if (const Status status = take(kChecksumBytes); status.code != Status::ok) return status;
    chain_ = other != nullptr ? checksum(other, count, chain_) : checksum(buffer_.data(), taken, chain_);
    return chain_ == word_at(buffer_.data() + taken) ? Status{} : damaged(place_);
  }

  ByteSource source_;
  SectionBuffer buffer_;
  const char* place_ = "";
  std::uint64_t chain_ = 0;
  std::size_t start_ = 0, offset_ = 0;  // in the file: of the section, of the buffer
  std::size_t next_ = 0;                // in the buffer
};

}  // namespace detail
}  // namespace turboquant
