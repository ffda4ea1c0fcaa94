# Fuzz targets: fuzz_<name> from tests/fuzz/<name>_fuzz.cpp. Configure with
#   cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DTIDELOCK_FUZZ=ON
# and run, for instance
#   build/fuzz/fuzz_chat -max_total_time=60 build/fuzz/found tests/fuzz/corpus/chat
# which leaves new inputs in the first folder and the seeds of the tree as they are.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "TIDELOCK_FUZZ needs clang: configure with -DCMAKE_CXX_COMPILER=clang++")
endif()

set(fuzz_flags -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all)
foreach(room base numerics model state sandbox)
  target_compile_options(${room} PRIVATE ${fuzz_flags} -fsanitize=fuzzer-no-link)
endforeach()

file(GLOB fuzz_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp)
foreach(source ${fuzz_sources})
  get_filename_component(name ${source} NAME_WE)
  string(REPLACE "_fuzz" "" name ${name})
  add_executable(fuzz_${name} ${source})
  target_compile_options(fuzz_${name} PRIVATE ${fuzz_flags} -fsanitize=fuzzer)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer,address,undefined)
  target_compile_definitions(fuzz_${name} PRIVATE TIDELOCK_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  target_link_libraries(fuzz_${name} PRIVATE state sandbox)
endforeach()
