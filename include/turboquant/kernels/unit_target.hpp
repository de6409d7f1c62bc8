// What the compiler may use in a translation unit. The kernels are templates of it, so that units compiled with
// different flags share no symbol: a linker that kept one of two would give a CPU instructions that it does not have.
#pragma once

// Compilers that can be asked for instructions beyond the flags of the unit. Not g++ for Windows, which does not align
// the vectors that it spills (GCC bug 54412).
#if defined(__x86_64__) && defined(__GNUC__) && (defined(__clang__) || !defined(_WIN32))
#define TURBOQUANT_MAKES_X86_KERNELS
#endif

namespace turboquant::kernels {

/// One type per set of flags; never defined.
template <unsigned flags>
struct Target;

/// The set of this unit.
using UnitTarget = Target<0u
#if defined(__SSE3__)
                          | 1u << 0
#endif
#if defined(__SSSE3__)
                          | 1u << 1
#endif
#if defined(__SSE4_1__)
                          | 1u << 2
#endif
#if defined(__AVX__)
                          | 1u << 3
#endif
#if defined(__AVX2__)
                          | 1u << 4
#endif
#if defined(__FMA__)
                          | 1u << 5
#endif
#if defined(__AVX512F__)
                          | 1u << 6
#endif
#if defined(__AVX512VBMI__)
                          | 1u << 7
#endif
#if defined(__AVX512VNNI__)
                          | 1u << 8
#endif
#if defined(__AVX512FP16__)
                          | 1u << 9
#endif
#if defined(__AVX10_1__)
                          | 1u << 10
#endif
#if defined(__ARM_FEATURE_DOTPROD)
                          | 1u << 16
#endif
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
                          | 1u << 17
#endif
#if defined(__ARM_FEATURE_SVE)
                          | 1u << 18
#endif
#if defined(__riscv_vector)
                          | 1u << 19
#endif
#if defined(__FAST_MATH__)
                          | 1u << 24
#endif
                          >;

}  // namespace turboquant::kernels
