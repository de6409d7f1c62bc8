// The library on a processor and compiler that it knows nothing of, as far as one that it knows can pretend (T03): no
// macro tells the architecture, and those of Microsoft's compiler tell a wrong one, as on Arm in its emulation mode. It
// has the portable kernels then, says so, and writes the same bytes.

// The system's headers need the truth.
#if __has_include(<bits/stdc++.h>)
#include <bits/stdc++.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#undef __x86_64__
#undef __i386__
#undef __MMX__
#undef __SSE__
#undef __SSE2__
#undef __SSE3__
#undef __SSSE3__
#undef __SSE4_1__
#undef __SSE4_2__
#undef __AVX__
#undef __AVX2__
#undef __FMA__
#undef __aarch64__
#undef __ARM_NEON
#undef __ARM_ARCH
#undef __ARM_FEATURE_DOTPROD
#if defined(PRETEND_MICROSOFT)
#undef __GNUC__
#undef __clang__
#define _M_X64 100
#define _M_AMD64 100
#define _M_ARM64EC 1
#endif

#define EXPECTED_ISA "portable"
#include "same_bytes.cpp"
