# Fails unless the kernels of AVX2 and AVX-512 fetch the next page while they read one: five times or more for each of the 8
# key and 12 value codecs. g++ can drop such instructions without a word; of those of AVX2 it left 34, of 188.
#   cmake -D OBJDUMP=... "-DOBJECTS=a.o;b.o" -P fetches.cmake    OBJECTS: those of tests/formats
cmake_minimum_required(VERSION 3.25)
foreach(isa IN ITEMS avx2 avx512)
  set(object "${OBJECTS}")
  list(FILTER object INCLUDE REGEX "/${isa}\\.cpp\\.o$")
  execute_process(COMMAND ${OBJDUMP} -d --no-show-raw-insn ${object} OUTPUT_VARIABLE code COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "prefetcht0" fetches "${code}")
  list(LENGTH fetches count)
  message(STATUS "${isa}: ${count} instructions that fetch")
  if(count LESS 100)
    message(FATAL_ERROR "${object} fetches ${count} times")
  endif()
endforeach()
