#include "common/base/msgpack_scan.h"

#include <vector>

namespace kvferry {
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

/// Walks the values one by one with a bounded stack of its own, so that depth costs an error and never the
/// thread's stack.
class Scanner {
 public:
  Scanner(std::span<const std::byte> bytes, const MsgpackLimits& limits, std::string_view what)
      : bytes_(bytes), limits_(limits), what_(what) {
    open_.reserve(limits.depth_max);
  }

  Result<std::uint32_t> run() {
    KVF_TRY(const Head root, head());
    if (root.kind != Head::Kind::kMap) {
      return fail(Code::kProtocol, "{} is not a MessagePack map (first byte 0x{:02x})", what_,
                  std::to_integer<unsigned>(bytes_[0]));
    }
    KVF_TRY_VOID(enter(root));
    while (!open_.empty()) {
      if (open_.back() == 0) {
        open_.pop_back();
        continue;
      }
      --open_.back();
      KVF_TRY(const Head value, head());
      KVF_TRY_VOID(enter(value));
    }
    if (at_ != bytes_.size()) {
      return fail(Code::kProtocol, "{} has {} bytes behind its map of {} bytes", what_, bytes_.size() - at_,
                  at_);
    }
    return static_cast<std::uint32_t>(root.size);
  }

 private:
  Result<Head> head() {
    if (at_ >= bytes_.size()) {
      return fail(Code::kProtocol, "{} ends inside its map, after {} bytes", what_, bytes_.size());
    }
    const auto type = std::to_integer<std::uint8_t>(bytes_[at_++]);
    Head head = classify(type);
    if (head.kind == Head::Kind::kIllegal) {
      return fail(Code::kProtocol, "{} has MessagePack type 0x{:02x} at byte {}, which is not used here",
                  what_, type, at_ - 1);
    }
    if (head.length_bytes > bytes_.size() - at_) {
      return fail(Code::kProtocol, "{} ends inside a length, after {} bytes", what_, bytes_.size());
    }
    for (std::uint32_t i = 0; i < head.length_bytes; ++i) {
      head.size = head.size << 8 | std::to_integer<std::uint64_t>(bytes_[at_++]);
    }
    return head;
  }

  Result<void> enter(const Head& head) {
    const bool container = head.kind == Head::Kind::kArray || head.kind == Head::Kind::kMap;
    if (!container) {
      if (head.size > bytes_.size() - at_) {
        return fail(Code::kProtocol, "{} has a value of {} bytes at byte {}, but {} bytes are left", what_,
                    head.size, at_, bytes_.size() - at_);
      }
      at_ += head.size;
      return {};
    }
    const std::uint64_t values = head.kind == Head::Kind::kMap ? head.size * 2 : head.size;
    values_ += values;
    if (values_ > limits_.values_max) {
      return fail(Code::kProtocol, "{} has {} values or more, at most {} are legal", what_, values_,
                  limits_.values_max);
    }
    if (open_.size() == limits_.depth_max) {
      return fail(Code::kProtocol, "{} is nested deeper than {} levels", what_, limits_.depth_max);
    }
    open_.push_back(values);
    return {};
  }

  std::span<const std::byte> bytes_;
  const MsgpackLimits limits_;
  std::string_view what_;
  std::size_t at_ = 0;
  std::uint64_t values_ = 0;
  std::vector<std::uint64_t> open_;  // values still to come, by depth
};

}  // namespace

Result<std::uint32_t> check_msgpack_map(std::span<const std::byte> bytes, const MsgpackLimits& limits,
                                        std::string_view what) {
  return Scanner(bytes, limits, what).run();
}

}  // namespace kvferry
