#include "formats/table.hpp"

#if defined(TURBOQUANT_HAS_AVX2)
tests::Table tests::avx2_operations() { return make_table<turboquant::kernels::Avx2>(KeyCodecs(), ValueCodecs()); }
#endif
