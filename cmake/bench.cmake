# Benchmarks. Each is a program of its own in the build root, so that `tidelock` never links a peer.
if(NOT TIDELOCK_BENCH OR TIDELOCK_FUZZ)
  return()
endif()

# sandbox_bench: containers against plain spawn.
add_executable(sandbox_bench ${CMAKE_SOURCE_DIR}/bench/sandbox_bench.cpp)
target_link_libraries(sandbox_bench PRIVATE sandbox)

# microvm_bench: virtual machines against QEMU's own savevm and loadvm.
add_executable(microvm_bench ${CMAKE_SOURCE_DIR}/bench/microvm_bench.cpp)
target_link_libraries(microvm_bench PRIVATE sandbox)

# train_step: one training step, compared with PyTorch by bench/compare_train_step.py.
add_executable(train_step ${CMAKE_SOURCE_DIR}/bench/train_step.cpp)
target_link_libraries(train_step PRIVATE train)

# state_disk: states on disk against the disk itself.
add_executable(state_disk ${CMAKE_SOURCE_DIR}/bench/state_disk.cpp)
target_link_libraries(state_disk PRIVATE state)

# trace_replay: public traces of requests against the cache of kept states.
add_executable(trace_replay ${CMAKE_SOURCE_DIR}/bench/trace_replay.cpp)
target_link_libraries(trace_replay PRIVATE engine)

# admission: sequences that grow, against every fixed number of them at once.
add_executable(admission ${CMAKE_SOURCE_DIR}/bench/admission.cpp)
target_link_libraries(admission PRIVATE engine)

# bench_kernels: every bench/bench_*.cpp that registers itself (bench/bench_registry.hpp), with oneDNN as the peer.
find_library(DNNL_LIBRARY dnnl)
find_package(OpenMP)
if(DNNL_LIBRARY AND OpenMP_CXX_FOUND)
  file(GLOB bench_kernel_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/bench/bench_*.cpp
       ${CMAKE_SOURCE_DIR}/bench/peak_*.cpp ${CMAKE_SOURCE_DIR}/bench/onednn.cpp)
  file(GLOB bench_avx2_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/bench/*_avx2.cpp)
  file(GLOB bench_avx512_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/bench/*_avx512.cpp)
  file(GLOB bench_avx512bf16_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/bench/*_avx512bf16.cpp)
  set_source_files_properties(${bench_avx2_sources} PROPERTIES COMPILE_OPTIONS "${avx2_flags}")
  set_source_files_properties(${bench_avx512_sources} PROPERTIES COMPILE_OPTIONS "${avx512_flags}")
  set_source_files_properties(${bench_avx512bf16_sources} PROPERTIES COMPILE_OPTIONS "${avx512_flags};-mavx512bf16")
  add_executable(bench_kernels ${bench_kernel_sources})
  target_include_directories(bench_kernels PRIVATE ${CMAKE_SOURCE_DIR}/bench)
  target_link_libraries(bench_kernels PRIVATE numerics ${DNNL_LIBRARY} OpenMP::OpenMP_CXX nlohmann_json::nlohmann_json)
  set_target_properties(bench_kernels PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
else()
  message(STATUS "bench_kernels is not built: it needs oneDNN (libdnnl-dev) and OpenMP")
endif()
