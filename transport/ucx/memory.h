#pragma once
// Memory that UCX knows: registered once, used by many puts. Worker's thread only; must be gone before the
// context is.

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "common/pool/pool.h"
#include "transport/ucx/progress.h"

struct ucp_mem;

namespace kvferry::ucx {

class Registration {
 public:
  /// `memory` stays mapped for longer than the Registration.
  static Result<std::unique_ptr<Registration>> map(const Progress& progress, std::span<std::byte> memory);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  /// What a peer needs to write here.
  Result<std::vector<std::byte>> key() const;
  ucp_mem* handle() const { return handle_; }
  std::span<std::byte> memory() const { return memory_; }

 private:
  Registration(const Progress& progress, std::span<std::byte> memory)
      : progress_(progress), memory_(memory) {}

  const Progress& progress_;
  std::span<std::byte> memory_;
  ucp_mem* handle_ = nullptr;
};

/// The registrations of one pool's buffers, one per descriptor.
struct PoolRegistration {
  std::shared_ptr<const Pool> pool;
  std::vector<std::unique_ptr<Registration>> regions;

  static Result<std::unique_ptr<PoolRegistration>> map(const Progress& progress,
                                                       std::shared_ptr<const Pool> pool);
  /// Index of the region that holds `address`.
  std::uint32_t region_of(const std::byte* address) const;
};

}  // namespace kvferry::ucx
