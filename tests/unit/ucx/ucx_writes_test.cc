// Two promises, by the fabric's own counters: no write per row, whatever is strided; and staging that stays
// within the configured ring, whatever the prompt and the chunk.
#include <catch2/catch.hpp>

#include "tests/support/write_bound.h"
#include "tests/unit/ucx/ucx_rig.h"
#include "transport/ucx/put_limits.h"
#include "transport/ucx/settings.h"

namespace kvferry::test {

TEST_CASE("ucx messages are counted by bytes, never by rows, whatever is strided") {
  for (const NamedOptions& path : {NamedOptions{"shm", over_shm()}, NamedOptions{"tcp", over_tcp()}}) {
    for (const FabricCase& spec : many_rows()) {
      INFO(path.name << ": " << spec.name << " page " << spec.dst_page_size << " chunk "
                     << spec.chunk_tokens);
      FabricFixture fixture(spec);
      UcxRig rig(path.options);
      REQUIRE(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
      CHECK(excess_writes(fixture, rig.send_log, {ucx::payload_max(path.options), 128}) == "");
      CHECK(rig.send->stats().staging_peak_bytes == 0);
    }
  }
}

TEST_CASE("puts are counted by bytes, never by rows, and pack within the ring, whatever is strided") {
  for (const std::uint32_t ring : {64u << 10, 1u << 20}) {
    UcxOptions options = by_puts();
    options.staging_bytes = ring;
    std::uint64_t packed = 0;
    for (const FabricCase& spec : many_rows()) {
      INFO(spec.name << " page " << spec.dst_page_size << " chunk " << spec.chunk_tokens << " ring " << ring);
      FabricFixture fixture(spec);
      UcxRig rig(options);
      REQUIRE(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
      CHECK(excess_writes(fixture, rig.send_log, {ucx::kPutModeBlocks.payload_bytes_max, 128}) == "");
      const UcxSendStats stats = rig.send->stats();
      CHECK(stats.staging_peak_bytes <= ring);
      CHECK((stats.packed_puts > 0) == (stats.staging_peak_bytes > 0));
      packed += stats.packed_puts;
    }
    CHECK(packed > 0);
  }
}

// Many transfers at once want the ring at the same time; it gets full and no larger.
TEST_CASE("eight transfers at once fill the staging ring and do not exceed it") {
  FabricCase spec = many_rows()[5];  // DCP 1 -> 4, pages of 128, one chunk
  spec.decode = tp(8, 8);
  FabricFixture fixture(spec);
  UcxRig rig(by_puts());
  REQUIRE(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
  const UcxSendStats stats = rig.send->stats();
  CHECK(stats.packed_puts > 8);
  CHECK(stats.staging_peak_bytes > 0);
  CHECK(stats.staging_peak_bytes <= by_puts().staging_bytes);
}

}  // namespace kvferry::test
