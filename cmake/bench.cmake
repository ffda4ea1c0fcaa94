# Benchmarks: programs of their own, never part of the tests.
if(TIDELOCK_BENCH AND NOT TIDELOCK_FUZZ)
  add_executable(sandbox_bench ${CMAKE_SOURCE_DIR}/bench/sandbox_bench.cpp)
  target_link_libraries(sandbox_bench PRIVATE sandbox)
endif()
