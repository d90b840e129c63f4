#include "common/base/check.h"

#include <cstdio>

namespace kvferry::detail {

void check_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "kvferry: invariant broken: %s at %s:%d\n", expression, file, line);
  std::abort();
}

}  // namespace kvferry::detail
