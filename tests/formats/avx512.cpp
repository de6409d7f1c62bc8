#include "formats/table.hpp"

#if defined(TURBOQUANT_HAS_AVX512)
tests::Table tests::avx512_operations() {
  return operations_of<turboquant::kernels::Avx512, turboquant::Isa::avx512>();
}
#endif
