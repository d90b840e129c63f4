#include "common/handshake/shapes.h"

#include "common/base/narrow.h"

namespace kvferry {

RankShape rank_shape(const Descriptor& side, const RankDescription& rank) {
  RankShape out{.topology = side.topology, .coord = rank.coord, .page_size = side.page_size, .buffers = {}};
  out.buffers.reserve(rank.buffers.size());
  for (const BufferDescription& buffer : rank.buffers) {
    out.buffers.push_back(BufferShape{.layer = buffer.layer,
                                      .kind = buffer.kind,
                                      .row_bytes = narrow<std::uint32_t>(buffer.item_len / side.page_size),
                                      .pages = buffer.pages});
  }
  return out;
}

}  // namespace kvferry
