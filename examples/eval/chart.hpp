// Points with labels over bits, as a self-contained SVG document.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace turboquant_eval {

struct ChartFamily {
  const char* title;
  const char* color;
  bool is_joined;  // its points make a line
};

struct ChartPoint {
  double bits, value;
  std::size_t family;  // index into the families
  std::string label;
  std::string row;  // its full name, shown when pointed at
};

struct ChartPanel {
  std::string title, value_title, value_name;  // of the panel, of its vertical axis, and of a single value
  bool has_bound;                              // with the line 4^-b, which no code of b bits beats on Gaussian numbers
  std::vector<ChartPoint> points;              // values of 10^-8 or less cannot be drawn
};

/// The panels under each other, each with a logarithmic vertical axis and bits across. Labels do not cover each other.
std::string draw(std::string_view caption, std::span<const ChartFamily> families, std::span<const ChartPanel> panels);

}  // namespace turboquant_eval
