#pragma once
// One connected Unix stream socket that carries frames and descriptors without ever blocking. A frame is a
// 4-byte little-endian length and that many bytes of text; descriptors travel with the bytes of the frame
// that announces how many it has. Owned and used by one thread.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "common/pool/pool.h"

namespace kvferry::shm {

struct ChannelLimits {
  std::size_t frame_bytes_max = 0;
  std::size_t descriptors_max = 0;  // received and not yet taken; 0 refuses any
  std::size_t queued_frames_max = 0;
};

class Channel {
 public:
  Channel(UniqueFd socket, ChannelLimits limits) : socket_(std::move(socket)), limits_(limits) {}

  int fd() const { return socket_.get(); }
  /// The other end is closed, whatever may still be there to read.
  bool peer_is_gone() const;
  /// Queues a frame; with `pool`, all descriptors of that pool go along. kExhausted when the other side has
  /// stopped reading for too long.
  Result<void> send(std::string text, std::shared_ptr<const Pool> pool = nullptr);
  /// Writes as much as the socket takes.
  Result<void> flush();
  bool wants_write() const { return !outgoing_.empty(); }

  /// Reads what is there and appends whole frames; false when the other side has closed. Frames appended
  /// before an error or a close are good.
  Result<bool> receive(std::vector<std::string>& frames);
  /// Reads and forgets what is there; false when the other side has closed.
  bool discard();
  /// The next `count` descriptors in the order they were sent.
  Result<std::vector<UniqueFd>> take_descriptors(std::size_t count);

  /// Says that nothing more will be sent; reading goes on.
  void shutdown_write();

 private:
  struct Outgoing {
    std::string bytes;  // length and text
    std::size_t written = 0;
    std::shared_ptr<const Pool> pool;  // keeps the descriptors open until they are sent
    std::size_t descriptors_sent = 0;
  };
  Result<bool> write_some(Outgoing& frame);
  Result<void> cut_frames(std::vector<std::string>& frames);
  Result<void> keep_descriptors(void* header);

  UniqueFd socket_;
  ChannelLimits limits_;
  std::deque<Outgoing> outgoing_;
  std::string incoming_;
  std::deque<UniqueFd> descriptors_;
};

/// True when the process at the other end of `socket` runs as one of `allowed` (empty: as our own user). The
/// kernel vouches for the uid.
Result<void> check_peer_uid(int socket, const std::vector<uid_t>& allowed);

}  // namespace kvferry::shm
