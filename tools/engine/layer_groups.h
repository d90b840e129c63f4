#pragma once
// Sending a chunk by groups of layers: which layers make a group on one rank, in which order its buffers are
// filled, and the fence that says that a group's rows are there.

#include <cstdint>
#include <vector>

#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "common/plan/plan.h"

namespace kvferry {

/// What kvf_chunk names: global layer ids, end exclusive; both 0 for all layers of the rank.
struct LayerGroup {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  friend bool operator==(const LayerGroup&, const LayerGroup&) = default;
};

/// Groups of `size` layers that have a buffer on the rank (the last one may have fewer), without gaps between
/// them. 0: one group of all layers.
std::vector<LayerGroup> layer_groups(const std::vector<BufferShape>& buffers, std::uint32_t size);

/// The buffers by ascending layer.
std::vector<std::uint32_t> buffers_by_layer(const std::vector<BufferShape>& buffers);

/// An eventfd for kvf_chunk::ready_fd. Opened at the latest when it goes, so that no daemon waits for ever
/// for the fence of a room that has ended.
class ReadyFence {
 public:
  static Result<ReadyFence> create();
  ReadyFence(ReadyFence&&) noexcept = default;
  ReadyFence& operator=(ReadyFence&&) = delete;
  ~ReadyFence() { open(); }
  void open();
  int fd() const { return fd_.get(); }

 private:
  explicit ReadyFence(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace kvferry
