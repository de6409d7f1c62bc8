// How far a format is from the exact layer, in double precision.
#pragma once

#include "exact_layer.hpp"
#include "subject.hpp"

#include <functional>
#include <limits>
#include <span>
#include <vector>

namespace turboquant_eval {

/// Sums run over the coded tokens of all heads of a layer, so that a head counts by its energy: keys k, decoded keys
/// k', errors e = k' - k; mean e and mean k are those of a head.
struct Accuracy {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  std::size_t coded_tokens = 0;
  double key_error = kUnknown;     // sum |e - mean e|^2 / sum |k - mean k|^2: softmax ignores an error all keys share
  double value_error = kUnknown;   // sum |v' - v|^2 / sum |v|^2
  double output_error = kUnknown;  // sum |o' - o|^2 / sum |o|^2, o the causal attention output
  double kl = kUnknown;            // mean over queries of KL(exact weights || weights), nats
  double top1 = kUnknown;          // share of queries whose largest weight is on the right token
};

/// Compares each subject with the layer. Query figures stay unknown for a layer without queries, those of values
/// and outputs for a subject without values, all figures for one that cannot store the layer. `advance` is called once
/// per block of queries (query_blocks(layer) times).
std::vector<Accuracy> compare(const ExactLayer& layer, std::span<const Subject> subjects,
                              const std::function<void()>& advance = {});

std::size_t query_blocks(const ExactLayer& layer);

/// Mean over layers, equal weights; unknown if unknown in any layer. coded_tokens is their sum.
Accuracy mean(std::span<const Accuracy> layers);

}  // namespace turboquant_eval
