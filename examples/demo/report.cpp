// Table, JSON and picture.
#include "report.hpp"

#include <fmt/format.h>
#include <eval/chart.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace demo {
namespace {

using engine::Stress;
using nlohmann::ordered_json;
using turboquant_eval::ChartFamily;
using turboquant_eval::ChartPanel;

std::string number(double value, const char* format) {
  return std::isnan(value) ? "-" : fmt::format(fmt::runtime(format), value);
}

constexpr double kRounding = 1e-8;  // a divergence below this is that of float arithmetic

// Two digits that count.
std::string divergence(double value) {
  if (std::isnan(value)) return "-";
  return std::abs(value) < kRounding ? "0" : fmt::format("{:.2g}", value);
}

// How many times the divergence is that of the same windows without stress.
std::string growth(const Row& row, Stress stress) {
  const auto found = row.stressed.find(stress);
  if (found == row.stressed.end() || !(row.same_windows.mean_kl() >= kRounding)) return "-";
  const double times = found->second.mean_kl() / row.same_windows.mean_kl();
  return fmt::format("{:.{}f}x", times, times < 9.95 ? 1 : 0);
}

std::string recall_table(std::span<const Row> rows) {
  std::string text = fmt::format("\n{:<24}", "digits right, %");
  for (const auto& [length, recall] : rows.front().recall) text += fmt::format("{:>8}", length);
  for (std::size_t depth = 0; depth < kDepths; ++depth)
    text += fmt::format("{:>11}", fmt::format("quarter {}", depth + 1));
  text += '\n';
  for (const Row& row : rows) {
    text += fmt::format("{:<24}", row.name);
    for (const auto& [length, recall] : row.recall)
      text += fmt::format("{:>8}", number(100 * recall.accuracy(), "{:.1f}"));
    const Recall whole = row.whole_recall();
    for (std::size_t depth = 0; depth < kDepths; ++depth) {
      text += fmt::format("{:>11}", number(100 * whole.accuracy(depth), "{:.1f}"));
    }
    text += '\n';
  }
  return text + fmt::format("{} questions; by bytes of the text, and by the quarter of it in which the key was given\n",
                            rows.front().whole_recall().all_digits() / kDigits);
}

ordered_json as_json(const Recall& recall) {
  ordered_json depths;
  for (std::size_t depth = 0; depth < kDepths; ++depth) {
    depths.push_back({{"digits", recall.digits[depth]}, {"right", recall.right[depth]}});
  }
  return {{"digits", recall.all_digits()}, {"accuracy", recall.accuracy()}, {"depths", depths}};
}

void write(const std::string& text, const std::filesystem::path& file) {
  std::ofstream stream(file);
  stream << text;
  stream.flush();
  if (!stream) throw std::runtime_error(fmt::format("{}: cannot be written", file.string()));
}

constexpr ChartFamily kFamilies[] = {{"turboquant", "#0b57d0", true},
                                     {"turboquant, not centred", "#8fb3ea", true},
                                     {"turboquant, newest 64 raw", "#0f8a6d", true},
                                     {"q8_0, q4_0 (ggml)", "#b8570b", false},
                                     {"KIVI, groups of 32", "#c62350", true},
                                     {"rotated Lloyd-Max levels", "#7a3fb0", true}};

std::size_t family_of(const Row& row) {
  if (row.name.starts_with("q")) return 3;
  if (row.name.starts_with("KIVI")) return 4;
  if (row.name.starts_with("plain")) return 5;
  if (row.name.find("not centred") != std::string::npos) return 1;
  return row.choice.recent_tokens > 0 ? 2 : 0;
}

}  // namespace

std::string table(const Extent& extent, std::span<const Row> rows) {
  std::string text =
      fmt::format("{:<24}{:>7}{:>10}{:>9}{:>10}{:>8}{:>10}{:>10}{:>10}{:>9}{:>11}\n", "cache", "bits", "bytes", "bits",
                  "KL", "top-1", "KL with", "KL with", "KL with", "digits", "attention");
  text += fmt::format("{:<24}{:>7}{:>10}{:>9}{:>10}{:>8}{:>10}{:>10}{:>10}{:>9}{:>11}\n", "", "per num",
                      "at " + fmt::to_string(extent.window_tokens), "per byte", "to f32", "same, %", "offset",
                      "outliers", "sink", "right, %", "us/token");
  for (const Row& row : rows) {
    const Prediction& prediction = row.prediction;
    text += fmt::format(
        "{:<24}{:>7.3f}{:>10.0f}{:>9.4f}{:>10}{:>8.2f}{:>10}{:>10}{:>10}{:>9}{:>11}\n", row.name, row.bits,
        row.cache_bytes, prediction.bits_per_token(), divergence(prediction.mean_kl()), 100 * prediction.agreement(),
        growth(row, Stress::key_offset), growth(row, Stress::outlier_channels), growth(row, Stress::sink_token),
        number(100 * row.whole_recall().accuracy(), "{:.1f}"), number(1e6 * row.attention_time, "{:.0f}"));
  }
  if (!rows.front().recall.empty()) text += recall_table(rows);
  return text;
}

void write_json(const Extent& extent, std::span<const Row> rows, const std::filesystem::path& file) {
  ordered_json root = {{"window_tokens", extent.window_tokens},
                       {"windows", extent.windows},
                       {"stress_windows", extent.stress_windows},
                       {"timed_context", extent.timed_context}};
  for (const Row& row : rows) {
    ordered_json entry = {{"cache", row.name},
                          {"bits_per_coordinate", row.bits},
                          {"bytes", row.cache_bytes},
                          {"bits_per_token", row.prediction.bits_per_token()},
                          {"kl", row.prediction.mean_kl()},
                          {"top1_agreement", row.prediction.agreement()},
                          {"kl_of_stress_windows", row.same_windows.mean_kl()},
                          {"attention_seconds_per_token", row.attention_time}};
    for (const auto& [stress, prediction] : row.stressed) {
      entry["stress"][std::string(engine::to_string(stress))] = prediction.mean_kl();
    }
    if (!row.recall.empty()) entry["recall"] = as_json(row.whole_recall());
    for (const auto& [length, recall] : row.recall) {
      entry["recall_by_length"][fmt::to_string(length)] = as_json(recall);
    }
    root["rows"].push_back(entry);
  }
  write(root.dump(2) + '\n', file);
}

void write_plot(std::span<const Row> rows, const std::filesystem::path& file) {
  ChartPanel panel{"KL divergence to the f32 cache", "nats per token", "KL", false, {}};
  for (const Row& row : rows) {
    if (row.choice.format == "f32" || row.choice.format == "f16") continue;
    panel.points.push_back({row.bits, row.prediction.mean_kl(), family_of(row), row.name, row.name});
  }
  write(turboquant_eval::draw("the cost of a coded cache on held-out text", kFamilies, {&panel, 1}), file);
}

}  // namespace demo
