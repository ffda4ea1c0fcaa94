# One translation unit per instruction set; each is compiled for it and called only after the CPU was asked.
set(numerics_dir ${CMAKE_SOURCE_DIR}/src/numerics)
set(avx2_flags -mavx2 -mfma -mf16c)
set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
file(GLOB avx2_sources CONFIGURE_DEPENDS ${numerics_dir}/*_avx2.cpp)
file(GLOB avx512_sources CONFIGURE_DEPENDS ${numerics_dir}/*_avx512.cpp)
file(GLOB avx512bf16_sources CONFIGURE_DEPENDS ${numerics_dir}/*_avx512bf16.cpp)
set_source_files_properties(${avx2_sources} PROPERTIES COMPILE_OPTIONS "${avx2_flags}")
set_source_files_properties(${avx512_sources} PROPERTIES COMPILE_OPTIONS "${avx512_flags}")
set_source_files_properties(${avx512bf16_sources} PROPERTIES COMPILE_OPTIONS "${avx512_flags};-mavx512bf16;-mavx512vnni")
# The undefined-behaviour sanitizer makes the fully inlined kernels four times slower to compile; their memory accesses stay checked.
if(TIDELOCK_SANITIZE)
  file(GLOB kernel_sources CONFIGURE_DEPENDS ${numerics_dir}/*_scalar.cpp ${numerics_dir}/*_avx2.cpp ${numerics_dir}/*_avx512.cpp
       ${numerics_dir}/*_avx512bf16.cpp)
  set_property(SOURCE ${kernel_sources} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=undefined)
  # Lane by lane and without optimisation the scalar kernels would take minutes over the tests' cases; with -O3, minutes to compile.
  file(GLOB scalar_sources CONFIGURE_DEPENDS ${numerics_dir}/*_scalar.cpp)
  set_property(SOURCE ${scalar_sources} APPEND PROPERTY COMPILE_OPTIONS -O2)
endif()
