// Sizes and alignments of the public types, as one translation unit sees them.
#pragma once

#include <cstddef>

struct Extent {
  const char* type;
  std::size_t size, alignment;
};

struct Extents {
  const Extent* first;
  std::size_t count;
};

// By the flags of the unit: layouts_unit.cpp.
Extents plain_extents();
Extents avx2_extents();
Extents avx512_extents();
