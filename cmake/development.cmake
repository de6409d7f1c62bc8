# What our own programs share: warnings, ccache, an optimised build by default. Nothing here reaches a consumer.
set(CMAKE_CXX_EXTENSIONS OFF)

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo, MinSizeRel or Debug" FORCE)
endif()

set(is_sanitized FALSE)
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  set(is_sanitized TRUE)
endif()

# The best kernels that this machine can run, as a name of Isa; empty where that is not known.
set(host_isa "")
if(NOT CMAKE_CROSSCOMPILING AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" AND EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo cpu REGEX "^flags" LIMIT_COUNT 1)
  if(cpu MATCHES "avx512_?vnni" AND cpu MATCHES "avx512_?vbmi ")
    set(host_isa avx512)
  elseif(cpu MATCHES "avx2 ")
    set(host_isa avx2)
  endif()
endif()

find_program(TURBOQUANT_CCACHE ccache)
mark_as_advanced(TURBOQUANT_CCACHE)
if(TURBOQUANT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # The sloppiness is what ccache needs to work with precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
                                  ${TURBOQUANT_CCACHE})
endif()

add_library(turboquant_warnings INTERFACE)
if(MSVC)
  target_compile_options(turboquant_warnings INTERFACE /W4 $<$<BOOL:${TURBOQUANT_WERROR}>:/WX>)
else()
  target_compile_options(turboquant_warnings INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow
                                                       $<$<BOOL:${TURBOQUANT_WERROR}>:-Werror>)
  # What g++ 12 guesses about the flow of data through the standard library (std::regex, std::string) at high optimisation
  # is often wrong: it stays a warning.
  foreach(guess IN ITEMS maybe-uninitialized restrict stringop-overflow stringop-overread array-bounds)
    target_compile_options(turboquant_warnings INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-error=${guess}>)
  endforeach()
endif()
