#pragma once
// The buffers that short rows are packed into before they are written to a socket: a fixed number, shared by
// all streams of one thread, small enough together to stay in the second-level cache. A stream that gets none
// writes its rows unpacked. Single-threaded; leases must end before the ring.

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace kvferry {

class PackRing {
 public:
  /// A buffer, given back at the end of its life. Empty when there was none.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : ring_(std::exchange(other.ring_, nullptr)), buffer_(std::exchange(other.buffer_, nullptr)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(ring_, other.ring_);
      std::swap(buffer_, other.buffer_);
      other.end();
      return *this;
    }
    ~Lease() { end(); }

    std::span<std::byte> bytes() const {
      return buffer_ == nullptr ? std::span<std::byte>() : std::span(*buffer_);
    }
    explicit operator bool() const { return buffer_ != nullptr; }

   private:
    friend class PackRing;
    Lease(PackRing* ring, std::vector<std::byte>* buffer) : ring_(ring), buffer_(buffer) {}
    void end() {
      if (buffer_ != nullptr) {
        ring_->free_.push_back(std::exchange(buffer_, nullptr));
      }
    }
    PackRing* ring_ = nullptr;
    std::vector<std::byte>* buffer_ = nullptr;
  };

  PackRing(std::size_t buffers, std::size_t bytes_each) : buffers_(buffers) {
    for (auto& buffer : buffers_) {
      buffer.resize(bytes_each);
      free_.push_back(&buffer);
    }
  }
  PackRing(const PackRing&) = delete;
  PackRing& operator=(const PackRing&) = delete;

  Lease take() {
    if (free_.empty()) {
      return {};
    }
    // The last one that came back is the one that the cache still has.
    std::vector<std::byte>* buffer = free_.back();
    free_.pop_back();
    return Lease(this, buffer);
  }
  std::size_t free_count() const { return free_.size(); }

 private:
  std::vector<std::vector<std::byte>> buffers_;
  std::vector<std::vector<std::byte>*> free_;
};

}  // namespace kvferry
