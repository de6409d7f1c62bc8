// Sizes and alignments under the flags of this unit, in a function called EXTENTS. Nothing is called and no class is
// instantiated beyond its layout: the unit shares no function with those of other flags.
#include "layouts.hpp"

#include <turboquant/cache/stream.hpp>
#include <turboquant/turboquant.hpp>

namespace {

using namespace turboquant;
using Mixed = KVCache<TQ3, TQ4, TQ8, Format<PolarQuant<4>, ScalarQuant<4>>>;

#define EXTENT(...) \
  { #__VA_ARGS__, sizeof(__VA_ARGS__), alignof(__VA_ARGS__) }
constexpr Extent kExtents[] = {
    EXTENT(half),         EXTENT(bfloat16),  EXTENT(Rows),          EXTENT(ConstRows),      EXTENT(Status),
    EXTENT(MemorySource), EXTENT(Scratch),   EXTENT(LayerShape),    EXTENT(CacheConfig),    EXTENT(MemoryUse),
    EXTENT(SequenceId),   EXTENT(ByteSink),  EXTENT(ByteSource),    EXTENT(KVCache<TQ4>),   EXTENT(Mixed),
    EXTENT(Rotation),     EXTENT(Qjl),       EXTENT(TurboProd<3>),  EXTENT(PageCodec<TQ3>), EXTENT(PageSpan),
    EXTENT(PageItem),     EXTENT(BatchItem), EXTENT(AttentionPlan), EXTENT(AttentionParams)};

}  // namespace

Extents EXTENTS() { return {kExtents, sizeof(kExtents) / sizeof(kExtents[0])}; }
