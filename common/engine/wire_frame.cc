#include "common/engine/wire_frame.h"

#include <array>

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

namespace {

/// What one MessagePack type byte announces.
struct Head {
  enum class Kind { kScalar, kBytes, kArray, kMap, kIllegal };
  Kind kind = Kind::kIllegal;
  std::uint64_t size = 0;          // payload bytes, items, or entries, when it is in the type byte itself
  std::uint32_t length_bytes = 0;  // width of the big-endian length that follows, for the other types
};

Head classify(std::uint8_t type) {
  using Kind = Head::Kind;
  if (type <= 0x7F || type >= 0xE0 || type == 0xC0 || type == 0xC2 || type == 0xC3) {
    return {Kind::kScalar, 0, 0};
  }
  if (type <= 0x8F) {
    return {Kind::kMap, type & 0x0Fu, 0};
  }
  if (type <= 0x9F) {
    return {Kind::kArray, type & 0x0Fu, 0};
  }
  if (type <= 0xBF) {
    return {Kind::kBytes, type & 0x1Fu, 0};
  }
  switch (type) {
    case 0xC4:
    case 0xD9:
      return {Kind::kBytes, 0, 1};
    case 0xC5:
    case 0xDA:
      return {Kind::kBytes, 0, 2};
    case 0xC6:
    case 0xDB:
      return {Kind::kBytes, 0, 4};
    case 0xCA:
      return {Kind::kScalar, 4, 0};
    case 0xCB:
      return {Kind::kScalar, 8, 0};
    case 0xCC:
    case 0xCD:
    case 0xCE:
    case 0xCF:
      return {Kind::kScalar, std::uint64_t{1} << (type - 0xCC), 0};
    case 0xD0:
    case 0xD1:
    case 0xD2:
    case 0xD3:
      return {Kind::kScalar, std::uint64_t{1} << (type - 0xD0), 0};
    case 0xDC:
      return {Kind::kArray, 0, 2};
    case 0xDD:
      return {Kind::kArray, 0, 4};
    case 0xDE:
      return {Kind::kMap, 0, 2};
    case 0xDF:
      return {Kind::kMap, 0, 4};
    default:  // 0xC1 and the extension types
      return {};
  }
}

/// Walks the values one by one with a fixed stack, so that depth costs an error and never the thread's stack.
class Scanner {
 public:
  explicit Scanner(std::span<const std::byte> body) : body_(body) {}

  Result<std::uint32_t> run() {
    KVF_TRY(const Head root, head());
    if (root.kind != Head::Kind::kMap) {
      return fail(Code::kProtocol, "frame is not a MessagePack map (first byte 0x{:02x})",
                  std::to_integer<unsigned>(body_[0]));
    }
    KVF_TRY_VOID(enter(root));
    while (depth_ > 0) {
      if (open_[depth_ - 1] == 0) {
        --depth_;
        continue;
      }
      --open_[depth_ - 1];
      KVF_TRY(const Head value, head());
      KVF_TRY_VOID(enter(value));
    }
    if (at_ != body_.size()) {
      return fail(Code::kProtocol, "frame has {} bytes behind its map of {} bytes", body_.size() - at_, at_);
    }
    return static_cast<std::uint32_t>(root.size);
  }

 private:
  Result<Head> head() {
    if (at_ >= body_.size()) {
      return fail(Code::kProtocol, "frame ends inside its map, after {} bytes", body_.size());
    }
    const auto type = std::to_integer<std::uint8_t>(body_[at_++]);
    Head head = classify(type);
    if (head.kind == Head::Kind::kIllegal) {
      return fail(Code::kProtocol, "frame has MessagePack type 0x{:02x} at byte {}, which is not used here",
                  type, at_ - 1);
    }
    if (head.length_bytes > body_.size() - at_) {
      return fail(Code::kProtocol, "frame ends inside a length, after {} bytes", body_.size());
    }
    for (std::uint32_t i = 0; i < head.length_bytes; ++i) {
      head.size = head.size << 8 | std::to_integer<std::uint64_t>(body_[at_++]);
    }
    return head;
  }

  Result<void> enter(const Head& head) {
    const bool container = head.kind == Head::Kind::kArray || head.kind == Head::Kind::kMap;
    if (!container) {
      if (head.size > body_.size() - at_) {
        return fail(Code::kProtocol, "frame has a value of {} bytes at byte {}, but {} bytes are left",
                    head.size, at_, body_.size() - at_);
      }
      at_ += head.size;
      return {};
    }
    const std::uint64_t values = head.kind == Head::Kind::kMap ? head.size * 2 : head.size;
    values_ += values;
    if (values_ > kFrameValuesMax) {
      return fail(Code::kProtocol, "frame has {} values or more, at most {} are legal", values_,
                  kFrameValuesMax);
    }
    if (depth_ == kFrameDepthMax) {
      return fail(Code::kProtocol, "frame is nested deeper than {} levels", kFrameDepthMax);
    }
    open_[depth_++] = values;
    return {};
  }

  std::span<const std::byte> body_;
  std::size_t at_ = 0;
  std::uint64_t values_ = 0;
  std::size_t depth_ = 0;
  std::array<std::uint64_t, kFrameDepthMax> open_{};  // values still to come, by depth
};

}  // namespace

Result<std::uint32_t> check_msgpack(std::span<const std::byte> body) {
  return Scanner(body).run();
}

}  // namespace kvferry
