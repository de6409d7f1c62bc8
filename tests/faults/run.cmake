# Deliberate faults: each patch in this folder breaks the library in one place, and the test that its second line names
# must fail with it.
#
#   cmake -D ROOT=<repository> -P run.cmake                         every patch still applies
#   cmake -D ROOT=... -D BUILD=<folder> [-D CXX=...] [-D ONLY=<regular expression>] -P run.cmake
#                                                                   ... compiles, and is caught
#
# The second way copies the tree to BUILD and builds there what the patches name, once without a fault, where all tests
# must pass, then with one fault after the other. It needs a CPU with AVX2.
cmake_minimum_required(VERSION 3.25)
cmake_path(ABSOLUTE_PATH ROOT)
find_package(Git QUIET)
if(NOT Git_FOUND)
  message(FATAL_ERROR "faults: git, which applies the patches, was not found")
endif()

file(GLOB patches ${CMAKE_CURRENT_LIST_DIR}/*.patch)
if(NOT patches)
  message(FATAL_ERROR "faults: no patches in ${CMAKE_CURRENT_LIST_DIR}")
endif()

# Applies a patch to a tree, or says why not. In a repository git leaves out, without a word, what lies outside of the
# folder it runs in: so there is none.
function(apply tree patch result)
  set(ENV{GIT_DIR} ${tree}/no-repository)
  execute_process(COMMAND ${GIT_EXECUTABLE} apply ${ARGN} ${patch} WORKING_DIRECTORY ${tree}
                  RESULT_VARIABLE status ERROR_VARIABLE error)
  if(status EQUAL 0)
    set(error "")
  elseif(error STREQUAL "")
    set(error "git apply: ${status}")
  endif()
  set(${result} "${error}" PARENT_SCOPE)
endfunction()

# The program and the filter in "Caught by: program --gtest_filter=...".
function(read_patch patch program filter)
  file(STRINGS ${patch} lines LIMIT_COUNT 2)
  if(NOT lines MATCHES ";Caught by: ([a-z0-9_]+) (--gtest_filter=[^;]+)$")
    message(FATAL_ERROR "faults: the second line of ${patch} does not name the test")
  endif()
  set(${program} ${CMAKE_MATCH_1} PARENT_SCOPE)
  set(${filter} ${CMAKE_MATCH_2} PARENT_SCOPE)
endfunction()

set(wrong "")
if(NOT BUILD)
  foreach(patch IN LISTS patches)
    read_patch(${patch} program filter)
    apply(${ROOT} ${patch} error --check)
    if(error)
      list(APPEND wrong "${patch}: ${error}")
    endif()
  endforeach()
  if(wrong)
    list(JOIN wrong "\n  " wrong)
    message(FATAL_ERROR "Faults that no longer apply:\n  ${wrong}")
  endif()
  return()
endif()

if(ONLY)
  list(FILTER patches INCLUDE REGEX "${ONLY}")
endif()
cmake_path(ABSOLUTE_PATH BUILD)
set(tree ${BUILD}/tree)
set(options "")
file(REMOVE_RECURSE ${tree}/include)
file(COPY ${ROOT}/include ${ROOT}/cmake ${ROOT}/docs ${ROOT}/tests ${ROOT}/CMakeLists.txt DESTINATION ${tree})
# What a run before this one built last has a fault, and is younger than the headers.
file(GLOB_RECURSE headers ${tree}/include/*.hpp)
file(TOUCH ${headers})

if(CXX)
  list(APPEND options -D CMAKE_CXX_COMPILER=${CXX})
endif()
# Few formats and one set of kernels beside the portable ones, at -O1: kernels are compiled anew for half of the faults.
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${tree} -B ${BUILD}/build -G Ninja -D CMAKE_BUILD_TYPE=Release
          -D CMAKE_CXX_FLAGS_RELEASE=-O1 "-DCMAKE_CXX_FLAGS=-DTURBOQUANT_TEST_FEW_FORMATS -DTURBOQUANT_ISA=avx2"
          -D TURBOQUANT_BUILD_BENCH=OFF -D TURBOQUANT_BUILD_EXAMPLES=OFF -D TURBOQUANT_INSTALL=OFF ${options}
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)

function(build program result)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${BUILD}/build --target ${program}
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    set(output "")
  endif()
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

# How the test ended: 0 if it passed. One that finds nothing to run has not caught anything.
unset(ENV{GTEST_REPEAT})
unset(ENV{GTEST_SHUFFLE})
unset(ENV{TURBOQUANT_TEST_ISA})
function(test program filter result)
  execute_process(COMMAND ${BUILD}/build/tests/${program} ${filter} --gtest_brief=1 TIMEOUT 300
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(output MATCHES "0 tests from 0 test|SKIPPED|not in tests/formats")
    message(FATAL_ERROR "faults: ${program} ${filter} tests nothing:\n${output}")
  endif()
  set(${result} "${status}" PARENT_SCOPE)
endfunction()

set(tested "")
foreach(patch IN LISTS patches)
  read_patch(${patch} program filter)
  if("${program} ${filter}" IN_LIST tested)
    continue()
  endif()
  list(APPEND tested "${program} ${filter}")
  build(${program} output)
  if(output)
    message(FATAL_ERROR "faults: ${program} does not compile without a fault:\n${output}")
  endif()
  test(${program} ${filter} status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "faults: ${program} ${filter} fails without a fault: ${status}")
  endif()
endforeach()

foreach(patch IN LISTS patches)
  cmake_path(GET patch STEM name)
  read_patch(${patch} program filter)
  apply(${tree} ${patch} output)
  if(output)
    list(APPEND wrong "${name} does not apply: ${output}")
    continue()
  endif()
  build(${program} output)
  if(output)
    list(APPEND wrong "${name} does not compile: ${output}")
  else()
    test(${program} ${filter} status)
    if(status EQUAL 0)
      list(APPEND wrong "${name} is not caught by ${program} ${filter}")
    else()
      message(STATUS "${name}: caught by ${program} ${filter} (${status})")
    endif()
  endif()
  apply(${tree} ${patch} output --reverse)
  if(output)
    message(FATAL_ERROR "faults: ${name} cannot be taken back: ${output}")
  endif()
endforeach()

list(LENGTH patches count)
if(wrong)
  list(JOIN wrong "\n  " wrong)
  message(FATAL_ERROR "Of ${count} faults:\n  ${wrong}")
endif()
message(STATUS "All ${count} faults were caught")
