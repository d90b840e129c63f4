#include "common/pool/writer_lock.h"

#include <fcntl.h>

#include <cerrno>

namespace kvferry {
namespace {

struct flock whole(short type) {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  return range;
}

/// A file description of our own: locks belong to descriptions.
Result<UniqueFd> reopen(int fd) {
  const std::string path = fmt::format("/proc/self/fd/{}", fd);
  UniqueFd own(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!own) {
    return fail(errno_error("opening " + path + " for its lock", errno));
  }
  return own;
}

}  // namespace

Result<WriterLock> WriterLock::take(std::span<const UniqueFd> fds) {
  WriterLock out;
  for (const UniqueFd& fd : fds) {
    KVF_TRY(UniqueFd own, reopen(fd.get()));
    struct flock range = whole(F_RDLCK);  // shared: there may be several writers
    if (::fcntl(own.get(), F_OFD_SETLK, &range) != 0) {
      return fail(errno_error(fmt::format("locking pool descriptor {}", fd.get()), errno));
    }
    out.held_.push_back(std::move(own));
  }
  return out;
}

Result<bool> has_writers(int fd) {
  KVF_TRY(const UniqueFd own, reopen(fd));
  struct flock range = whole(F_WRLCK);
  if (::fcntl(own.get(), F_OFD_GETLK, &range) != 0) {
    return fail(errno_error("asking for the writers of a pool", errno));
  }
  return range.l_type != F_UNLCK;
}

}  // namespace kvferry
