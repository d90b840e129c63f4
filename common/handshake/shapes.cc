#include "common/handshake/shapes.h"

#include "common/base/narrow.h"

namespace kvferry {

RankShape rank_shape(const Descriptor& side, const RankDescription& rank) {
  RankShape out{.topology = side.topology, .coord = rank.coord, .page_size = side.page_size, .buffers = {}};
  out.buffers.reserve(rank.buffers.size());
  for (const BufferDescription& buffer : rank.buffers) {
    const std::uint32_t rows =
        rows_of_page(side.geometry.row_space({buffer.layer, buffer.kind}), side.page_size, side.topology);
    out.buffers.push_back(BufferShape{.layer = buffer.layer,
                                      .kind = buffer.kind,
                                      .row_bytes = narrow<std::uint32_t>(buffer.item_len / rows),
                                      .pages = buffer.pages,
                                      .page_rows = rows});
  }
  return out;
}

}  // namespace kvferry
