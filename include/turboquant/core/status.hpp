// Result of a call that can be refused: a code, the offending field and two numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turboquant {

static_assert(sizeof(std::size_t) == 8, "turboquant needs a 64-bit target");

/// "No index" or "to the end", as in std::string::npos.
inline constexpr std::size_t npos = std::size_t(-1);

/// What became of a call. A refused call changed nothing.
///
/// `field` names what was refused; it points to a string literal and is empty if nothing is to be named.
/// `expected` and `found` are the two numbers that disagree, where that makes sense, else both 0.
/// `item` is the index of the batch's item that was refused, where one was.
/// Never allocates; compares with a code: `if (status == Status::ok)`.
struct [[nodiscard]] Status {
  /// Why a call was refused.
  enum Code : std::uint8_t {
    ok,                ///< nothing was refused
    out_of_memory,     ///< the memory source had none, or CacheConfig::max_bytes is reached
    non_finite_input,  ///< infinity, NaN, or a key or value above 2^96; of rows `found` is the token
    unknown_sequence,  ///< never created, or released
    bad_layer,         ///< no such layer
    bad_shape,         ///< rows, positions or counts that do not fit the layer, the sequence or each other
    behind_window,     ///< tokens that a windowed layer has freed
    corrupt_file,      ///< damaged or cut off
    format_mismatch,   ///< saved by another configuration, version or byte order
    io_error           ///< a sink or source failed or is missing
  };

  Code code = ok;             ///< what became of the call
  const char* field = "";     ///< a string literal, never null
  std::int64_t expected = 0;  ///< the limit or the number that was wanted
  std::int64_t found = 0;     ///< the number that came
  std::int64_t item = -1;     ///< index in the batch; -1: the call as a whole

  /// A refusal, or success.
  constexpr Status(Code why = ok, const char* what = "", std::int64_t wanted = 0, std::int64_t got = 0) noexcept
      : code(why), field(what), expected(wanted), found(got) {}

  /// True if the code is `other`.
  friend constexpr bool operator==(const Status& status, Code other) noexcept { return status.code == other; }
};

/// The name of a code as it is written in C++, for messages; "unknown code" for a value that is no code.
[[nodiscard]] constexpr const char* to_string(Status::Code code) noexcept {
  switch (code) {
    case Status::ok:
      return "ok";
    case Status::out_of_memory:
      return "out_of_memory";
    case Status::non_finite_input:
      return "non_finite_input";
    case Status::unknown_sequence:
      return "unknown_sequence";
    case Status::bad_layer:
      return "bad_layer";
    case Status::bad_shape:
      return "bad_shape";
    case Status::behind_window:
      return "behind_window";
    case Status::corrupt_file:
      return "corrupt_file";
    case Status::format_mismatch:
      return "format_mismatch";
    case Status::io_error:
      return "io_error";
  }
  return "unknown code";
}

}  // namespace turboquant
