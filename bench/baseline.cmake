# The loops over plain keys and values that benchmarks and the example engine measure against.
include_guard(GLOBAL)

add_library(turboquant_baseline STATIC ${CMAKE_CURRENT_LIST_DIR}/baseline.cpp)
target_include_directories(turboquant_baseline PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_compile_features(turboquant_baseline PUBLIC cxx_std_20)
target_link_libraries(turboquant_baseline PRIVATE turboquant_warnings)
