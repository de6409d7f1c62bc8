#include "formats/table.hpp"

#if defined(TURBOQUANT_HAS_AVX512)
tests::Table tests::avx512_operations() { return make_table<turboquant::kernels::Avx512>(KeyCodecs(), ValueCodecs()); }
#endif
