#pragma once
// A listening Unix socket and the file it is reached by. The file goes with the object, unless another daemon
// has put its own in that place meanwhile.

#include <sys/types.h>

#include <string>
#include <utility>

#include "common/base/result.h"
#include "common/base/unique_fd.h"

namespace kvferry::shm {

class ListenSocket {
 public:
  ListenSocket() = default;
  ~ListenSocket();
  ListenSocket(ListenSocket&& other) noexcept;
  ListenSocket& operator=(ListenSocket&& other) noexcept;

  /// kInvalid for a path that is not absolute or longer than a socket address holds; kConflict when a live
  /// process listens there or the file is no socket.
  static Result<ListenSocket> open(const std::string& path, mode_t mode);
  int fd() const { return socket_.get(); }

 private:
  void remove_file();

  UniqueFd socket_;
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

/// A non-blocking connection to a listening Unix socket.
Result<UniqueFd> connect_unix(const std::string& path);

}  // namespace kvferry::shm
