#include "formats.hpp"

namespace turboquant::detail {

template struct OperationsOf<Format<PolarQuant<8>, PolarQuant<8>>>;
template struct OperationsOf<Format<PolarQuant<4>, PolarQuant<4>>>;
template struct OperationsOf<Format<TrellisQuant<3>, TrellisQuant<3>>>;
template struct OperationsOf<Format<TrellisQuant<2>, TrellisQuant<2>>>;
template struct OperationsOf<Format<PolarQuant<4>, PolarQuant<8>>>;
template struct OperationsOf<Format<TrellisQuant<3>, PolarQuant<8>>>;
template struct OperationsOf<Format<TrellisQuant<2>, PolarQuant<8>>>;
template struct OperationsOf<Format<PolarQuant<8>, PolarQuant<4>>>;
template struct OperationsOf<Format<PolarQuant<8>, TrellisQuant<3>>>;
template struct OperationsOf<Format<PolarQuant<8>, TrellisQuant<2>>>;

}  // namespace turboquant::detail
