# cmake -D CXX=<compiler> -D INCLUDES=<folders> -D SOURCE=<program> -D OUT=<file> -P plain.cmake: the compiler alone makes a
# program of it, from include directories and the language standard, and it runs (P02).
cmake_minimum_required(VERSION 3.25)
list(TRANSFORM INCLUDES PREPEND -I)
execute_process(COMMAND ${CXX} -std=c++20 ${INCLUDES} ${SOURCE} -o ${OUT} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${OUT} COMMAND_ERROR_IS_FATAL ANY)
