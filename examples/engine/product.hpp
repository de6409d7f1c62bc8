// Products of weights and a batch of rows.
#pragma once

#include <cstddef>
#include <vector>

namespace engine {

/// Rows are stored in multiples of this many, the rest zero: every row then takes the same path through the product,
/// and its result does not depend on how many others come with it.
constexpr std::size_t kRowBlock = 4;

/// Rows [count][width].
class Rows {
 public:
  Rows(std::size_t count, std::size_t width)
      : count_(count), width_(width), numbers_((count + kRowBlock - 1) / kRowBlock * kRowBlock * width) {}

  std::size_t count() const { return count_; }
  std::size_t padded_count() const { return width_ == 0 ? 0 : numbers_.size() / width_; }
  std::size_t width() const { return width_; }
  float* operator[](std::size_t row) { return numbers_.data() + row * width_; }
  const float* operator[](std::size_t row) const { return numbers_.data() + row * width_; }

 private:
  std::size_t count_, width_;
  std::vector<float> numbers_;
};

/// out[r][o] = sum over i of transposed[i][o] in[r][i], by Eigen, with AVX2 where this CPU has it. out: [rows of
/// in][outputs]. The same numbers on every CPU with AVX2, and for every count of rows.
void multiply(const float* transposed, const Rows& in, Rows& out);

}  // namespace engine
