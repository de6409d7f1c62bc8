#include "formats/table.hpp"

tests::Table tests::portable_operations() {
  return operations_of<turboquant::kernels::Portable, turboquant::Isa::portable>();
}
