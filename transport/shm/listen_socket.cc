#include "transport/shm/listen_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

namespace kvferry::shm {
namespace {

constexpr int kBacklog = 128;

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.front() != '/' || path.find('\0') != std::string::npos) {
    return fail(Code::kInvalid, "shm socket path '{}' is not absolute; the other daemon must find it too",
                path);
  }
  if (path.size() >= sizeof address.sun_path) {
    return fail(Code::kInvalid, "shm socket path '{}' has {} bytes, limit {}; use a shorter folder", path,
                path.size(), sizeof address.sun_path - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Result<UniqueFd> unix_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    return fail(errno_error("socket for the shm fabric", errno));
  }
  return socket;
}

int bind_to(int socket, const sockaddr_un& address) {
  return ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address);
}

// Removes a file that a dead daemon has left behind, and nothing else.
Result<void> remove_stale(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISSOCK(status.st_mode)) {
    return fail(Code::kConflict, "shm socket path '{}' is taken by a file that is no socket", path);
  }
  if (auto probe = connect_unix(path); probe || probe.error().code != Code::kPeerLost) {
    return fail(Code::kConflict,
                "another process listens on the shm socket '{}'; give each daemon its own path", path);
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return fail(errno_error("remove the stale shm socket " + path, errno));
  }
  return {};
}

}  // namespace

Result<UniqueFd> connect_unix(const std::string& path) {
  KVF_TRY(const sockaddr_un address, address_of(path));
  KVF_TRY(UniqueFd socket, unix_socket());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    return socket;
  }
  Error error = errno_error("connect to the shm socket " + path, errno);
  error.code = errno == ECONNREFUSED ? Code::kPeerLost : Code::kUnavailable;
  return fail(std::move(error));
}

Result<ListenSocket> ListenSocket::open(const std::string& path, mode_t mode) {
  KVF_TRY(const sockaddr_un address, address_of(path));
  ListenSocket made;
  KVF_TRY(made.socket_, unix_socket());
  // The file inherits the socket's mode, so there is no moment at which others could connect.
  if (::fchmod(made.socket_.get(), mode) != 0) {
    return fail(errno_error("mode of the shm socket", errno));
  }
  if (bind_to(made.socket_.get(), address) != 0) {
    if (errno != EADDRINUSE) {
      return fail(errno_error("bind the shm socket to " + path, errno));
    }
    KVF_TRY_VOID(remove_stale(path));
    if (bind_to(made.socket_.get(), address) != 0) {
      return fail(errno_error("bind the shm socket to " + path, errno));
    }
  }
  made.path_ = path;
  struct stat status {};
  // The umask may have taken bits away that a wider mode asks for.
  if (::chmod(path.c_str(), mode) != 0 || ::lstat(path.c_str(), &status) != 0 ||
      ::listen(made.socket_.get(), kBacklog) != 0) {
    return fail(errno_error("listen on the shm socket " + path, errno));
  }
  made.device_ = status.st_dev;
  made.inode_ = status.st_ino;
  return made;
}

ListenSocket::ListenSocket(ListenSocket&& other) noexcept {
  *this = std::move(other);
}

ListenSocket& ListenSocket::operator=(ListenSocket&& other) noexcept {
  if (this != &other) {
    remove_file();
    socket_ = std::move(other.socket_);
    path_ = std::exchange(other.path_, {});
    device_ = other.device_;
    inode_ = other.inode_;
  }
  return *this;
}

ListenSocket::~ListenSocket() {
  remove_file();
}

void ListenSocket::remove_file() {
  struct stat status {};
  if (!path_.empty() && ::lstat(path_.c_str(), &status) == 0 && status.st_dev == device_ &&
      status.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
}

}  // namespace kvferry::shm
