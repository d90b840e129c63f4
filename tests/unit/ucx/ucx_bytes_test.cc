#include <catch2/catch.hpp>

#include "tests/unit/ucx/ucx_rig.h"

namespace kvferry::test {
namespace {

void check_case(const NamedOptions& path, const FabricCase& spec) {
  INFO(path.name << ": " << spec.name);
  FabricFixture fixture(spec);
  UcxRig rig(path.options);
  CHECK(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
  CHECK(rig.receive_log.count<fabric_event::Rejected>() == 0);
}

std::uint64_t put_bytes(const FabricFixture& fixture) {
  std::uint64_t bytes = 0;
  for (const auto& pair : fixture.pairs()) {
    for (const auto& job : fixture.jobs(pair)) {
      bytes += job.plan->bytes;
    }
  }
  return bytes;
}

}  // namespace

TEST_CASE("messages over shared memory land every byte of every layout where it belongs") {
  for (const auto& spec : standard_cases()) {
    check_case({"shm", over_shm()}, spec);
  }
}

TEST_CASE("messages over tcp land every byte of every layout where it belongs") {
  for (const auto& spec : standard_cases()) {
    check_case({"tcp", over_tcp()}, spec);
  }
}

TEST_CASE("puts land every byte of every layout where it belongs") {
  for (const auto& spec : standard_cases()) {
    check_case({"puts", by_puts()}, spec);
  }
}

TEST_CASE("rows that do not fit one segment still arrive whole") {
  FabricCase spec;
  spec.name = "wide rows";
  spec.prefill = tp(1);
  spec.decode = tp(1);
  spec.src_page_size = 2;
  spec.dst_page_size = 2;
  spec.pages = 6;
  spec.tokens = 9;
  spec.chunk_tokens = 4;
  for (const auto& path : all_paths()) {
    spec.model = small_mla(1);
    spec.model.latent_dim = 20'000;
    check_case(path, spec);
  }
}

TEST_CASE("strided rows are packed and never put one by one") {
  FabricCase spec = standard_cases()[1];
  spec.tokens = 1000;
  FabricFixture fixture(spec);
  UcxRig rig(by_puts());
  REQUIRE(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
  std::uint64_t runs = 0;
  std::uint64_t rows = 0;
  for (const auto& pair : fixture.pairs()) {
    for (const auto& job : fixture.jobs(pair)) {
      runs += job.plan->runs.size() * job.plan->pairs.size();
      rows += job.plan->rows * job.plan->pairs.size();
    }
  }
  const std::uint64_t slots = put_bytes(fixture) / (by_puts().staging_bytes / 4) + 1;
  const UcxSendStats stats = rig.send->stats();
  INFO("puts " << stats.puts << " packed " << stats.packed_puts << " runs " << runs << " rows " << rows);
  CHECK(stats.packed_puts > 0);
  CHECK(stats.puts <= runs + slots);
  CHECK(stats.puts * 4 < rows);
}

TEST_CASE("contiguous pages are put straight from the pool") {
  FabricFixture fixture(standard_cases()[0]);
  UcxRig rig(by_puts());
  REQUIRE(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
  const UcxSendStats stats = rig.send->stats();
  CHECK(stats.puts > 0);
  CHECK(stats.packed_puts == 0);
}

TEST_CASE("PeerUp names the lanes that UCX really chose") {
  for (const auto& path : all_paths()) {
    FabricFixture fixture(standard_cases()[0]);
    UcxRig rig(path.options);
    REQUIRE(fixture.connect(*rig.send, rig.send_log, *rig.receive) == "");
    const auto up = rig.send_log.all<fabric_event::PeerUp>();
    REQUIRE(up.size() == 1);
    INFO(path.name << ": " << up[0].carries);
    if (path.options.transports == UcxTransports::kTcp) {
      CHECK(up[0].carries == "ucx tcp/lo");
    } else {
      const bool shared = up[0].carries.find("posix/memory") != std::string::npos ||
                          up[0].carries.find("sysv/memory") != std::string::npos;
      CHECK(shared);
      CHECK(up[0].carries.find("tcp") == std::string::npos);
    }
  }
}

}  // namespace kvferry::test
