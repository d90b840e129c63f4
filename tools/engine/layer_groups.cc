#include "tools/engine/layer_groups.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>

namespace kvferry {

std::vector<LayerGroup> layer_groups(const std::vector<BufferShape>& buffers, std::uint32_t size) {
  std::vector<std::uint32_t> layers;
  layers.reserve(buffers.size());
  for (const BufferShape& shape : buffers) {
    layers.push_back(shape.layer);
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  if (size == 0 || layers.empty()) {
    return {LayerGroup{}};
  }
  std::vector<LayerGroup> groups;
  std::uint32_t begin = layers.front();
  for (std::size_t at = 0; at < layers.size(); at += size) {
    const std::uint32_t end = layers[std::min(at + size, layers.size()) - 1] + 1;
    groups.push_back({begin, end});
    begin = end;
  }
  return groups;
}

std::vector<std::uint32_t> buffers_by_layer(const std::vector<BufferShape>& buffers) {
  std::vector<std::uint32_t> order(buffers.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return buffers[a].layer < buffers[b].layer; });
  return order;
}

Result<ReadyFence> ReadyFence::create() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) {
    return fail(errno_error("eventfd", errno));
  }
  return ReadyFence(std::move(fd));
}

void ReadyFence::open() {
  if (fd_) {
    (void)::eventfd_write(fd_.get(), 1);
  }
}

}  // namespace kvferry
