#pragma once
// The bounded, registered ring that strided rows are packed into before a put. Fixed at start; a put that
// finds no free slot waits. Small on purpose: packed bytes must still be in the L2 cache when they are sent.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "common/base/result.h"
#include "transport/ucx/memory.h"
#include "transport/ucx/put_limits.h"

namespace kvferry::ucx {

class Staging {
 public:
  static Result<std::unique_ptr<Staging>> make(const Progress& progress, std::uint32_t bytes);

  std::uint64_t slot_bytes() const { return slot_bytes_; }
  /// The most that was in use at one time.
  std::uint64_t peak_bytes() const { return slot_bytes_ * peak_.load(std::memory_order_relaxed); }
  /// Slot number, or -1 when all are in use.
  int take();
  void release(int slot);
  std::span<std::byte> slot(int index);
  ucp_mem* handle() const { return registration_->handle(); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  Staging() = default;

  std::unique_ptr<std::byte, Free> memory_;
  std::unique_ptr<Registration> registration_;
  std::uint64_t slot_bytes_ = 0;
  std::vector<int> free_;
  std::atomic<std::uint64_t> peak_{0};  // slots; written by the fabric's thread, read by anybody
};

}  // namespace kvferry::ucx
