# cmake -D CXX=<compiler> -D ROOT=<repository> -D OUT=<file> -P plain.cmake: the compiler alone makes the
# first program of the README, from include directories and the language standard, and it runs (P02).
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND ${CXX} -std=c++20 -I ${ROOT}/include ${ROOT}/examples/quickstart.cpp -o ${OUT}
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${OUT} COMMAND_ERROR_IS_FATAL ANY)
