// The only place that throws: refusals at construction. Without exceptions they end the program with the same words.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

namespace turboquant::detail {

/// Throws std::invalid_argument; without exceptions prints the words and aborts.
[[noreturn]] inline void refuse(const std::string& why) {
#if defined(__cpp_exceptions)
  throw std::invalid_argument("turboquant: " + why);
#else
  std::fprintf(stderr, "turboquant: %s\n", why.c_str());
  std::abort();
#endif
}

/// Throws std::bad_alloc; without exceptions aborts.
[[noreturn]] inline void refuse_for_memory() {
#if defined(__cpp_exceptions)
  throw std::bad_alloc();
#else
  std::abort();
#endif
}

}  // namespace turboquant::detail
