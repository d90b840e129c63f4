#include "common/engine/wire_frame.h"

namespace kvferry {

// One large frame must not pin its memory for the rest of the connection.
static constexpr std::size_t kIdleBytesMax = 1u << 20;

void FrameBuffer::append(std::span<const std::byte> bytes) {
  if (begin_ == bytes_.size()) {
    if (bytes_.capacity() > kIdleBytesMax) {
      bytes_ = {};
    }
    bytes_.clear();
    begin_ = 0;
  } else if (begin_ > 0) {
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(begin_));
    begin_ = 0;
  }
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

Result<std::optional<std::span<const std::byte>>> FrameBuffer::next() {
  const std::size_t have = bytes_.size() - begin_;
  if (have < kFrameHeaderBytes) {
    return std::nullopt;
  }
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < kFrameHeaderBytes; ++i) {
    length |= std::to_integer<std::uint32_t>(bytes_[begin_ + i]) << (8 * i);
  }
  if (length == 0 || length > frame_bytes_max_) {
    return fail(
        Code::kProtocol,
        "frame length is {} bytes, legal are 1 to {} (frame_bytes_max): send a request of that size in "
        "chunks, or raise the limit",
        length, frame_bytes_max_);
  }
  if (have - kFrameHeaderBytes < length) {
    return std::nullopt;
  }
  const std::size_t body = begin_ + kFrameHeaderBytes;
  begin_ = body + length;
  return std::span<const std::byte>(bytes_).subspan(body, length);
}

std::string to_frame(std::span<const std::uint8_t> body) {
  const auto length = static_cast<std::uint32_t>(body.size());
  std::string frame;
  frame.reserve(kFrameHeaderBytes + body.size());
  for (std::size_t i = 0; i < kFrameHeaderBytes; ++i) {
    frame.push_back(static_cast<char>((length >> (8 * i)) & 0xFF));
  }
  frame.append(body.begin(), body.end());
  return frame;
}

}  // namespace kvferry
