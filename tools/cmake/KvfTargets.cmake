# Warnings are errors in our code; third-party headers come in as SYSTEM through their imported targets.
add_library(kvf_options INTERFACE)
target_compile_options(kvf_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor -Wimplicit-fallthrough -Werror>
  # GCC 12 invents overlapping copies in std::string (its bug 105651).
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>
  $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Werror>)
target_include_directories(kvf_options INTERFACE ${CMAKE_SOURCE_DIR})
target_link_libraries(kvf_options INTERFACE Threads::Threads)
target_compile_definitions(kvf_options INTERFACE KVF_VERSION="${PROJECT_VERSION}")
if(KVF_FUZZ)
  target_compile_options(kvf_options INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(KVF_SANITIZE)
  target_compile_options(kvf_options INTERFACE -fsanitize=${KVF_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvf_options INTERFACE -fsanitize=${KVF_SANITIZE})
  target_compile_definitions(kvf_options INTERFACE KVF_SANITIZED=1)
  if(KVF_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # Asio's fences are not understood by GCC's thread sanitizer; nothing of ours depends on a bare fence.
    target_compile_options(kvf_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan>)
  endif()
  # GCC's uninitialised-value analysis misfires on instrumented standard headers.
  target_compile_options(kvf_options INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-error=maybe-uninitialized>)
endif()

# kvf_library(NAME DIR dir... LINK lib...): one static library of all .cc files of the named folders.
function(kvf_library name)
  cmake_parse_arguments(ARG "" "" "DIR;LINK" ${ARGN})
  set(sources)
  foreach(dir ${ARG_DIR})
    file(GLOB found CONFIGURE_DEPENDS ${dir}/*.cc)
    list(APPEND sources ${found})
  endforeach()
  if(NOT sources)
    add_library(${name} INTERFACE)
    return()
  endif()
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC kvf_options ${ARG_LINK})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

# kvf_daemon(SIDE): the pure room machine as a library of its own, so that tests and simulations link it without
# sockets; the rest of the daemon; and the executable kvferry-SIDE.
function(kvf_daemon side)
  file(GLOB sources CONFIGURE_DEPENDS *.cc)
  set(machine ${sources})
  list(FILTER machine INCLUDE REGEX "/rooms[a-z_]*\\.cc$")
  list(REMOVE_ITEM sources ${machine} ${CMAKE_CURRENT_SOURCE_DIR}/main.cc)
  add_library(kvf_${side}_rooms STATIC ${machine})
  target_link_libraries(kvf_${side}_rooms PUBLIC kvf_options kvf_fabric kvf_pool kvf_http)
  add_library(kvf_${side}_daemon STATIC ${sources})
  target_link_libraries(kvf_${side}_daemon PUBLIC kvf_${side}_rooms kvf_daemon)
  if(TARGET kvf_ucx)
    target_link_libraries(kvf_${side}_daemon PUBLIC kvf_ucx)
  endif()
  add_executable(kvferry-${side} main.cc)
  target_link_libraries(kvferry-${side} PRIVATE kvf_${side}_daemon)
  set_target_properties(kvf_${side}_rooms kvf_${side}_daemon kvferry-${side} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()
