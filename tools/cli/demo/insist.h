#pragma once
// Repeats a call of the C library that was refused for now.

#include <sched.h>

#include <chrono>

#include "tools/engine/role.h"

namespace kvferry {

/// The first answer of `call` that repeating cannot change, or its last one after 20 s. Yields between calls.
template <class Call>
int insist(const Call& call) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (;;) {
    const int code = call();
    if (code == 0 || !try_again_later(code) || std::chrono::steady_clock::now() > deadline) {
      return code;
    }
    ::sched_yield();
  }
}

}  // namespace kvferry
