#include "common/engine/server_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry {

namespace {

// The most that the kernel passes in one message, so that a truncated control message can only mean that this
// process ran out of descriptors.
constexpr std::size_t kScmFdsMax = 253;
constexpr int kBacklog = 64;
constexpr int kStartLockTries = 200;
constexpr int kStartLockWaitMs = 10;

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path) || path.find('\0') != std::string::npos) {
    return fail(Code::kInvalid,
                "engine socket path \"{}\" has {} bytes, legal are 1 to {}: use a shorter path", path,
                path.size(), sizeof(address.sun_path) - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Two daemons that start at once could each take the other's new socket for the stale one. The folder is the
// lock, because a lock file would stay behind.
Result<UniqueFd> lock_folder(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) {
    return fail(errno_error(fmt::format("open the engine socket's folder {}", folder), errno));
  }
  for (int i = 0; i < kStartLockTries; ++i) {
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) {
      return fd;
    }
    ::poll(nullptr, 0, kStartLockWaitMs);
  }
  return fail(Code::kUnavailable, "another process holds a lock on {}: is a second daemon starting there?",
              folder);
}

Result<void> remove_stale(const std::string& path, const sockaddr_un& address) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) {
      return {};
    }
    return fail(errno_error(fmt::format("stat {}", path), errno));
  }
  if (!S_ISSOCK(status.st_mode)) {
    return fail(Code::kConflict,
                "{} exists and is not a socket: remove it or choose another engine socket path", path);
  }
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe) {
    return fail(errno_error("socket", errno));
  }
  const int rc = ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  // Only a refusal proves that nobody listens; a full backlog or missing permission is somebody alive.
  if (rc == 0 || (errno != ECONNREFUSED && errno != ENOENT)) {
    return fail(Code::kConflict,
                "another process listens on {}: stop it, or give this daemon another engine socket path",
                path);
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return fail(errno_error(fmt::format("remove the stale socket {}", path), errno));
  }
  return {};
}

}  // namespace

SocketFile::SocketFile(SocketFile&& other) noexcept
    : fd_(std::move(other.fd_)),
      path_(std::exchange(other.path_, {})),
      device_(other.device_),
      inode_(other.inode_) {}

Result<SocketFile> SocketFile::listen(const std::string& path, std::uint32_t mode) {
  KVF_TRY(const sockaddr_un address, address_of(path));
  KVF_TRY(const UniqueFd lock, lock_folder(path));
  KVF_TRY_VOID(remove_stale(path, address));
  SocketFile file;
  file.fd_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!file.fd_) {
    return fail(errno_error("socket", errno));
  }
  // Before bind, so that the file is never open to more than `mode`; after it, to undo the umask.
  if (::fchmod(file.fd_.get(), mode) != 0) {
    return fail(errno_error(fmt::format("set mode {:o} of {}", mode, path), errno));
  }
  if (::bind(file.fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return fail(errno_error(fmt::format("bind {}", path), errno));
  }
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    return fail(errno_error(fmt::format("stat {}", path), errno));
  }
  file.path_ = path;
  file.device_ = status.st_dev;
  file.inode_ = status.st_ino;
  if (::chmod(path.c_str(), mode) != 0) {
    return fail(errno_error(fmt::format("set mode {:o} of {}", mode, path), errno));
  }
  if (::listen(file.fd_.get(), kBacklog) != 0) {
    return fail(errno_error(fmt::format("listen on {}", path), errno));
  }
  return file;
}

void SocketFile::remove() {
  struct stat status {};
  if (!path_.empty() && ::lstat(path_.c_str(), &status) == 0 && status.st_dev == device_ &&
      status.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
  path_.clear();
}

Result<PeerCredentials> peer_credentials(int fd) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return fail(errno_error("read the credentials of an engine", errno));
  }
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

Result<ReadOutcome> read_with_fds(int socket, std::span<std::byte> buffer, std::vector<UniqueFd>& fds,
                                  std::size_t fds_max) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kScmFdsMax * sizeof(int))> control{};
  iovec part{buffer.data(), buffer.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t bytes = -1;
  do {
    bytes = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return ReadOutcome{ReadState::kNothing, 0};
    }
    if (errno == ECONNRESET) {
      return ReadOutcome{ReadState::kEnd, 0};
    }
    return fail(errno_error("read from an engine", errno));
  }
  std::vector<UniqueFd> received;
  for (cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr; item = CMSG_NXTHDR(&message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const std::size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      received.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return fail(Code::kProtocol,
                "descriptors were lost on their way, {} arrived: raise the daemon's limit of open files "
                "(LimitNOFILE)",
                received.size());
  }
  if (fds.size() + received.size() > fds_max) {
    return fail(Code::kProtocol,
                "{} descriptors wait for their frame, at most {} are legal: put several buffers "
                "into one memfd",
                fds.size() + received.size(), fds_max);
  }
  for (UniqueFd& fd : received) {
    fds.push_back(std::move(fd));
  }
  return ReadOutcome{bytes == 0 ? ReadState::kEnd : ReadState::kBytes, static_cast<std::size_t>(bytes)};
}

}  // namespace kvferry
