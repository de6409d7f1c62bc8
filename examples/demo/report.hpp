// What turboquant_demo prints and writes.
#pragma once

#include "study.hpp"

#include <filesystem>
#include <span>
#include <string>

namespace demo {

/// The rows as a table, and one of recall by length and depth if it was measured.
std::string table(const Extent& extent, std::span<const Row> rows);

/// The same in full precision; what was not measured is null. Throws std::runtime_error if `file` cannot be written.
void write_json(const Extent& extent, std::span<const Row> rows, const std::filesystem::path& file);

/// KL divergence, logarithmic, against true bits, as an SVG document. Throws std::runtime_error as above.
void write_plot(std::span<const Row> rows, const std::filesystem::path& file);

}  // namespace demo
