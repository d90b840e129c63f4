// No write per row, by what the fabric itself reports, whatever is strided.
#include "tests/support/write_bound.h"
#include "tests/unit/fabric/tcp_support.h"

namespace kvferry::test {

TEST_CASE("tcp blocks are counted by bytes, never by rows, whatever is strided") {
  for (const FabricCase& spec : many_rows()) {
    INFO(spec.name << " page " << spec.dst_page_size << " chunk " << spec.chunk_tokens);
    FabricFixture fixture(spec);
    TcpEnds ends;
    REQUIRE(fixture.run(*ends.send, ends.send_log, *ends.receive, ends.receive_log) == "");
    const CutLimits limits;
    CHECK(excess_writes(fixture, ends.send_log, {limits.payload_bytes_max, limits.spans_max}) == "");
  }
}

}  // namespace kvferry::test
