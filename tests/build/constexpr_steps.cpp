// Everything that is computed at compile time: codebooks, trellises, Hadamard matrices, tables of kernels.
#include <turboquant/turboquant.hpp>

template class turboquant::KVCache<turboquant::TQ2, turboquant::TQ3, turboquant::TQ4, turboquant::TQ8>;
template struct turboquant::detail::OperationsOf<turboquant::TQ3>;
template struct turboquant::detail::OperationsOf<turboquant::TQ4>;
