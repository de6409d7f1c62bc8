// A matrix product by Eigen. CMakeLists.txt compiles this file once per instruction set, with the flags that Eigen
// needs to use it and ENGINE_ISA = portable or avx2.
#define ENGINE_JOIN_AGAIN(a, b) a##b
#define ENGINE_JOIN(a, b) ENGINE_JOIN_AGAIN(a, b)
// Each copy of Eigen has a namespace of its own, so that the linker cannot mix code of one instruction set into
// another.
#define Eigen ENGINE_JOIN(engine_eigen_, ENGINE_ISA)
#include <Eigen/Core>

namespace engine {

void ENGINE_JOIN(multiply_, ENGINE_ISA)(const float* transposed, const float* in, std::size_t inputs, float* out,
                                        std::size_t outputs, std::size_t rows) {
  // Eigen cuts sums where the caches of this CPU suggest it; fixed sizes give the same sums everywhere.
  [[maybe_unused]] static const bool once = [] {
    Eigen::setCpuCacheSizes(32 << 10, 256 << 10, 2 << 20);
    return true;
  }();
  using Matrix = Eigen::MatrixXf;  // columns are contiguous
  const auto n = static_cast<Eigen::Index>(rows), k = static_cast<Eigen::Index>(inputs);
  const auto m = static_cast<Eigen::Index>(outputs);
  Eigen::Map<Matrix>(out, m, n).noalias() =
      Eigen::Map<const Matrix>(transposed, m, k) * Eigen::Map<const Matrix>(in, k, n);
}

}  // namespace engine
