// The formats that turboquant_eval compares with the recommended ones, compiled once as these are.
#pragma once

#include "formats.hpp"

namespace turboquant::detail {

extern template struct OperationsOf<Format<PolarQuant<3>, PolarQuant<3>>>;
extern template struct OperationsOf<Format<PolarQuant<2>, PolarQuant<2>>>;
extern template struct OperationsOf<Format<TrellisQuant<4>, TrellisQuant<4>>>;
extern template struct OperationsOf<Format<PolarQuant<4>, ScalarQuant<4>>>;
extern template struct OperationsOf<Format<PolarQuant<3>, ScalarQuant<3>>>;
extern template struct OperationsOf<Format<PolarQuant<2>, ScalarQuant<2>>>;
extern template struct OperationsOf<Format<PolarQuant<4>, PolarQuant<3>>>;

}  // namespace turboquant::detail
