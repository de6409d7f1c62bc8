// What turboquant_eval prints and writes.
#pragma once

#include "accuracy.hpp"
#include "cached_formats.hpp"

#include <filesystem>
#include <string>
#include <vector>

namespace turboquant_eval {

struct LayerReport {
  unsigned number = 0;
  std::size_t tokens = 0, kv_heads = 0, heads = 0, head_dim = 0, value_dim = 0;
  double key_rounding = 0, value_rounding = 0;
};

struct FormatReport {
  std::string name;
  double bits_per_coordinate = 0;       // of what is stored, over all layers
  double key_bits = 0, value_bits = 0;  // the same for keys and values alone; unknown: not stored
  double bytes_per_token = 0;           // all layers together
  double compression = 0;               // bits in f16 / bits
  Accuracy accuracy;                    // mean over layers
  std::vector<Accuracy> layers;         // in the order of Report::layers
};

struct Report {
  std::vector<std::filesystem::path> inputs;
  CacheSettings settings;
  bool has_drawn_queries = false;
  std::vector<LayerReport> layers;
  std::vector<FormatReport> formats;
};

/// The table as plain text, with a line on what was measured above and one on rounding below it.
std::string table(const Report& report);

/// Errors of each layer, one table for keys and one for values.
std::string layer_table(const Report& report);

/// The same numbers in full precision; unknown ones are null. Throws MeasurementError if `file` cannot be written.
void write_json(const Report& report, const std::filesystem::path& file);

}  // namespace turboquant_eval
