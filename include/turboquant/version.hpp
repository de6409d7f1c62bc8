// Version of the library, which CMake reads from here, and of the file format.
#pragma once

#include <cstdint>

#define TURBOQUANT_VERSION_MAJOR 0
#define TURBOQUANT_VERSION_MINOR 1
#define TURBOQUANT_VERSION_PATCH 0

namespace turboquant {

/// Version of saved sequences and pages (docs/file-format.md). It grows by one whenever bytes written before can no
/// longer be read as they are.
inline constexpr std::uint32_t kFileFormatVersion = 1;

}  // namespace turboquant
