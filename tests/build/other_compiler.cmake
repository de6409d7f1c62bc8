# cmake -D CXX=<compiler> -D ROOT=<repository> -D OUT=<file> -P other_compiler.cmake: the library compiles without warnings,
# from -O0 to -O3, and codes the bytes that every compiler does.
cmake_minimum_required(VERSION 3.25)
set(warnings -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Werror)
foreach(flags IN ITEMS "-std=c++20;-O0" "-std=c++2b;-O3")
  execute_process(COMMAND ${CXX} ${flags} ${warnings} -I ${ROOT}/include ${ROOT}/tests/build/same_bytes.cpp -o ${OUT}
                  COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${OUT} 8 COMMAND_ERROR_IS_FATAL ANY)
endforeach()
