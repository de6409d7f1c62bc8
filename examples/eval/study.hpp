// What the defaults rest on: page sizes and centres, value codecs, and keys with a large offset.
#pragma once

#include "cached_formats.hpp"

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace turboquant_eval {

/// Errors as in Accuracy, means over layers; bits of full pages.
struct PageStudy {
  std::string codecs;
  std::size_t page_tokens = 0;
  unsigned center_bits = 0;
  double key_bits = 0, value_bits = 0, key_error = 0, value_error = 0;
};

struct ValueStudy {
  std::string codec;
  double bits = 0, error = 0;
};

/// Keys with a constant added, against exact attention on the same bf16 keys, and what that is without the constant.
struct OffsetStudy {
  std::string codecs;
  unsigned center_bits = 0;
  double deviations = 0;  // of the keys, added to all of them: with_offset()
  double output_error = 0, key_error = 0, kl = 0;
  double plain_output_error = 0, plain_key_error = 0, plain_kl = 0;  // same codecs and centres
};

using Advance = std::function<void()>;

/// 4-, 3- and 2-bit codecs x pages of 32, 64, 128 and 256 tokens x centres of 0, 8 and 16 bits, in this order.
std::vector<PageStudy> study_pages(const LayerSet& layers, const CacheSettings& settings, const Advance& advance = {});

/// PolarQuant, ScalarQuant and TrellisQuant at 4, 3 and 2 bits.
std::vector<ValueStudy> study_values(const LayerSet& layers, const CacheSettings& settings,
                                     const Advance& advance = {});

/// Each pair of codecs without centres and with 8-bit centres at 20 deviations, with 8-bit and with 16-bit centres at
/// 100. Queries are drawn for layers that have none, the same with and without the constant.
std::vector<OffsetStudy> study_offsets(const LayerSet& layers, const CacheSettings& settings,
                                       std::span<const std::string_view> codecs, const Advance& advance = {});

/// All three as tables.
std::string study(const LayerSet& layers, const CacheSettings& settings, bool shows_progress);

}  // namespace turboquant_eval
