// Saving to and loading from standard streams. Not part of turboquant.hpp: most programs need no <iostream>.
#pragma once

#include <cstddef>
#include <istream>
#include <ostream>

#include <turboquant/cache/load.hpp>
#include <turboquant/cache/save.hpp>

namespace turboquant {

/// A sink that writes to the stream, which must outlive it and be in binary mode.
[[nodiscard]] inline ByteSink sink_to(std::ostream& stream) noexcept {
  return {&stream, [](void* context, const void* bytes, std::size_t count) {
            auto& to = *static_cast<std::ostream*>(context);
            return static_cast<bool>(to.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count)));
          }};
}

/// A source that reads from the stream, which must outlive it and be in binary mode.
[[nodiscard]] inline ByteSource source_from(std::istream& stream) noexcept {
  return {&stream, [](void* context, void* bytes, std::size_t count) {
            auto& from = *static_cast<std::istream*>(context);
            from.read(static_cast<char*>(bytes), static_cast<std::streamsize>(count));
            return static_cast<std::size_t>(from.gcount());
          }};
}

/// As `save` to a sink, and flushes: ok means that the stream has given all bytes to the system. To keep the last good
/// file write to a new one and rename it then.
template <class... F>
Status save(const KVCache<F...>& cache, SequenceId sequence, std::ostream& stream) {
  const Status status = save(cache, sequence, sink_to(stream));
  if (status.code == Status::ok && !stream.flush()) return {Status::io_error, "flush"};
  return status;
}

/// As `load` from a source.
template <class... F>
Status load(KVCache<F...>& cache, std::istream& stream, SequenceId& created) {
  return load(cache, source_from(stream), created);
}

}  // namespace turboquant
