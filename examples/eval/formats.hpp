// The recommended formats, and pairs of them: their kernels are compiled once, in formats.cpp, and not again in every
// unit that has a cache of them.
#pragma once

#include <turboquant/turboquant.hpp>

namespace turboquant::detail {

extern template struct OperationsOf<Format<PolarQuant<8>, PolarQuant<8>>>;
extern template struct OperationsOf<Format<PolarQuant<4>, PolarQuant<4>>>;
extern template struct OperationsOf<Format<TrellisQuant<3>, TrellisQuant<3>>>;
extern template struct OperationsOf<Format<TrellisQuant<2>, TrellisQuant<2>>>;
extern template struct OperationsOf<Format<PolarQuant<4>, PolarQuant<8>>>;
extern template struct OperationsOf<Format<TrellisQuant<3>, PolarQuant<8>>>;
extern template struct OperationsOf<Format<TrellisQuant<2>, PolarQuant<8>>>;
extern template struct OperationsOf<Format<PolarQuant<8>, PolarQuant<4>>>;
extern template struct OperationsOf<Format<PolarQuant<8>, TrellisQuant<3>>>;
extern template struct OperationsOf<Format<PolarQuant<8>, TrellisQuant<2>>>;

}  // namespace turboquant::detail
