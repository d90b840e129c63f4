#include "transport/shm/channel.h"

#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace kvferry::shm {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kReadBytes = 64 << 10;
constexpr int kReadsPerCall = 32;
// The kernel's SCM_MAX_FD.
constexpr std::size_t kDescriptorsPerCall = 253;

std::string length_prefix(std::size_t length) {
  std::string bytes(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    bytes[i] = static_cast<char>(static_cast<unsigned char>(length >> (8 * i)));
  }
  return bytes;
}

std::size_t read_length(const char* bytes) {
  std::size_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::size_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return length;
}

bool would_block(int error_number) {
  return error_number == EAGAIN || error_number == EWOULDBLOCK;
}

Error socket_error(std::string_view what, int error_number) {
  Error error = errno_error(what, error_number);
  error.code = Code::kPeerLost;
  return error;
}

}  // namespace

Result<void> Channel::send(std::string text, std::shared_ptr<const Pool> pool) {
  if (outgoing_.size() >= limits_.queued_frames_max) {
    return fail(Code::kExhausted, "shm peer does not read: {} frames wait, limit {}", outgoing_.size(),
                limits_.queued_frames_max);
  }
  outgoing_.push_back(Outgoing{length_prefix(text.size()) + text, 0, std::move(pool), 0});
  return {};
}

Result<void> Channel::flush() {
  while (!outgoing_.empty()) {
    KVF_TRY(const bool progress, write_some(outgoing_.front()));
    if (!progress) {
      return {};
    }
    const Outgoing& frame = outgoing_.front();
    if (frame.written == frame.bytes.size()) {
      outgoing_.pop_front();
    }
  }
  return {};
}

Result<bool> Channel::write_some(Outgoing& frame) {
  const std::size_t descriptors = frame.pool ? frame.pool->fds().size() : 0;
  const std::size_t left = descriptors - frame.descriptors_sent;
  const std::size_t now = std::min(left, kDescriptorsPerCall);
  // While more descriptors remain than one call carries, each call takes one byte of the frame along, so that
  // all of them have arrived when its last byte has. A pool frame has far more bytes than calls.
  iovec data{frame.bytes.data() + frame.written, left > now ? 1 : frame.bytes.size() - frame.written};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kDescriptorsPerCall)> control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (now > 0) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(sizeof(int) * now);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * now);
    for (std::size_t i = 0; i < now; ++i) {
      const int fd = frame.pool->fds()[frame.descriptors_sent + i].get();
      std::memcpy(CMSG_DATA(rights) + i * sizeof(int), &fd, sizeof(int));
    }
  }
  const ssize_t sent = ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno == EINTR) {
      return true;
    }
    if (would_block(errno)) {
      return false;
    }
    return fail(socket_error("send to the shm peer", errno));
  }
  frame.written += static_cast<std::size_t>(sent);
  frame.descriptors_sent += now;
  return true;
}

Result<bool> Channel::receive(std::vector<std::string>& frames) {
  std::array<char, kReadBytes> buffer;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kDescriptorsPerCall)> control;
  // Stops at the first whole frame, so that its descriptors are taken before those of the next arrive, and so
  // that one flooding peer cannot keep the thread from the others; epoll calls again.
  for (int reads = 0; reads < kReadsPerCall && frames.empty(); ++reads) {
    iovec data{buffer.data(), buffer.size()};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (would_block(errno)) {
        return true;
      }
      return fail(socket_error("receive from the shm peer", errno));
    }
    KVF_TRY_VOID(keep_descriptors(&header));
    if (got == 0) {
      return false;
    }
    incoming_.append(buffer.data(), static_cast<std::size_t>(got));
    KVF_TRY_VOID(cut_frames(frames));
  }
  return true;
}

bool Channel::discard() {
  std::array<char, kReadBytes> buffer;
  for (int reads = 0; reads < kReadsPerCall; ++reads) {
    // Without room for control data the kernel closes any descriptors that come along.
    const ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EINTR && !would_block(errno))) {
      return false;
    }
    if (got < 0 && would_block(errno)) {
      return true;
    }
  }
  return true;
}

Result<void> Channel::keep_descriptors(void* header_pointer) {
  auto* header = static_cast<msghdr*>(header_pointer);
  for (cmsghdr* part = CMSG_FIRSTHDR(header); part != nullptr; part = CMSG_NXTHDR(header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors_.emplace_back(fd);
    }
  }
  if ((header->msg_flags & MSG_CTRUNC) != 0) {
    return fail(Code::kExhausted,
                "descriptors of a shm pool were dropped: this process has no free descriptors; raise "
                "LimitNOFILE");
  }
  if (descriptors_.size() > limits_.descriptors_max) {
    return fail(Code::kProtocol, "shm peer sent {} descriptors that no frame announced, limit {}",
                descriptors_.size(), limits_.descriptors_max);
  }
  return {};
}

Result<void> Channel::cut_frames(std::vector<std::string>& frames) {
  std::size_t begin = 0;
  while (incoming_.size() - begin >= kLengthBytes) {
    const std::size_t length = read_length(incoming_.data() + begin);
    if (length > limits_.frame_bytes_max) {
      return fail(Code::kProtocol, "shm frame of {} bytes is above the limit of {}", length,
                  limits_.frame_bytes_max);
    }
    if (incoming_.size() - begin - kLengthBytes < length) {
      break;
    }
    frames.push_back(incoming_.substr(begin + kLengthBytes, length));
    begin += kLengthBytes + length;
  }
  incoming_.erase(0, begin);
  return {};
}

Result<std::vector<UniqueFd>> Channel::take_descriptors(std::size_t count) {
  if (descriptors_.size() < count) {
    return fail(Code::kProtocol, "shm frame announces {} descriptors, {} arrived", count,
                descriptors_.size());
  }
  std::vector<UniqueFd> taken;
  for (std::size_t i = 0; i < count; ++i) {
    taken.push_back(std::move(descriptors_.front()));
    descriptors_.pop_front();
  }
  return taken;
}

void Channel::shutdown_write() {
  outgoing_.clear();
  ::shutdown(socket_.get(), SHUT_WR);
}

Result<void> check_peer_uid(int socket, const std::vector<uid_t>& allowed) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return fail(errno_error("SO_PEERCRED of a shm socket", errno));
  }
  const std::vector<uid_t> own{::geteuid()};
  const std::vector<uid_t>& list = allowed.empty() ? own : allowed;
  if (std::find(list.begin(), list.end(), credentials.uid) == list.end()) {
    return fail(
        Code::kUnauthorized,
        "the daemon at the other end of the shm socket (pid {}) runs as uid {}, allowed are {}; run both "
        "as one user or set allowed_uids",
        credentials.pid, credentials.uid, fmt::join(list, ", "));
  }
  return {};
}

bool Channel::peer_is_gone() const {
  pollfd state{socket_.get(), POLLRDHUP, 0};
  return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

}  // namespace kvferry::shm
