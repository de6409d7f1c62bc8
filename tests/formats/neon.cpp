#include "formats/table.hpp"

#if defined(TURBOQUANT_HAS_NEON)
tests::Table tests::neon_operations() { return operations_of<turboquant::kernels::Neon, turboquant::Isa::neon>(); }
#endif
