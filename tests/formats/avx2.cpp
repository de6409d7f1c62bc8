#include "formats/table.hpp"

#if defined(TURBOQUANT_HAS_AVX2)
tests::Table tests::avx2_operations() { return operations_of<turboquant::kernels::Avx2, turboquant::Isa::avx2>(); }
#endif
