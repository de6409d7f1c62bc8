// Which kernels run: the best that this CPU has, unless the caller asks for others.
#pragma once

#include <cstdint>

#include <turboquant/kernels/portable.hpp>
#include <turboquant/kernels/x86_avx2.hpp>

namespace turboquant {

/// A set of kernels. All write the same bytes; attention outputs agree to 2e-4 of their norm.
enum class Isa : std::uint8_t { portable, avx2 };

[[nodiscard]] constexpr const char* to_string(Isa isa) noexcept { return isa == Isa::avx2 ? "avx2" : "portable"; }

/// True if this CPU and this build have the kernels.
[[nodiscard]] inline bool is_supported(Isa isa) noexcept {
#if defined(TURBOQUANT_HAS_AVX2)
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") != 0;
#endif
  return isa == Isa::portable;
}

/// The fastest supported one; TURBOQUANT_ISA, a name of Isa, fixes it for a program or a translation unit.
[[nodiscard]] inline Isa best_isa() noexcept {
#if defined(TURBOQUANT_ISA)
  return is_supported(Isa::TURBOQUANT_ISA) ? Isa::TURBOQUANT_ISA : Isa::portable;
#else
  return is_supported(Isa::avx2) ? Isa::avx2 : Isa::portable;
#endif
}

}  // namespace turboquant
