#include "formats/table.hpp"

#if defined(TURBOQUANT_HAS_AVX512)
tests::Table tests::avx512_operations() {
#if defined(TURBOQUANT_TEST_CANNOT_RUN_AVX512)
  return {};
#else
  return operations_of<turboquant::kernels::Avx512, turboquant::Isa::avx512>();
#endif
}
#endif
