// One layer in one format: what was stored, what it decodes to, how it attends.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace turboquant_eval {

/// A measurement that could not be made; what() says which and why.
class MeasurementError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Subject {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  std::string format;
  // Of full pages, everything included, unless the format says otherwise.
  double key_bits = kUnknown, value_bits = kUnknown;  // per coordinate of keys and of values; unknown: not stored
  double bits_per_coordinate = 0;                     // of what is stored
  double bytes_per_token = 0;                         // all KV heads, of what is stored
  std::vector<float> keys;     // decoded, [kv_heads][tokens][head_dim]; empty: this format cannot store the layer
  std::vector<float> values;   // decoded, [kv_heads][tokens][value_dim]; empty: nor these, or it is for keys only
  std::vector<char> is_coded;  // [tokens]

  /// Attention of the queries at positions first .. first + count - 1, the code under test doing the work:
  /// logits [count][heads][tokens], unscaled, and out [count][heads][value_dim]. Empty: attention on the decoded
  /// keys and values, in double.
  std::function<void(std::size_t first, std::size_t count, float* logits, float* out)> attend;
};

}  // namespace turboquant_eval
