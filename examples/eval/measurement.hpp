// Every format on every layer.
#pragma once

#include "layer_set.hpp"
#include "progress_bar.hpp"
#include "report.hpp"

namespace turboquant_eval {

/// The layers as numbers, in the order of the set; those without queries get `drawn_heads` drawn query heads per KV
/// head.
std::vector<ExactLayer> exact_layers(const LayerSet& layers, std::size_t drawn_heads, std::uint64_t seed);

/// Measures f16, the library's formats and the baselines. Throws MeasurementError, also if nothing of a layer was
/// coded. `inputs` of the report are left to the caller.
Report measure(const LayerSet& layers, const CacheSettings& settings, bool draws_queries, bool shows_progress);

}  // namespace turboquant_eval
