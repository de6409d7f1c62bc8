// Where tests spend their time, compiled for speed whatever they are compiled for.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include "oracle/attention.hpp"
#include "oracle/random.hpp"

namespace oracle {

double gaussian(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const double radius = std::sqrt(-2 * std::log(uniform(seed, stream, 2 * index)));
  const double angle = 2 * std::numbers::pi * uniform(seed, stream, 2 * index + 1);
  return std::nearbyint(radius * std::cos(angle) * 0x1p20) * 0x1p-20;
}

double dot(const double* a, const double* b, std::size_t dim) {
  double sum = 0;
  for (std::size_t i = 0; i < dim; ++i) sum += a[i] * b[i];
  return sum;
}

double distance(const double* a, const double* b, std::size_t dim) {
  double sum = 0;
  for (std::size_t i = 0; i < dim; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

void add_scaled(double* to, double factor, const double* row, std::size_t dim) {
  for (std::size_t i = 0; i < dim; ++i) to[i] += factor * row[i];
}

}  // namespace oracle
