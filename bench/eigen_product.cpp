// Eigen's products as baselines: matrix-vector for logits, matrix-matrix for the attention of many queries.
// CMakeLists.txt compiles this file once per instruction set, with the compiler flags Eigen needs to use it and
// BENCH_EIGEN_ISA = portable, avx2 or avx512.
#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 warns of the deliberately undefined operands inside its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define BENCH_JOIN_AGAIN(a, b) a##b
#define BENCH_JOIN(a, b) BENCH_JOIN_AGAIN(a, b)
// Each copy of Eigen has a namespace of its own, so that the linker cannot mix code of one instruction set into
// another.
#define Eigen BENCH_JOIN(eigen_, BENCH_EIGEN_ISA)
#include <Eigen/Core>

#include <cmath>

namespace baseline {

namespace {
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
constexpr Eigen::Index kBlock = 256;  // tokens whose logits are held at a time
}  // namespace

void BENCH_JOIN(compute_logits_eigen_, BENCH_EIGEN_ISA)(const float* query, const float* keys, std::size_t tokens,
                                                        std::size_t dim, float* out) {
  const auto rows = static_cast<Eigen::Index>(tokens), columns = static_cast<Eigen::Index>(dim);
  const Eigen::Map<const Matrix> key_rows(keys, rows, columns);
  const Eigen::Map<const Eigen::VectorXf> query_vector(query, columns);
  Eigen::Map<Eigen::VectorXf>(out, rows).noalias() = key_rows * query_vector;
}

void BENCH_JOIN(prefill_eigen_, BENCH_EIGEN_ISA)(const float* queries, std::size_t count, const float* keys,
                                                 const float* values, std::size_t tokens, std::size_t dim, float scale,
                                                 float* out) {
  const auto n = static_cast<Eigen::Index>(count), all = static_cast<Eigen::Index>(tokens),
             columns = static_cast<Eigen::Index>(dim);
  const Eigen::Map<const Matrix> q(queries, n, columns), k(keys, all, columns), v(values, all, columns);
  Eigen::Map<Matrix> result(out, n, columns);
  result.setZero();
  Matrix logits(n, kBlock);
  Eigen::ArrayXf largest = Eigen::ArrayXf::Constant(n, -3e38F), sums = Eigen::ArrayXf::Zero(n);
  for (Eigen::Index begin = 0; begin < all; begin += kBlock) {
    const Eigen::Index width = all - begin < kBlock ? all - begin : kBlock;
    auto block = logits.leftCols(width);
    block.noalias() = q * k.middleRows(begin, width).transpose();
    for (Eigen::Index r = 0; r < n; ++r) {
      auto row = block.row(r).array();
      const float top = scale * row.maxCoeff() > largest[r] ? scale * row.maxCoeff() : largest[r];
      row = (scale * row - top).exp();
      if (top != largest[r]) {
        const float factor = std::exp(largest[r] - top);
        sums[r] *= factor;
        result.row(r) *= factor;
        largest[r] = top;
      }
      sums[r] += row.sum();
    }
    result.noalias() += block * v.middleRows(begin, width);
  }
  result.array().colwise() /= sums;
}

}  // namespace baseline
