// All pairs of a key codec and a value codec, for one set of kernels.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include <turboquant/cache/format.hpp>

namespace tests {

template <class... C>
struct Codecs {
  static constexpr std::size_t count = sizeof...(C);
};

#if defined(TURBOQUANT_TEST_FEW_FORMATS)
// Those of most tests of the container, for builds that are made often (tests/faults).
using KeyCodecs = Codecs<turboquant::PolarQuant<3>, turboquant::PolarQuant<4>, turboquant::PolarQuant<8>,
                         turboquant::TrellisQuant<2>, turboquant::TrellisQuant<3>>;
using ValueCodecs = Codecs<turboquant::PolarQuant<4>, turboquant::PolarQuant<8>, turboquant::ScalarQuant<4>,
                           turboquant::TrellisQuant<2>, turboquant::TrellisQuant<3>>;
#else
using KeyCodecs = Codecs<turboquant::PolarQuant<1>, turboquant::PolarQuant<2>, turboquant::PolarQuant<3>,
                         turboquant::PolarQuant<4>, turboquant::PolarQuant<8>, turboquant::TrellisQuant<2>,
                         turboquant::TrellisQuant<3>, turboquant::TrellisQuant<4>>;
using ValueCodecs = Codecs<turboquant::PolarQuant<1>, turboquant::PolarQuant<2>, turboquant::PolarQuant<3>,
                           turboquant::PolarQuant<4>, turboquant::PolarQuant<8>, turboquant::ScalarQuant<2>,
                           turboquant::ScalarQuant<3>, turboquant::ScalarQuant<4>, turboquant::ScalarQuant<8>,
                           turboquant::TrellisQuant<2>, turboquant::TrellisQuant<3>, turboquant::TrellisQuant<4>>;
#endif

using Table = std::array<const turboquant::detail::Operations*, KeyCodecs::count * ValueCodecs::count>;

template <class Kernels, class... Key, class... Value>
Table make_table(Codecs<Key...>, Codecs<Value...>) {
  Table table{};
  std::size_t size = 0;
  const auto add_row = [&]<class K>(std::type_identity<K>) {
    ((table[size++] = &turboquant::detail::kOperations<turboquant::Format<K, Value>, Kernels>), ...);
  };
  (add_row(std::type_identity<Key>()), ...);
  return table;
}

/// Nothing for a set that TURBOQUANT_ISA leaves out.
template <class Kernels, turboquant::Isa isa>
Table operations_of() {
  if constexpr (turboquant::is_built(isa)) {
    return make_table<Kernels>(KeyCodecs(), ValueCodecs());
  } else {
    return {};
  }
}

// One unit each.
Table portable_operations();
#if defined(TURBOQUANT_HAS_AVX2)
Table avx2_operations();
#endif
#if defined(TURBOQUANT_HAS_AVX512)
Table avx512_operations();
#endif
#if defined(TURBOQUANT_HAS_NEON)
Table neon_operations();
#endif

}  // namespace tests
