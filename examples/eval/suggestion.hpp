// Bits of centres and a format for each layer of a dump.
#pragma once

#include "cached_formats.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace turboquant_eval {

constexpr double kErrorLimit = 0.01;     // of keys and of values; 4 bits keep it on ordinary layers
constexpr double kRoundingLimit = 0.01;  // what rounding a centre may add, relative to the spread's energy

struct LayerSuggestion {
  unsigned layer = 0;
  /// Largest magnitude of a page's mean key, rotated, over the spread: the root mean square of the keys' coordinates
  /// less their page's mean, of that head.
  double offset = 0;
  /// What rounding centres to int8 adds to the energy that is left to code, at most: (offset / 127)^2 / 12.
  double rounding = 0;
  std::uint8_t center_bits = 8;
  unsigned bits = 4;                                     // TQ8, TQ4, TQ3 or TQ2
  double key_error = 0, value_error = 0, true_bits = 0;  // measured at that width
  bool is_within_limit = true;                           // else even 8 bits miss the error limit
};

/// The rule, layer by layer: centres have 16 bits where `rounding` is above kRoundingLimit, else 8; the format is the
/// narrowest of TQ2, TQ3, TQ4 and TQ8 whose measured errors of keys and of values, with these centres, are both at most
/// `error_limit`. Throws MeasurementError.
std::vector<LayerSuggestion> suggest(const LayerSet& layers, const CacheSettings& settings,
                                     double error_limit = kErrorLimit);

/// A line for each layer, the rule, and the plan in the text form of layer_plan.hpp.
std::string describe(const std::vector<LayerSuggestion>& layers, double error_limit);

}  // namespace turboquant_eval
