// Choosing the product for this CPU.
#include "product.hpp"

namespace engine {

// One per compilation of eigen_product.cpp.
using Product = void (*)(const float* transposed, const float* in, std::size_t inputs, float* out, std::size_t outputs,
                         std::size_t rows);
void multiply_portable(const float* transposed, const float* in, std::size_t inputs, float* out, std::size_t outputs,
                       std::size_t rows);
#if defined(ENGINE_HAS_AVX2)
void multiply_avx2(const float* transposed, const float* in, std::size_t inputs, float* out, std::size_t outputs,
                   std::size_t rows);
#endif

namespace {

Product best_product() {
#if defined(ENGINE_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0) return multiply_avx2;
#endif
  return multiply_portable;
}

}  // namespace

void multiply(const float* transposed, const Rows& in, Rows& out) {
  static const Product product = best_product();
  product(transposed, in[0], in.width(), out[0], out.width(), in.padded_count());
}

}  // namespace engine
