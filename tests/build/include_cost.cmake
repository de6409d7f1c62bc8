# cmake -D CXX=<compiler> -D ROOT=<repository> -D OUT=<folder> -P include_cost.cmake: a unit with nothing
# but `#include <turboquant/turboquant.hpp>` takes at most LIMIT times the processor time of one with a few standard headers
# and the intrinsics, in the same run: seconds mean little from one machine to the next. And no header includes the heavy parts of
# the standard library.
cmake_minimum_required(VERSION 3.25)
set(LIMIT 3)

file(GLOB_RECURSE headers ${ROOT}/include/*.hpp)
list(REMOVE_ITEM headers ${ROOT}/include/turboquant/cache/stream.hpp)  # which is there for those who want them
foreach(header IN LISTS headers)
  file(STRINGS ${header} heavy REGEX
       "^#include <(iostream|istream|ostream|fstream|sstream|regex|functional|map|unordered_map|thread|future|random|chrono|format|ranges|memory|complex)>")
  if(heavy)
    message(SEND_ERROR "${header}: ${heavy}")
  endif()
endforeach()

file(WRITE ${OUT}/all.cpp "#include <turboquant/turboquant.hpp>\n")
file(WRITE ${OUT}/reference.cpp "#include <algorithm>\n#include <string>\n#include <vector>\n"
     "#if defined(__x86_64__)\n#include <immintrin.h>\n#elif defined(__aarch64__)\n#include <arm_neon.h>\n#endif\n")

# Milliseconds of processor time in user mode: what the shell says of its children.
function(measure unit result)
  execute_process(COMMAND sh -c "\"$@\" && times" sh ${CXX} -std=c++20 -O0 -fsyntax-only -I ${ROOT}/include ${unit}
                  OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
  if(NOT printed MATCHES "\n([0-9]+)m([0-9]+)[.,]([0-9][0-9])[0-9]*s ")
    message(FATAL_ERROR "No times in: ${printed}")
  endif()
  math(EXPR time "${CMAKE_MATCH_1} * 60000 + ${CMAKE_MATCH_2} * 1000 + 1${CMAKE_MATCH_3} * 10 - 1000")
  set(${result} ${time} PARENT_SCOPE)
endfunction()

# The least of several rounds, as other programs disturb; one is enough if it is within the limit.
set(all_least 1000000)
set(reference_least 1000000)
foreach(round RANGE 1 5)
  foreach(unit IN ITEMS all reference)
    measure(${OUT}/${unit}.cpp time)
    if(time LESS ${unit}_least)
      set(${unit}_least ${time})
    endif()
  endforeach()
  math(EXPR most "${LIMIT} * ${reference_least}")
  if(all_least LESS_EQUAL most)
    break()
  endif()
endforeach()
math(EXPR percent "100 * ${all_least} / (${reference_least} + 1)")
message(STATUS "include: ${all_least} ms, reference: ${reference_least} ms, ${percent} %")
if(all_least GREATER most)
  message(FATAL_ERROR "More than ${LIMIT} times the reference")
endif()
