#pragma once
// The framing of the engine socket: a 4-byte little-endian length, then that many bytes of MessagePack.
// Nothing in here trusts a byte: lengths are bounded before anything is stored, and check_msgpack() proves
// that a body is small and shallow before the recursive parser sees it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"

namespace kvferry {

inline constexpr std::size_t kFrameHeaderBytes = 4;
/// Containers inside containers: map > list of buffers > map of one buffer, plus one to spare.
inline constexpr std::size_t kFrameDepthMax = 4;
/// Values in one frame. The largest legal frame is an attach with 4096 buffers of 12 keys and values each.
inline constexpr std::size_t kFrameValuesMax = 96 * 1024;

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

/// Accepts exactly one MessagePack map with at most kFrameValuesMax values, at most kFrameDepthMax deep, no
/// extension types, all lengths inside `body`, and nothing behind it. Returns the map's entry count, so that
/// duplicate keys can be told.
Result<std::uint32_t> check_msgpack(std::span<const std::byte> body);

}  // namespace kvferry
