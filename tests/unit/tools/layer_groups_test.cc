// Groups of the layers that a rank has, and the order in which its buffers are filled.
#include <catch2/catch.hpp>

#include "tools/engine/layer_groups.h"

namespace kvferry {
namespace {

using Groups = std::vector<LayerGroup>;

std::vector<BufferShape> buffers_of(const std::vector<std::uint32_t>& layers) {
  std::vector<BufferShape> out;
  for (const BufferKind kind : {BufferKind::kKey, BufferKind::kValue}) {
    for (const std::uint32_t layer : layers) {
      out.push_back({layer, kind, 16, 4});
    }
  }
  return out;
}

}  // namespace

TEST_CASE("layer groups ascend without gaps, and each holds so many layers of the rank") {
  CHECK(layer_groups(buffers_of({0, 1, 2, 3, 4}), 2) == Groups{{0, 2}, {2, 4}, {4, 5}});
  CHECK(layer_groups(buffers_of({30, 31, 32}), 2) == Groups{{30, 32}, {32, 33}});
  CHECK(layer_groups(buffers_of({2, 5, 9, 61}), 3) == Groups{{2, 10}, {10, 62}});
  CHECK(layer_groups(buffers_of({0, 1}), 7) == Groups{{0, 2}});
  CHECK(layer_groups(buffers_of({0, 1}), 0) == Groups{{0, 0}});
}

TEST_CASE("buffers are filled by ascending layer") {
  CHECK(buffers_by_layer(buffers_of({4, 1})) == std::vector<std::uint32_t>{1, 3, 0, 2});
}

}  // namespace kvferry
