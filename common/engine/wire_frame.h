#pragma once
// The framing of the engine socket: a 4-byte little-endian length, then that many bytes of MessagePack.
// Nothing in here trusts a byte: lengths are bounded before anything is stored.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

inline constexpr std::size_t kFrameHeaderBytes = 4;

/// Cuts a byte stream into frames. One per direction of a connection; not thread safe.
class FrameBuffer {
 public:
  explicit FrameBuffer(std::uint32_t frame_bytes_max) : frame_bytes_max_(frame_bytes_max) {}

  void append(std::span<const std::byte> bytes);
  /// The next whole frame's body, valid until the next call of append(); nullopt when more bytes are needed.
  /// An Error (kProtocol) when the length is 0 or above the limit; the stream is unusable from then on.
  Result<std::optional<std::span<const std::byte>>> next();
  /// No bytes of an unfinished frame are waiting.
  bool empty() const { return begin_ == bytes_.size(); }

 private:
  std::uint32_t frame_bytes_max_;
  std::vector<std::byte> bytes_;
  std::size_t begin_ = 0;
};

/// The frame that carries `body`, ready for the socket.
std::string to_frame(std::span<const std::uint8_t> body);

}  // namespace kvferry
