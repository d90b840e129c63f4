#include "transport/ucx/staging.h"

#include <cstdlib>
#include <cstring>

#include "common/base/check.h"

namespace kvferry::ucx {

Result<std::unique_ptr<Staging>> Staging::make(const Progress& progress, std::uint32_t bytes) {
  std::unique_ptr<Staging> staging(new Staging());
  staging->slot_bytes_ = staging_slot_bytes(bytes);
  const std::size_t total = staging->slot_bytes_ * kStagingSlots;
  staging->memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kStagingAlignment, total)));
  if (!staging->memory_) {
    return fail(Code::kExhausted, "ucx: no memory for {} bytes of staging", total);
  }
  std::memset(staging->memory_.get(), 0, total);
  KVF_TRY(staging->registration_, Registration::map(progress, {staging->memory_.get(), total}));
  for (int i = 0; i < static_cast<int>(kStagingSlots); ++i) {
    staging->free_.push_back(i);
  }
  return staging;
}

int Staging::take() {
  if (free_.empty()) {
    return -1;
  }
  const int slot = free_.back();
  free_.pop_back();
  const std::uint64_t used = kStagingSlots - free_.size();
  if (used > peak_.load(std::memory_order_relaxed)) {
    peak_.store(used, std::memory_order_relaxed);
  }
  return slot;
}

void Staging::release(int slot) {
  KVF_CHECK(free_.size() < kStagingSlots);
  free_.push_back(slot);
}

std::span<std::byte> Staging::slot(int index) {
  return {memory_.get() + static_cast<std::size_t>(index) * slot_bytes_, slot_bytes_};
}

}  // namespace kvferry::ucx
