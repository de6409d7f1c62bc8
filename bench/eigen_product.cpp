// Eigen's matrix-vector product as a baseline. CMakeLists.txt compiles this file once per instruction set, with the
// compiler flags Eigen needs to use it and BENCH_EIGEN_ISA = portable, avx2 or avx512.
#define BENCH_JOIN_AGAIN(a, b) a##b
#define BENCH_JOIN(a, b) BENCH_JOIN_AGAIN(a, b)
// Each copy of Eigen has a namespace of its own, so that the linker cannot mix code of one instruction set into
// another.
#define Eigen BENCH_JOIN(eigen_, BENCH_EIGEN_ISA)
#include <Eigen/Core>

namespace baseline {

void BENCH_JOIN(compute_logits_eigen_, BENCH_EIGEN_ISA)(const float* query, const float* keys, std::size_t tokens,
                                                        std::size_t dim, float* out) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto rows = static_cast<Eigen::Index>(tokens), columns = static_cast<Eigen::Index>(dim);
  const Eigen::Map<const Matrix> key_rows(keys, rows, columns);
  const Eigen::Map<const Eigen::VectorXf> query_vector(query, columns);
  Eigen::Map<Eigen::VectorXf>(out, rows).noalias() = key_rows * query_vector;
}

}  // namespace baseline
