#pragma once
// The sending end of one TCP stream: connect, hello, then blocks from the peer's queue. Long spans go to the
// system straight from the source rows; short ones are packed into a buffer that stays in the cache first,
// because the system reads cold rows one by one at less than half the speed. Drain requests go between blocks
// and come back when the receiver has passed them.
// Belongs to the fabric's thread.
//
//   kConnecting -> kGreeting -> kUp

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "transport/send_queue.h"
#include "transport/tcp/hello.h"
#include "transport/tcp/pack_ring.h"

struct iovec;

namespace kvferry {

class SendStream {
 public:
  enum class State : std::uint8_t { kConnecting, kGreeting, kUp };
  struct Outcome {
    std::vector<fabric_event::ChunkDone> done;
    std::vector<TransferKey> drained;  // answers to drain()
  };

  /// `ring` outlives the stream.
  SendStream(UniqueFd fd, const TcpHello& hello, PackRing& ring);

  /// Writes until the socket is full, the queue empty, or a fair share is written. An Error means that the
  /// stream is broken; `outcome` is valid in any case.
  Result<void> on_writable(SendQueue& queue, Outcome& outcome);
  Result<void> on_readable(Outcome& outcome);
  void drain(const TransferKey& key) { drains_.push_back(key); }

  State state() const { return state_; }
  int fd() const { return fd_.get(); }
  /// Something is to be written (`queue` belongs to this stream's peer).
  bool wants_write(const SendQueue& queue) const;

 private:
  Result<void> write_hello();
  bool next_frame(SendQueue& queue);
  Result<bool> write_frame();
  std::size_t collect(std::span<iovec> parts);
  void pack();
  void wrote(std::size_t bytes);

  UniqueFd fd_;
  PackRing& ring_;
  State state_ = State::kConnecting;
  std::array<std::byte, kHelloBytes> hello_;
  std::size_t hello_sent_ = 0;
  std::deque<TransferKey> drains_;
  bool has_frame_ = false;
  bool frame_is_drain_ = false;
  BlockBytes frame_ = {};
  std::size_t frame_sent_ = 0;
  SendQueue::Taken taken_;
  std::size_t span_ = 0;       // first span that is not all sent
  std::size_t span_sent_ = 0;  // bytes of it
  PackRing::Lease packed_;     // holds spans [span_, packed_end_) when it is there
  std::size_t packed_end_ = 0;
  std::size_t packed_bytes_ = 0;
  std::size_t packed_sent_ = 0;
  BlockBytes answer_ = {};
  std::size_t answer_have_ = 0;
};

}  // namespace kvferry
