#include "formats/table.hpp"

tests::Table tests::portable_operations() {
  return make_table<turboquant::kernels::Portable>(KeyCodecs(), ValueCodecs());
}
