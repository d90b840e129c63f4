#pragma once
// The receiving end of one TCP stream: hello, then blocks. Everything is read into a buffer that stays in the
// cache, headers are checked there, and payload goes on to the destination rows with the copy that writes
// past the cache: faster than letting the kernel write cold rows, and one call reads several blocks. Belongs
// to the fabric's thread.
//
//   kHello -> kHeader -> kPlacing or kDiscarding -> kHeader ...
//
// revoke() turns kPlacing into kDiscarding: from then on nothing of that block can reach the grant's pages.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "transport/grant_table.h"
#include "transport/tcp/hello.h"

namespace kvferry {

class ReceiveStream {
 public:
  /// What the stream asks its fabric. None of these may destroy the stream before the call returns.
  class Host {
   public:
    virtual ~Host() = default;
    virtual Result<PeerId> greet(const TcpHello& hello) = 0;
    virtual Admission<Placement> admit(const BlockHeader& header, PeerId peer) = 0;
    /// A violation comes back as Refusal without `discard`.
    virtual Admission<void> arrived(const BlockHeader& header, PeerId peer) = 0;
    virtual Admission<void> notice(const BlockHeader& header, PeerId peer) = 0;
    virtual void discarding(const BlockHeader& header, PeerId peer, const Error& why) = 0;
  };
  enum class End : std::uint8_t { kOpen, kClosed, kFailed };
  struct Progress {
    End end = End::kOpen;
    Error error;  // with kFailed; code kProtocol or kUnauthorized when the peer broke the rules
  };

  /// `scratch` is shared by the streams of one thread and outlives them; nothing stays in it between calls.
  ReceiveStream(UniqueFd fd, Host& host, std::span<std::byte> scratch);

  /// Reads until nothing is there or a fair share has been read.
  Progress on_readable();
  /// Sends queued answers; on_readable() does it too.
  Progress flush();
  /// Nothing more of this grant may be placed.
  void revoke(const GrantKey& key);
  /// Reads nothing more, even when called from inside a Host call of this stream.
  void stop() { stopped_ = true; }

  bool greeted() const { return greeted_; }
  PeerId peer() const { return peer_; }
  int fd() const { return fd_.get(); }
  bool wants_write() const { return !answers_.empty(); }
  /// False while the peer does not take its answers: reading on would queue more of them.
  bool wants_read() const { return answers_.size() < kAnswerBytesMax; }

 private:
  enum class State : std::uint8_t { kHello, kHeader, kPlacing, kDiscarding };
  static constexpr std::size_t kAnswerBytesMax = 64 * kBlockHeaderBytes;

  struct Read {
    std::size_t bytes = 0;  // 0: nothing there, or the end
    Progress progress;
  };
  Read receive();
  Progress consume(std::span<const std::byte> bytes);
  std::size_t place(std::span<const std::byte> bytes);
  Progress on_frame();
  Progress on_hello();
  Progress on_header();
  Progress on_refusal(const BlockHeader& header, Refusal refusal);
  Progress payload_done();
  void expect_header();

  UniqueFd fd_;
  Host& host_;
  std::span<std::byte> scratch_;
  State state_ = State::kHello;
  bool greeted_ = false;
  bool stopped_ = false;
  PeerId peer_ = 0;
  BlockBytes frame_ = {};
  std::size_t frame_have_ = 0;
  std::size_t frame_need_ = kHelloBytes;
  BlockHeader header_;
  std::uint64_t payload_left_ = 0;
  Placement placement_;
  std::span<std::byte> to_;  // what is left of the span that placement_ gave last
  std::vector<std::byte> answers_;
};

}  // namespace kvferry
