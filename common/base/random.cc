#include "common/base/random.h"

#include <sys/random.h>

#include <cerrno>

#include "common/base/check.h"

namespace kvferry {

void fill_random(std::span<std::byte> out) {
  while (!out.empty()) {
    // Up to 256 bytes come whole once the source is initialised; more may be cut short by a signal.
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0) {
      KVF_CHECK(errno == EINTR);
      continue;
    }
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

std::uint64_t random_u64() {
  std::uint64_t value = 0;
  fill_random(std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

}  // namespace kvferry
