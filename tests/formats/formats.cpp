#include "formats/formats.hpp"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "formats/table.hpp"

namespace tests {
namespace {

using namespace turboquant;

constexpr Isa kAll[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon};

[[noreturn]] void stop(const char* why, const char* what, int code) {
  std::printf("%s: %s\n", what, why);
  std::fflush(stdout);
  std::_Exit(code);
}

Isa chosen_isa() {
  const char* name = std::getenv("TURBOQUANT_TEST_ISA");
  if (name == nullptr || *name == '\0') return best_isa();
  for (const Isa isa : kAll) {
    if (std::string_view(name) != to_string(isa)) continue;
    if (!is_supported(isa)) stop("this machine does not have these kernels", name, 77);  // ctest: skipped
    return isa;
  }
  stop("no such set of kernels", name, 1);
}

Table operations_on(Isa isa) {
#if defined(TURBOQUANT_HAS_AVX2)
  if (isa == Isa::avx2 && is_supported(isa)) return avx2_operations();
#endif
#if defined(TURBOQUANT_HAS_AVX512)
  if (isa == Isa::avx512 && is_supported(isa)) return avx512_operations();
#endif
#if defined(TURBOQUANT_HAS_NEON)
  if (isa == Isa::neon && is_supported(isa)) return neon_operations();
#endif
  static_cast<void>(isa);
  return portable_operations();
}

}  // namespace

Isa tested_isa() noexcept {
  static const Isa isa = chosen_isa();
  return isa;
}

const detail::Operations* find_operations(std::uint32_t format_id, Isa isa) noexcept {
  if (isa == best_isa()) isa = tested_isa();
  for (const detail::Operations* operations : operations_on(isa)) {
    if (operations->format_id == format_id) return operations;
  }
  stop("not in tests/formats/table.hpp", "a format", 1);
}

}  // namespace tests
