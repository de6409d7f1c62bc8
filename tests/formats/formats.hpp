// The kernels of every format, compiled once for all tests, for one set or another.
//
// A test program that includes this before the library's headers (the precompiled header does) takes the kernels of
// each Format<Key, Value> from there instead of compiling its own. What a test asks for as the best set of this machine
// is the one named by TURBOQUANT_TEST_ISA, if that is set: so the whole suite runs on each.
#pragma once

#include <turboquant/turboquant.hpp>

namespace tests {

/// The kernels of a format for an ISA, which is replaced as above if it is best_isa(). Ends the program if the format
/// is not among those of table.hpp or the ISA named is unknown.
const turboquant::detail::Operations* find_operations(std::uint32_t format_id, turboquant::Isa isa) noexcept;

/// The set that stands for the best one of this machine.
turboquant::Isa tested_isa() noexcept;

}  // namespace tests

template <class Key, class Value>
struct turboquant::detail::OperationsOf<turboquant::Format<Key, Value>> {
  static const Operations* on(Isa isa) noexcept { return tests::find_operations(Format<Key, Value>::id, isa); }
};
