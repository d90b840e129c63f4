#pragma once
// The system calls of the engine socket's daemon end: a listening Unix socket that replaces only a stale one,
// the peer's credentials, and reading bytes together with the descriptors that travel beside them.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"

namespace kvferry {

/// A bound, listening socket file. Removes the file in release() or on destruction, if it is still the one
/// that was made here.
class SocketFile {
 public:
  SocketFile() = default;
  SocketFile(SocketFile&& other) noexcept;
  SocketFile& operator=(SocketFile&&) = delete;
  ~SocketFile() { remove(); }

  /// kConflict when somebody listens on `path`, kInvalid when it cannot be a socket path, kIo otherwise.
  static Result<SocketFile> listen(const std::string& path, std::uint32_t mode);

  /// The listening descriptor, non-blocking; the caller closes it.
  UniqueFd take_fd() { return std::move(fd_); }
  void remove();

 private:
  UniqueFd fd_;
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

struct PeerCredentials {
  int pid = 0;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
};
Result<PeerCredentials> peer_credentials(int fd);

enum class ReadState { kBytes, kNothing, kEnd };
struct ReadOutcome {
  ReadState state = ReadState::kNothing;
  std::size_t bytes = 0;
};

/// One non-blocking read. Received descriptors (close-on-exec) are appended to `fds`; kProtocol when that
/// would make more than `fds_max`, or when the kernel had to drop some (all of this read are closed then).
Result<ReadOutcome> read_with_fds(int socket, std::span<std::byte> buffer, std::vector<UniqueFd>& fds,
                                  std::size_t fds_max);

}  // namespace kvferry
