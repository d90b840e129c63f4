#pragma once
// Whether somebody may still write shared memory after the daemon that should know has died. A process that
// writes another's pool (the prefill daemon over shm) holds a lock on its descriptors for as long as they are
// mapped; the kernel lets go of it when the process ends, however it ends. The pool's owner asks.

#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"

namespace kvferry {

class WriterLock {
 public:
  /// On descriptions of its own (a passed descriptor shares its owner's). kIo with the descriptor's number.
  static Result<WriterLock> take(std::span<const UniqueFd> fds);

 private:
  std::vector<UniqueFd> held_;
};

/// True when some process holds a WriterLock on this memory. kIo when it cannot be asked.
Result<bool> has_writers(int fd);

}  // namespace kvferry
