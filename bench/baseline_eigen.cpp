// Choosing among the compilations of Eigen's product.
#include "baseline.hpp"

namespace baseline {

// One per compilation of eigen_product.cpp.
void compute_logits_eigen_portable(const float* query, const float* keys, std::size_t tokens, std::size_t dim,
                                   float* out);
#if defined(__x86_64__)
void compute_logits_eigen_avx2(const float* query, const float* keys, std::size_t tokens, std::size_t dim, float* out);
void compute_logits_eigen_avx512(const float* query, const float* keys, std::size_t tokens, std::size_t dim,
                                 float* out);
#endif

void compute_logits_eigen(Isa isa, const float* query, const float* keys, std::size_t tokens, std::size_t dim,
                          float* out) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return compute_logits_eigen_avx512(query, keys, tokens, dim, out);
  if (isa == Isa::avx2) return compute_logits_eigen_avx2(query, keys, tokens, dim, out);
#endif
  static_cast<void>(isa);
  compute_logits_eigen_portable(query, keys, tokens, dim, out);
}

}  // namespace baseline
