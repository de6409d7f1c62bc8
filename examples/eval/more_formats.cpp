#include "more_formats.hpp"

namespace turboquant::detail {

template struct OperationsOf<Format<PolarQuant<3>, PolarQuant<3>>>;
template struct OperationsOf<Format<PolarQuant<2>, PolarQuant<2>>>;
template struct OperationsOf<Format<TrellisQuant<4>, TrellisQuant<4>>>;
template struct OperationsOf<Format<PolarQuant<4>, ScalarQuant<4>>>;
template struct OperationsOf<Format<PolarQuant<3>, ScalarQuant<3>>>;
template struct OperationsOf<Format<PolarQuant<2>, ScalarQuant<2>>>;
template struct OperationsOf<Format<PolarQuant<4>, PolarQuant<3>>>;

}  // namespace turboquant::detail
