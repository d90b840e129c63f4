#include "tests/support/write_bound.h"

#include <fmt/format.h>

namespace kvferry::test {

std::vector<FabricCase> many_rows() {
  ModelGeometry mla = small_mla(2);
  mla.latent_dim = 24;
  mla.rope_dim = 8;
  ModelGeometry gqa = small_gqa(8, 2);
  gqa.head_dim = gqa.v_head_dim = 8;
  std::vector<FabricCase> layouts(6);
  layouts[0] = FabricCase{"DCP 1 -> 4", mla, tp(1), tp(4, 4)};
  layouts[1] = FabricCase{"DCP 4 -> 1", mla, tp(4, 4), tp(1)};
  layouts[2] = FabricCase{"DCP 2 -> 8", mla, tp(2, 2), tp(8, 8)};
  layouts[3] = FabricCase{"DCP 4 -> 2", mla, tp(4, 4), tp(2, 2)};
  layouts[4] = FabricCase{"GQA TP2 -> TP8", gqa, tp(2), tp(8)};
  layouts[5] = FabricCase{"GQA TP8 -> TP2", gqa, tp(8), tp(2)};
  std::vector<FabricCase> cases;
  for (FabricCase spec : layouts) {
    for (const std::uint32_t page : {32u, 128u}) {
      for (const std::uint64_t chunk : {1024u, 4096u, 1u << 20}) {
        spec.src_page_size = spec.dst_page_size = page;
        spec.tokens = 8000;
        spec.prefix = chunk == 4096 ? 1024 : 0;
        spec.chunk_tokens = chunk;
        spec.pages = spec.tokens / page + 8;
        cases.push_back(spec);
      }
    }
  }
  return cases;
}

std::string excess_writes(const FabricFixture& fixture, const EventLog& log, const WriteSize& size) {
  std::uint64_t allowed = 0;
  std::uint64_t rows = 0;
  for (const auto& pair : fixture.pairs()) {
    for (const ChunkJob& job : fixture.jobs(pair)) {
      const std::uint64_t pairs = job.plan->pairs.size();
      const std::uint64_t pages = job.plan->rows / fixture.spec().dst_page_size + 2;
      allowed += 2 * job.plan->bytes / size.bytes + pairs * (job.plan->rows / size.spans + 2 * pages + 2) +
                 job.aux.size();
      rows += pairs * job.plan->rows;
    }
  }
  std::uint64_t writes = 0;
  for (const auto& done : log.all<fabric_event::ChunkDone>()) {
    writes += done.writes;
  }
  if (writes > 0 && writes <= allowed && writes * 6 <= rows) {
    return {};
  }
  return fmt::format("{} writes for {} rows, {} allowed", writes, rows, allowed);
}

}  // namespace kvferry::test
