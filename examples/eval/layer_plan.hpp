// Which layer of a model gets how many bits.
#pragma once

#include <turboquant/cache/config.hpp>
#include <turboquant/layout/page.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace turboquant_eval {

/// A plan that does not fit the model or cannot be read; what() says what was expected and what was found.
class PlanError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// A model whose layers all have the same shape.
struct ModelShape {
  std::uint32_t layers = 1, kv_heads = 1, head_dim = 128;
  std::uint32_t value_dim = 0;  // 0: head_dim
  std::uint8_t center_bits = 8;
};

/// CacheConfig::layers of a KVCache<TQ8, TQ4, TQ3, TQ2>.
using LayerPlan = std::vector<turboquant::LayerShape>;

/// The same width, 8, 4, 3 or 2, in every layer. This and the functions below throw PlanError for any other width and
/// for a model that no cache can hold.
LayerPlan uniform_plan(const ModelShape& model, unsigned bits);

/// The first and the last tenth of the layers, rounded up, at 8 bits, the rest at 4.
LayerPlan conservative_plan(const ModelShape& model);

/// 3 bits everywhere.
LayerPlan aggressive_plan(const ModelShape& model);

/// The plan called by its name, "conservative" or "aggressive"; by its width, "4"; or in JSON, every layer named or the
/// rest under "default": {"layers.0": 8, "layers.79": 8, "default": 4}.
LayerPlan layer_plan(std::string_view text, const ModelShape& model);

/// The width of a layer of a plan.
unsigned bits_of(const turboquant::LayerShape& layer);

/// What a page of a layer of a plan holds; page_layout gives its bytes.
turboquant::layout::PageShape page_shape(const turboquant::LayerShape& layer, std::size_t page_tokens);

/// True bits per coordinate, scales, centres and padding of full pages included: MemoryUse::bits_per_coordinate
/// of the cache.
double average_bits(std::span<const turboquant::LayerShape> plan, std::size_t page_tokens);

/// A line for each run of equal layers, and the averages.
std::string describe(const LayerPlan& plan, std::size_t page_tokens);

}  // namespace turboquant_eval
