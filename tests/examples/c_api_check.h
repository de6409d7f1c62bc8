/* What the programs in C share: checks that count, and rows that every element type holds exactly. */
#ifndef TESTS_C_API_CHECK_H
#define TESTS_C_API_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "c_api/turboquant_c.h"

/* Sanitizers end a program that asks for more memory than there can be (tests/CMakeLists.txt sets 0 then); so does the
   library without exceptions. */
#if defined(TURBOQUANT_C_NO_EXCEPTIONS)
#define HUGE_REQUESTS_FAIL 0
#elif !defined(HUGE_REQUESTS_FAIL)
#define HUGE_REQUESTS_FAIL 1
#endif

static int failures;
#define CHECK(condition) \
  ((condition) ? (void)0 : (void)(++failures, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition)))
#define CHECK_OK(call) CHECK((call).code == TQ_OK)

/* The code and the field of a refusal. */
#define CHECK_REFUSED(call, expected, name)                            \
  do {                                                                 \
    const tq_status refusal = (call);                                  \
    CHECK(refusal.code == (expected) && !strcmp(refusal.field, name)); \
  } while (0)

/* Multiples of 1/64 with at most 7 bits. */
static void fill(float* rows, size_t count, uint32_t seed) {
  uint64_t state = seed;
  for (size_t i = 0; i < count; ++i) {
    int sum = 0; /* of four uniform numbers: a bell */
    for (int n = 0; n < 4; ++n) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += (int)(state >> 58) - 32;
    }
    rows[i] = (float)sum / 64.0f;
  }
}

#endif
