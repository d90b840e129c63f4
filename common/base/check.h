#pragma once
// KVF_CHECK: an invariant of our own code, always compiled in. A failed check prints what was expected and
// aborts, because continuing could corrupt somebody's tokens. Never use it on anything a peer, an engine, a
// file or the machine controls: those get a Result.

#include <cstdlib>

namespace kvferry::detail {
[[noreturn]] void check_failed(const char* expression, const char* file, int line);
}  // namespace kvferry::detail

#define KVF_CHECK(expression)                                           \
  do {                                                                  \
    if (!(expression)) [[unlikely]] {                                   \
      ::kvferry::detail::check_failed(#expression, __FILE__, __LINE__); \
    }                                                                   \
  } while (false)
