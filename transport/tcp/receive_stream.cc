#include "transport/tcp/receive_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kernels/copy.h"

namespace kvferry {
namespace {

// One turn of one stream; others wait meanwhile.
constexpr std::uint64_t kTurnBytes = 4 << 20;
}  // namespace

ReceiveStream::ReceiveStream(UniqueFd fd, Host& host, std::span<std::byte> scratch)
    : fd_(std::move(fd)), host_(host), scratch_(scratch) {}

ReceiveStream::Progress ReceiveStream::on_readable() {
  std::uint64_t turn = 0;
  while (turn < kTurnBytes && wants_read() && !stopped_) {
    const Read read = receive();
    if (read.progress.end != End::kOpen) {
      return read.progress;
    }
    if (read.bytes == 0) {
      break;
    }
    if (Progress progress = consume(scratch_.first(read.bytes)); progress.end != End::kOpen) {
      return progress;
    }
    turn += read.bytes;
  }
  return stopped_ ? Progress{} : flush();
}

ReceiveStream::Read ReceiveStream::receive() {
  Read result;
  ssize_t got = 0;
  do {
    got = ::recv(fd_.get(), scratch_.data(), scratch_.size(), 0);
  } while (got < 0 && errno == EINTR);
  if (got > 0) {
    result.bytes = static_cast<std::size_t>(got);
  } else if (got == 0) {
    const bool between_frames = state_ == State::kHeader && frame_have_ == 0;
    result.progress.end = between_frames ? End::kClosed : End::kFailed;
    result.progress.error = Error{Code::kPeerLost, between_frames ? "the peer closed the connection"
                                                                  : "the connection ended within a block"};
  } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
    result.progress.end = End::kFailed;
    result.progress.error = errno_error("receive", errno);
    result.progress.error.code = Code::kPeerLost;
  }
  return result;
}

ReceiveStream::Progress ReceiveStream::consume(std::span<const std::byte> bytes) {
  while (!bytes.empty() && !stopped_) {
    Progress progress;
    std::size_t used = 0;
    if (state_ == State::kHello || state_ == State::kHeader) {
      used = std::min(bytes.size(), frame_need_ - frame_have_);
      std::memcpy(frame_.data() + frame_have_, bytes.data(), used);
      frame_have_ += used;
      if (frame_have_ == frame_need_) {
        progress = on_frame();
      }
    } else {
      used = std::min<std::uint64_t>(bytes.size(), payload_left_);
      if (state_ == State::kPlacing) {
        used = place(bytes.first(used));
      }
      payload_left_ -= used;
      if (payload_left_ == 0) {
        progress = state_ == State::kPlacing ? payload_done() : Progress{};
        expect_header();
      }
    }
    if (progress.end != End::kOpen) {
      return progress;
    }
    bytes = bytes.subspan(used);
  }
  return {};
}

std::size_t ReceiveStream::place(std::span<const std::byte> bytes) {
  std::size_t used = 0;
  while (used < bytes.size()) {
    if (to_.empty()) {
      to_ = placement_.next();
    }
    const std::size_t now = std::min(bytes.size() - used, to_.size());
    copy_run(to_.data(), bytes.data() + used, now, 1, now, now);
    to_ = to_.subspan(now);
    used += now;
  }
  return used;
}

void ReceiveStream::expect_header() {
  state_ = State::kHeader;
  frame_have_ = 0;
  frame_need_ = kBlockHeaderBytes;
}

ReceiveStream::Progress ReceiveStream::on_frame() {
  return state_ == State::kHello ? on_hello() : on_header();
}

ReceiveStream::Progress ReceiveStream::on_hello() {
  const auto hello = decode_hello(std::span(frame_).first<kHelloBytes>());
  if (!hello) {
    return Progress{End::kFailed, hello.error()};
  }
  const auto peer = host_.greet(*hello);
  if (!peer) {
    return Progress{End::kFailed, peer.error()};
  }
  peer_ = *peer;
  greeted_ = true;
  const auto welcome = encode_welcome();
  answers_.insert(answers_.end(), welcome.begin(), welcome.end());
  expect_header();
  return {};
}

ReceiveStream::Progress ReceiveStream::on_header() {
  const auto header = decode_block(frame_);
  if (!header) {
    return Progress{End::kFailed, header.error()};
  }
  header_ = *header;
  expect_header();
  switch (header_.type) {
    case BlockType::kRows:
    case BlockType::kAux: {
      auto placement = host_.admit(header_, peer_);
      payload_left_ = header_.payload_bytes;
      if (stopped_) {
        return {};  // admit() let a fence through: what follows must not land
      }
      if (!placement) {
        return on_refusal(header_, std::move(placement).error());
      }
      placement_ = *std::move(placement);
      to_ = {};
      state_ = State::kPlacing;
      return {};
    }
    case BlockType::kNotice: {
      auto counted = host_.notice(header_, peer_);
      payload_left_ = 0;
      return counted ? Progress{} : on_refusal(header_, std::move(counted).error());
    }
    case BlockType::kDrain: {
      BlockHeader answer = header_;
      answer.type = BlockType::kDrained;
      BlockBytes bytes;
      encode_block(answer, bytes);
      answers_.insert(answers_.end(), bytes.begin(), bytes.end());
      return {};
    }
    case BlockType::kDrained:
      break;
  }
  return Progress{End::kFailed, Error{Code::kProtocol, "a sender must not send 'drained'"}};
}

ReceiveStream::Progress ReceiveStream::on_refusal(const BlockHeader& header, Refusal refusal) {
  if (!refusal.discard) {
    return Progress{End::kFailed, std::move(refusal.error)};
  }
  host_.discarding(header, peer_, refusal.error);
  if (payload_left_ > 0) {
    state_ = State::kDiscarding;
  }
  return {};
}

ReceiveStream::Progress ReceiveStream::payload_done() {
  placement_ = Placement();
  to_ = {};
  copy_fence();  // before anybody hears of the bytes
  auto counted = host_.arrived(header_, peer_);
  if (!counted) {
    return on_refusal(header_, std::move(counted).error());
  }
  return {};
}

ReceiveStream::Progress ReceiveStream::flush() {
  while (!answers_.empty()) {
    const ssize_t sent = ::send(fd_.get(), answers_.data(), answers_.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        break;
      }
      Error error = errno_error("send", errno);
      error.code = Code::kPeerLost;
      return Progress{End::kFailed, std::move(error)};
    }
    answers_.erase(answers_.begin(), answers_.begin() + sent);
  }
  return {};
}

void ReceiveStream::revoke(const GrantKey& key) {
  if (state_ != State::kPlacing || header_.key.grant != key) {
    return;
  }
  placement_ = Placement();
  to_ = {};
  host_.discarding(header_, peer_, Error{Code::kNotFound, "the grant was closed while a block arrived"});
  state_ = State::kDiscarding;
}

}  // namespace kvferry
