# Warnings are errors in our code; third-party headers come in as SYSTEM through their imported targets.
add_library(kvf_options INTERFACE)
target_compile_options(kvf_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor -Wimplicit-fallthrough -Werror>
  $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Werror>)
target_include_directories(kvf_options INTERFACE ${CMAKE_SOURCE_DIR})
target_link_libraries(kvf_options INTERFACE Threads::Threads)
target_compile_definitions(kvf_options INTERFACE KVF_VERSION="${PROJECT_VERSION}")
if(KVF_SANITIZE)
  target_compile_options(kvf_options INTERFACE -fsanitize=${KVF_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvf_options INTERFACE -fsanitize=${KVF_SANITIZE})
  target_compile_definitions(kvf_options INTERFACE KVF_SANITIZED=1)
  # GCC's uninitialised-value analysis misfires on instrumented standard headers.
  target_compile_options(kvf_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=maybe-uninitialized>)
endif()

# kvf_library(NAME DIR dir... LINK lib...): one static library of all .cc files of the named folders.
function(kvf_library name)
  cmake_parse_arguments(ARG "" "" "DIR;LINK" ${ARGN})
  set(sources)
  foreach(dir ${ARG_DIR})
    file(GLOB found CONFIGURE_DEPENDS ${dir}/*.cc)
    list(APPEND sources ${found})
  endforeach()
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC kvf_options ${ARG_LINK})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()
