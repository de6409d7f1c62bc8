// Choosing among the compilations of Eigen's products.
#include "baseline.hpp"

namespace baseline {

// One per compilation of eigen_product.cpp.
void compute_logits_eigen_portable(const float* query, const float* keys, std::size_t tokens, std::size_t dim,
                                   float* out);
void prefill_eigen_portable(const float* queries, std::size_t count, const float* keys, const float* values,
                            std::size_t tokens, std::size_t dim, float scale, float* out);
#if defined(__x86_64__)
void prefill_eigen_avx2(const float* queries, std::size_t count, const float* keys, const float* values,
                        std::size_t tokens, std::size_t dim, float scale, float* out);
void prefill_eigen_avx512(const float* queries, std::size_t count, const float* keys, const float* values,
                          std::size_t tokens, std::size_t dim, float scale, float* out);
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

void prefill_eigen(Isa isa, const float* queries, std::size_t count, const float* keys, const float* values,
                   std::size_t tokens, std::size_t dim, float scale, float* out) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return prefill_eigen_avx512(queries, count, keys, values, tokens, dim, scale, out);
  if (isa == Isa::avx2) return prefill_eigen_avx2(queries, count, keys, values, tokens, dim, scale, out);
#endif
  static_cast<void>(isa);
  prefill_eigen_portable(queries, count, keys, values, tokens, dim, scale, out);
}

}  // namespace baseline
