// Which kernels run: the best that this CPU has, unless the caller asks for others.
#pragma once

#include <cstdint>

#include <turboquant/kernels/arm_neon.hpp>
#include <turboquant/kernels/portable.hpp>
#include <turboquant/kernels/x86_avx2.hpp>
#include <turboquant/kernels/x86_avx512.hpp>

#if defined(TURBOQUANT_HAS_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace turboquant {

/// A set of kernels. All write the same bytes; attention outputs agree to 2e-4 of their norm.
enum class Isa : std::uint8_t {
  portable,  ///< standard C++ with the flags of the build; any CPU
  avx2,      ///< x86-64 with AVX2
  avx512,    ///< x86-64 with AVX-512 F, BW, VL, DQ, VNNI and VBMI
  neon       ///< 64-bit Arm with dot products
};

/// The name as it is written in C++.
[[nodiscard]] constexpr const char* to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::neon:
      return "neon";
  }
  return "";
}

/// True if this build has the kernels: all that the compiler can make, or with TURBOQUANT_ISA, a name of Isa, that one
/// and the portable one. Defined for a whole program, it saves the others' compile time and code.
[[nodiscard]] constexpr bool is_built(Isa isa) noexcept {
  if (isa == Isa::portable) return true;
#if defined(TURBOQUANT_ISA)
  if (isa != Isa::TURBOQUANT_ISA) return false;
#endif
#if defined(TURBOQUANT_HAS_AVX2)
  if (isa == Isa::avx2) return true;
#endif
#if defined(TURBOQUANT_HAS_AVX512)
  if (isa == Isa::avx512) return true;
#endif
#if defined(TURBOQUANT_HAS_NEON)
  if (isa == Isa::neon) return true;
#endif
  return false;
}

/// True if this build and this CPU (and its operating system) have the kernels.
[[nodiscard]] inline bool is_supported(Isa isa) noexcept {
#if defined(TURBOQUANT_HAS_AVX2)
  if (isa == Isa::avx2) return is_built(isa) && __builtin_cpu_supports("avx2") != 0;
#endif
#if defined(TURBOQUANT_HAS_AVX512)
  if (isa == Isa::avx512) {
    return is_built(isa) && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
           __builtin_cpu_supports("avx512vnni") != 0 && __builtin_cpu_supports("avx512vbmi") != 0;
  }
#endif
#if defined(TURBOQUANT_HAS_NEON)
  if (isa == Isa::neon) {
#if defined(__ARM_FEATURE_DOTPROD) || defined(__ENVIRONMENT_MAC_OS_X_VERSION_MIN_REQUIRED__)
    return is_built(isa);  // by the flags of the build; every Mac
#elif defined(__linux__)
    return is_built(isa) && (getauxval(AT_HWCAP) >> 20 & 1u) != 0;  // HWCAP_ASIMDDP
#else
    return false;
#endif
  }
#endif
  return isa == Isa::portable;
}

/// The fastest supported one.
[[nodiscard]] inline Isa best_isa() noexcept {
  for (const Isa isa : {Isa::neon, Isa::avx512, Isa::avx2}) {
    if (is_supported(isa)) return isa;
  }
  return Isa::portable;
}

}  // namespace turboquant
