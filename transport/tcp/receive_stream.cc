#include "transport/tcp/receive_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/base/check.h"

namespace kvferry {
namespace {

// One turn of one stream; others wait meanwhile.
constexpr std::uint64_t kTurnBytes = 4 << 20;
// Below this, the kernel's work per iovec costs more than copying through a buffer that stays in the cache.
constexpr std::uint64_t kScatterBytesMin = 1024;

}  // namespace

ReceiveStream::ReceiveStream(UniqueFd fd, Host& host, std::span<std::byte> scratch)
    : fd_(std::move(fd)), host_(host), scratch_(scratch) {
  window_.reserve(kWindowSpans);
}

ReceiveStream::Progress ReceiveStream::on_readable() {
  std::uint64_t turn = 0;
  while (turn < kTurnBytes && wants_read() && !stopped_) {
    const bool in_frame = state_ == State::kHello || state_ == State::kHeader;
    Read read = in_frame ? read_frame() : read_payload();
    if (read.progress.end != End::kOpen) {
      return read.progress;
    }
    if (read.would_block) {
      break;
    }
    turn += read.bytes;
  }
  return stopped_ ? Progress{} : flush();
}

ReceiveStream::Read ReceiveStream::receive(std::span<const std::span<std::byte>> areas) {
  std::array<iovec, kWindowSpans + 1> parts;
  KVF_CHECK(areas.size() <= parts.size());
  for (std::size_t i = 0; i < areas.size(); ++i) {
    parts[i] = iovec{areas[i].data(), areas[i].size()};
  }
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = areas.size();
  Read result;
  ssize_t got = 0;
  do {
    got = ::recvmsg(fd_.get(), &message, 0);
  } while (got < 0 && errno == EINTR);
  if (got > 0) {
    result.bytes = static_cast<std::size_t>(got);
  } else if (got == 0) {
    const bool between_frames = state_ == State::kHeader && frame_have_ == 0;
    result.progress.end = between_frames ? End::kClosed : End::kFailed;
    result.progress.error = Error{Code::kPeerLost, between_frames ? "the peer closed the connection"
                                                                  : "the connection ended within a block"};
  } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
    result.would_block = true;
  } else {
    result.progress.end = End::kFailed;
    result.progress.error = errno_error("receive", errno);
    result.progress.error.code = Code::kPeerLost;
  }
  return result;
}

ReceiveStream::Read ReceiveStream::read_frame() {
  const std::span<std::byte> rest(frame_.data() + frame_have_, frame_need_ - frame_have_);
  Read read = receive(std::span(&rest, 1));
  frame_have_ += read.bytes;
  if (read.bytes > 0 && frame_have_ == frame_need_) {
    read.progress = on_frame();
  }
  return read;
}

ReceiveStream::Read ReceiveStream::read_payload() {
  if (state_ == State::kDiscarding) {
    const std::span<std::byte> area = scratch_.first(std::min<std::uint64_t>(scratch_.size(), payload_left_));
    Read read = receive(std::span(&area, 1));
    payload_left_ -= read.bytes;
    if (read.bytes > 0 && payload_left_ == 0) {
      expect_header(0);
    }
    return read;
  }
  return bounce_ ? read_bounced() : read_scattered();
}

ReceiveStream::Read ReceiveStream::read_scattered() {
  refill_window();
  std::array<std::span<std::byte>, kWindowSpans + 1> areas;
  std::size_t count = 0;
  for (std::size_t i = window_begin_; i < window_.size(); ++i) {
    areas[count++] = window_[i];
  }
  if (placement_.bytes_left() == 0) {
    // What follows the payload is always a header: reading it along saves a call per block.
    areas[count++] = std::span(frame_.data(), kBlockHeaderBytes);
  }
  Read read = receive(std::span(areas.data(), count));
  if (read.bytes == 0) {
    return read;
  }
  const std::size_t payload = std::min<std::uint64_t>(read.bytes, payload_left_);
  consume_window(payload);
  payload_left_ -= payload;
  if (payload_left_ == 0) {
    const std::size_t beyond = read.bytes - payload;
    read.progress = payload_done();
    expect_header(beyond);
    if (read.progress.end == End::kOpen && frame_have_ == frame_need_) {
      read.progress = on_frame();
    }
  }
  return read;
}

ReceiveStream::Read ReceiveStream::read_bounced() {
  const std::span<std::byte> area = scratch_.first(std::min<std::uint64_t>(scratch_.size(), payload_left_));
  Read read = receive(std::span(&area, 1));
  std::span<const std::byte> from = area.first(read.bytes);
  while (!from.empty()) {
    refill_window();
    const std::span<std::byte> to = window_[window_begin_];
    const std::size_t bytes = std::min(from.size(), to.size());
    std::memcpy(to.data(), from.data(), bytes);
    from = from.subspan(bytes);
    consume_window(bytes);
  }
  payload_left_ -= read.bytes;
  if (read.bytes > 0 && payload_left_ == 0) {
    read.progress = payload_done();
    expect_header(0);
  }
  return read;
}

void ReceiveStream::refill_window() {
  if (window_begin_ < window_.size()) {
    return;
  }
  window_.clear();
  window_begin_ = 0;
  while (window_.size() < kWindowSpans && placement_.bytes_left() > 0) {
    window_.push_back(placement_.next());
  }
}

void ReceiveStream::consume_window(std::size_t bytes) {
  while (bytes > 0) {
    std::span<std::byte>& first = window_[window_begin_];
    const std::size_t taken = std::min(bytes, first.size());
    first = first.subspan(taken);
    bytes -= taken;
    if (first.empty()) {
      ++window_begin_;
    }
  }
}

void ReceiveStream::expect_header(std::size_t already_read) {
  state_ = State::kHeader;
  frame_have_ = already_read;
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
  expect_header(0);
  return {};
}

ReceiveStream::Progress ReceiveStream::on_header() {
  const auto header = decode_block(frame_);
  if (!header) {
    return Progress{End::kFailed, header.error()};
  }
  header_ = *header;
  expect_header(0);
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
      window_.clear();
      window_begin_ = 0;
      bounce_ = placement_.span_bytes_hint() < kScatterBytesMin;
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
  window_.clear();
  window_begin_ = 0;
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
  window_.clear();
  window_begin_ = 0;
  host_.discarding(header_, peer_, Error{Code::kNotFound, "the grant was closed while a block arrived"});
  state_ = State::kDiscarding;
}

}  // namespace kvferry
