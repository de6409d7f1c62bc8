// A program without exceptions and run-time types that defined macros such as windows.h, complex.h and termios.h do
// before it included the library (B07, B08).

// Other people's headers come first: what they do about such macros is their affair.
#if __has_include(<bits/stdc++.h>)
#include <bits/stdc++.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define small char
#define near
#define far
#define I (1i)
#define B0 0
#define _C 0x02

#include "two_units.hpp"

int main() { return use_everything() == -1 ? 1 : 0; }
