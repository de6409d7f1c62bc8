// The report as a picture.
#pragma once

#include "report.hpp"

#include <filesystem>
#include <string>

namespace turboquant_eval {

/// Errors of keys and of values, logarithmic, against true bits, as a self-contained SVG document; with the bound 4^-b,
/// which no code of b bits beats on Gaussian numbers. Rows without an error, or with none above 10^-8, cannot be drawn.
std::string plot(const Report& report);

/// Throws MeasurementError if `file` cannot be written.
void write_plot(const Report& report, const std::filesystem::path& file);

}  // namespace turboquant_eval
