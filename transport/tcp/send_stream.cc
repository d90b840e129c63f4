#include "transport/tcp/send_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "kernels/copy.h"
#include "transport/tcp/event_loop.h"
#include "transport/tcp/socket.h"

namespace kvferry {
namespace {

// One turn of one stream; other streams wait meanwhile, and so does what has just been posted.
constexpr std::uint64_t kTurnBytes = 1 << 20;
constexpr std::size_t kPartsMax = 1024;  // the system's limit for one call (UIO_MAXIOV)
constexpr std::size_t kPackedSpanMax = 8192;

Error lost(const char* what, int error_number) {
  Error error = errno_error(what, error_number);
  error.code = Code::kPeerLost;
  return error;
}

}  // namespace

SendStream::SendStream(UniqueFd fd, const TcpHello& hello, PackRing& ring)
    : fd_(std::move(fd)), ring_(ring), hello_(encode_hello(hello)) {}

bool SendStream::wants_write(const SendQueue& queue) const {
  if (state_ != State::kUp) {
    return hello_sent_ < hello_.size();
  }
  return has_frame_ || !drains_.empty() || !queue.empty();
}

Result<void> SendStream::on_writable(SendQueue& queue, Outcome& outcome) {
  if (state_ == State::kConnecting) {
    state_ = State::kGreeting;
  }
  if (state_ == State::kGreeting) {
    return write_hello();
  }
  std::uint64_t turn = 0;
  while (turn < kTurnBytes) {
    if (!has_frame_ && !next_frame(queue)) {
      return {};
    }
    KVF_TRY(const bool finished, write_frame());
    if (!finished) {
      return {};
    }
    has_frame_ = false;
    turn += kBlockHeaderBytes;
    if (!frame_is_drain_) {
      turn += taken_.block.header.payload_bytes;
      for (fabric_event::ChunkDone& done : queue.sent(taken_, steady_now())) {
        outcome.done.push_back(done);
      }
    }
  }
  return {};
}

Result<void> SendStream::write_hello() {
  while (hello_sent_ < hello_.size()) {
    const ssize_t sent =
        ::send(fd_.get(), hello_.data() + hello_sent_, hello_.size() - hello_sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) {
      continue;
    }
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return {};
      }
      return fail(lost("send the hello", errno));
    }
    hello_sent_ += static_cast<std::size_t>(sent);
  }
  return {};
}

/// Drain requests go first: the blocks that they follow have been written, or were never taken.
bool SendStream::next_frame(SendQueue& queue) {
  frame_is_drain_ = !drains_.empty();
  if (frame_is_drain_) {
    encode_block(make_drain(drains_.front()), frame_);
    drains_.pop_front();
    taken_.block.spans.clear();
  } else if (queue.take(taken_, steady_now())) {
    encode_block(taken_.block.header, frame_);
  } else {
    return false;
  }
  has_frame_ = true;
  frame_sent_ = 0;
  span_ = 0;
  span_sent_ = 0;
  return true;
}

/// True when the whole frame is in the socket.
Result<bool> SendStream::write_frame() {
  std::array<iovec, kPartsMax> parts;
  while (true) {
    const std::size_t count = collect(parts);
    if (count == 0) {
      return true;
    }
    msghdr message = {};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return false;
      }
      return fail(lost("send", errno));
    }
    wrote(static_cast<std::size_t>(sent));
  }
}

/// What is to be written next: the rest of the header, then spans or a packed piece of them.
std::size_t SendStream::collect(std::span<iovec> parts) {
  const auto& spans = taken_.block.spans;
  std::size_t count = 0;
  if (frame_sent_ < frame_.size()) {
    parts[count++] = iovec{frame_.data() + frame_sent_, frame_.size() - frame_sent_};
  }
  pack();
  if (packed_) {
    const auto rest = packed_.bytes().first(packed_bytes_).subspan(packed_sent_);
    parts[count++] = iovec{rest.data(), rest.size()};
    return count;
  }
  std::size_t skip = span_sent_;
  for (std::size_t i = span_; i < spans.size() && count < parts.size(); ++i) {
    parts[count++] = iovec{const_cast<std::byte*>(spans[i].data()) + skip, spans[i].size() - skip};
    skip = 0;
  }
  return count;
}

/// Packs the next short spans, as many as a buffer holds, where they are short and many.
void SendStream::pack() {
  const std::span<const std::span<const std::byte>> spans(taken_.block.spans);
  if (packed_ || span_sent_ > 0 || spans.size() - span_ < 2 ||
      taken_.block.header.payload_bytes / spans.size() > kPackedSpanMax) {
    return;
  }
  packed_ = ring_.take();
  packed_end_ = span_;
  packed_bytes_ = 0;
  packed_sent_ = 0;
  const std::size_t room = packed_.bytes().size();
  while (packed_end_ < spans.size() && packed_bytes_ + spans[packed_end_].size() <= room) {
    packed_bytes_ += spans[packed_end_++].size();
  }
  if (packed_bytes_ == 0) {
    packed_ = {};
    return;
  }
  copy_gather(packed_.bytes().data(), spans.subspan(span_, packed_end_ - span_));
}

void SendStream::wrote(std::size_t bytes) {
  const auto& spans = taken_.block.spans;
  const std::size_t of_header = std::min(bytes, frame_.size() - frame_sent_);
  frame_sent_ += of_header;
  bytes -= of_header;
  if (packed_) {
    const std::size_t of_packed = std::min(bytes, packed_bytes_ - packed_sent_);
    packed_sent_ += of_packed;
    bytes -= of_packed;
    if (packed_sent_ == packed_bytes_) {
      span_ = packed_end_;
      packed_ = {};
    }
  }
  while (bytes > 0) {
    const std::size_t of_span = std::min(bytes, spans[span_].size() - span_sent_);
    span_sent_ += of_span;
    bytes -= of_span;
    if (span_sent_ == spans[span_].size()) {
      ++span_;
      span_sent_ = 0;
    }
  }
}

Result<void> SendStream::on_readable(Outcome& outcome) {
  // Answers are few and small: a bounded number per turn is plenty.
  for (int i = 0; i < 64; ++i) {
    const std::size_t need = state_ == State::kUp ? kBlockHeaderBytes : kWelcomeBytes;
    const ssize_t got = ::recv(fd_.get(), answer_.data() + answer_have_, need - answer_have_, 0);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return {};
      }
      return fail(lost("receive", errno));
    }
    if (got == 0) {
      return fail(Code::kPeerLost, "{}",
                  state_ == State::kUp ? "the receiver closed the connection"
                                       : "the receiver refused the connection: the token is not valid there");
    }
    answer_have_ += static_cast<std::size_t>(got);
    if (answer_have_ < need) {
      continue;
    }
    answer_have_ = 0;
    if (state_ != State::kUp) {
      KVF_TRY_VOID(decode_welcome(std::span(answer_).first<kWelcomeBytes>()));
      if (hello_sent_ < hello_.size()) {
        return fail(Code::kProtocol, "the receiver answered before it was greeted");
      }
      state_ = State::kUp;
      continue;
    }
    KVF_TRY(const BlockHeader answer, decode_block(answer_));
    if (answer.type != BlockType::kDrained) {
      return fail(Code::kProtocol, "the receiver sent a block of type {}", static_cast<int>(answer.type));
    }
    outcome.drained.push_back(answer.key);
  }
  return {};
}

}  // namespace kvferry
