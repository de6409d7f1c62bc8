#include "formats/table.hpp"

#if defined(TURBOQUANT_HAS_NEON)
tests::Table tests::neon_operations() { return make_table<turboquant::kernels::Neon>(KeyCodecs(), ValueCodecs()); }
#endif
