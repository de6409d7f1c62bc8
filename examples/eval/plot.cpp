// Two charts of a report: keys and values.
#include "plot.hpp"

#include "chart.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fstream>
#include <string_view>
#include <utility>
#include <vector>

namespace turboquant_eval {
namespace {

constexpr ChartFamily kFamilies[] = {{"turboquant, recommended", "#0b57d0", true},
                                     {"not centred", "#8fb3ea", true},
                                     {"other pairs of codecs", "#0f8a6d", false},
                                     {"q8_0, q4_0", "#b8570b", false},
                                     {"KIVI, groups of 32 tokens", "#c62350", true},
                                     {"KIVI, groups of 128 tokens", "#e08fa6", true},
                                     {"TurboProd", "#7a3fb0", true}};

std::size_t family_of(std::string_view name) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  if (has("not centred")) return 1;
  if (name.starts_with("TQ")) return 0;
  if (name.starts_with("q")) return 3;
  if (name.starts_with("KIVI")) return has("128") ? 5 : 4;
  return name.starts_with("TurboProd") ? 6 : 2;
}

// What a point is called beside its family's colour: of a pair of codecs only the one that `side` (0: keys) shows.
std::string short_name(std::string_view name, std::size_t side) {
  name = name.substr(0, name.starts_with("q4_0, rotated") ? name.size() : name.find(", "));
  const std::size_t slash = name.find('/');
  if (slash != std::string_view::npos) name = side == 0 ? name.substr(0, slash) : name.substr(slash + 1);
  return std::string(name);
}

// side 0: keys, 1: values.
ChartPanel panel(const Report& report, std::size_t side) {
  ChartPanel result{side == 0 ? "Keys" : "Values", "relative squared error", "error", true, {}};
  for (const FormatReport& format : report.formats) {
    result.points.push_back({side == 0 ? format.key_bits : format.value_bits,
                             side == 0 ? format.accuracy.key_error : format.accuracy.value_error,
                             family_of(format.name), short_name(format.name, side), format.name});
  }
  return result;
}

}  // namespace

std::string plot(const Report& report) {
  std::vector<std::string> names;
  for (const auto& input : report.inputs) names.push_back(input.filename().string());
  const ChartPanel panels[] = {panel(report, 0), panel(report, 1)};
  return draw(fmt::format("{}: error against true bits, mean over layers; pages of {} tokens", fmt::join(names, ", "),
                          report.settings.page_tokens),
              kFamilies, panels);
}

void write_plot(const Report& report, const std::filesystem::path& file) {
  std::ofstream stream(file);
  stream << plot(report);
  stream.flush();
  if (!stream) throw MeasurementError(fmt::format("{}: cannot be written", file.string()));
}

}  // namespace turboquant_eval
