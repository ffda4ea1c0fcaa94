# The guest agent: a static program without exceptions that becomes bytes of the sandbox library. It runs in another
# machine, so the host's sanitizers and warnings about its own style of build do not apply to it.
file(GLOB agent_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/sandbox/agent/*.cpp)
file(GLOB agent_headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/sandbox/agent/*.hpp)
set(agent_file ${CMAKE_BINARY_DIR}/tidelock_agent)
add_custom_command(
  OUTPUT ${agent_file}
  COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 -O2 -Wall -Wextra -Wpedantic -Wshadow -Werror -fno-exceptions -fno-rtti
          -ffunction-sections -fdata-sections -static -s -Wl,--gc-sections -I${CMAKE_SOURCE_DIR}/src ${agent_sources}
          -o ${agent_file}
  DEPENDS ${agent_sources} ${agent_headers} ${CMAKE_SOURCE_DIR}/src/sandbox/vm/frame.hpp
  COMMENT "guest agent")
set(agent_image ${CMAKE_SOURCE_DIR}/src/sandbox/vm/agent_image.S)
set_source_files_properties(${agent_image} PROPERTIES OBJECT_DEPENDS ${agent_file}
                            COMPILE_OPTIONS "-DTIDELOCK_AGENT_FILE=\"${agent_file}\"")
target_sources(sandbox PRIVATE ${agent_image})
