// Which kernels run: the best that this CPU has, unless the caller asks for others.
#pragma once

#include <cstdint>

#include <turboquant/kernels/portable.hpp>
#include <turboquant/kernels/x86_avx2.hpp>

namespace turboquant {

/// A set of kernels. All write the same bytes; attention outputs agree to 2e-4 of their norm.
enum class Isa : std::uint8_t { portable, avx2 };

[[nodiscard]] constexpr const char* to_string(Isa isa) noexcept { return isa == Isa::avx2 ? "avx2" : "portable"; }

/// True if this build has the kernels: all that the compiler can make, or with TURBOQUANT_ISA, a name of Isa, that one
/// and the portable one. Defined for a whole program, it saves the others' compile time and code.
[[nodiscard]] constexpr bool is_built(Isa isa) noexcept {
#if !defined(TURBOQUANT_HAS_AVX2)
  return isa == Isa::portable;
#elif defined(TURBOQUANT_ISA)
  return isa == Isa::portable || isa == Isa::TURBOQUANT_ISA;
#else
  return isa == Isa::portable || isa == Isa::avx2;
#endif
}

/// True if this build and this CPU have the kernels.
[[nodiscard]] inline bool is_supported(Isa isa) noexcept {
#if defined(TURBOQUANT_HAS_AVX2)
  if (isa == Isa::avx2) return is_built(isa) && __builtin_cpu_supports("avx2") != 0;
#endif
  return isa == Isa::portable;
}

/// The fastest supported one.
[[nodiscard]] inline Isa best_isa() noexcept { return is_supported(Isa::avx2) ? Isa::avx2 : Isa::portable; }

}  // namespace turboquant
