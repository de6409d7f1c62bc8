// The door: every public header of turboquant except cache/stream.hpp, which brings <iostream>.
#pragma once

#include <turboquant/attention/attend.hpp>
#include <turboquant/attention/merge.hpp>
#include <turboquant/attention/pages.hpp>
#include <turboquant/cache/byte_stream.hpp>
#include <turboquant/cache/config.hpp>
#include <turboquant/cache/format.hpp>
#include <turboquant/cache/kv_cache.hpp>
#include <turboquant/cache/load.hpp>
#include <turboquant/cache/page_codec.hpp>
#include <turboquant/cache/save.hpp>
#include <turboquant/codec/codec.hpp>
#include <turboquant/codec/polar_quant.hpp>
#include <turboquant/codec/qjl.hpp>
#include <turboquant/codec/scalar_quant.hpp>
#include <turboquant/codec/trellis_quant.hpp>
#include <turboquant/core/dtype.hpp>
#include <turboquant/core/rows.hpp>
#include <turboquant/core/status.hpp>
#include <turboquant/kernels/dispatch.hpp>
#include <turboquant/transform/hadamard.hpp>
#include <turboquant/transform/rotation.hpp>
#include <turboquant/version.hpp>

/// The public interface: `KVCache`, the functions that take one, formats, codecs, rows and statuses. `detail`,
/// `kernels` and `layout` are inner parts.
namespace turboquant {}
