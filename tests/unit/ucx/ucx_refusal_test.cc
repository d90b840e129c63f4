#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/unit/ucx/ucx_rig.h"
#include "transport/ucx/lanes.h"
#include "transport/ucx/settings.h"
#include "transport/ucx/wire.h"

namespace kvferry::test {
namespace {

FabricSink no_sink() {
  return [](FabricEvent&&) {};
}

std::string down_text(const EventLog& log) {
  const auto down = log.all<fabric_event::PeerDown>();
  return down.size() == 1 ? down[0].error.message : fmt::format("{} PeerDown events", down.size());
}

/// What connect() answers to an offer that was changed on the way.
std::string refused_with(const UcxOptions& options, const std::function<void(nlohmann::json&)>& change) {
  UcxRig rig(options);
  auto offer = take(rig.receive->offer(kPeer));
  auto json = nlohmann::json::parse(offer.json);
  change(json);
  offer.json = json.dump();
  rig.send->connect(kPeer, offer);
  if (!rig.send_log.wait_for<fabric_event::PeerDown>()) {
    return "no PeerDown";
  }
  return down_text(rig.send_log);
}

}  // namespace

TEST_CASE("rdma transports without an RDMA device are refused at start by name of the reason") {
  if (rdma_devices().has_value()) {
    WARN("this host has RDMA devices; the refusal cannot be seen here");
    return;
  }
  UcxOptions options;
  options.transports = UcxTransports::kRdma;
  const auto send = UcxSendFabric::create(options, no_sink());
  const auto receive = UcxReceiveFabric::create(options, no_sink());
  REQUIRE_FALSE(send.has_value());
  REQUIRE_FALSE(receive.has_value());
  CHECK(send.error().code == Code::kUnavailable);
  CHECK_THAT(send.error().message, Catch::Contains("no RDMA device"));
}

TEST_CASE("options out of range are refused together in one message") {
  UcxOptions options;
  options.transports = UcxTransports::kTcp;
  options.device = "all";
  options.staging_bytes = 4u << 20;
  options.port_range = "30000";
  options.window = 5000;
  options.allow_emulated_puts = true;
  const auto result = validate(options);
  REQUIRE_FALSE(result.has_value());
  for (const char* word : {"staging_bytes 4194304", "port_range '30000'", "window 5000", "device 'all'",
                           "allow_emulated_puts"}) {
    CHECK_THAT(result.error().message, Catch::Contains(word));
  }
  CHECK(validate(over_tcp()).has_value());
  CHECK(validate(over_shm()).has_value());
}

TEST_CASE("a tcp device that does not exist is refused at start") {
  UcxOptions options = over_tcp();
  options.device = "nosuch0";
  CHECK_FALSE(UcxReceiveFabric::create(options, no_sink()).has_value());
}

TEST_CASE("a port range is obeyed") {
  UcxOptions options = over_tcp();
  options.port_range = "31000-31999";
  FabricFixture fixture(standard_cases()[0]);
  UcxRig rig(options);
  CHECK(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
}

TEST_CASE("an offer of other transports is refused with both values") {
  UcxRig rig(over_tcp(), over_shm());
  rig.send->connect(kPeer, take(rig.receive->offer(kPeer)));
  REQUIRE(rig.send_log.wait_for<fabric_event::PeerDown>());
  CHECK_THAT(down_text(rig.send_log), Catch::Contains("transports tcp") && Catch::Contains("shm"));
}

TEST_CASE("a damaged offer never reaches UCX's own parsers") {
  const UcxOptions options = over_shm();
  const auto damage_address = [](nlohmann::json& json) {
    auto address = json["address"].get<std::string>();
    address[10] = address[10] == '0' ? '1' : '0';
    json["address"] = address;
  };
  CHECK_THAT(refused_with(options, damage_address), Catch::Contains("checksum"));
  CHECK_THAT(refused_with(options, [](auto& json) { json["address"] = ""; }), Catch::Contains("address"));
  CHECK_THAT(refused_with(options, [](auto& json) { json["address"] = "xyz"; }), Catch::Contains("address"));
  CHECK_THAT(refused_with(options, [](auto& json) { json["token"] = "00"; }), Catch::Contains("token"));
  CHECK_THAT(refused_with(options, [](auto& json) { json["ucx"] = "9.9.9"; }), Catch::Contains("9.9.9"));
  CHECK_THAT(refused_with(options, [](auto& json) { json["version"] = 2; }), Catch::Contains("version 2"));
  CHECK_THAT(refused_with(options, [](auto& json) { json = 7; }), Catch::Contains("not a JSON object"));
}

TEST_CASE("a wrong token connects to nothing and the right one still works") {
  for (const auto& path : all_paths()) {
    INFO(path.name);
    UcxOptions impatient = path.options;
    impatient.connect_timeout_ms = 300;
    FabricFixture fixture(standard_cases()[0]);
    UcxRig rig(path.options);
    EventLog stranger_log;
    const auto stranger = take(UcxSendFabric::create(impatient, stranger_log.sink()));
    auto offer = take(rig.receive->offer(kPeer));
    auto json = nlohmann::json::parse(offer.json);
    json["token"] = std::string(32, '0');
    stranger->connect(kPeer, FabricOffer{FabricKind::kUcx, json.dump()});
    stranger->post(kPeer, fixture.jobs(fixture.pairs()[0])[0]);
    REQUIRE(stranger_log.wait_for<fabric_event::PeerDown>());
    CHECK(stranger_log.count<fabric_event::PeerUp>() == 0);
    const auto rejected = rig.receive_log.all<fabric_event::Rejected>();
    REQUIRE(rejected.size() == 1);
    CHECK(rejected[0].peer == 0);
    CHECK(rejected[0].error.code == Code::kUnauthorized);
    CHECK(fixture.run(*rig.send, rig.send_log, *rig.receive, rig.receive_log) == "");
  }
}

TEST_CASE("a token is good for one connection") {
  UcxOptions impatient = over_shm();
  impatient.connect_timeout_ms = 300;
  UcxRig rig(over_shm());
  const auto offer = take(rig.receive->offer(kPeer));
  rig.send->connect(kPeer, offer);
  REQUIRE(rig.send_log.wait_for<fabric_event::PeerUp>());
  EventLog second_log;
  const auto second = take(UcxSendFabric::create(impatient, second_log.sink()));
  second->connect(kPeer, offer);
  REQUIRE(second_log.wait_for<fabric_event::PeerDown>());
  CHECK(second_log.count<fabric_event::PeerUp>() == 0);
  CHECK(rig.send_log.count<fabric_event::PeerDown>() == 0);
}

TEST_CASE("a pool description that lies about its region is refused") {
  ucx::RemotePool pool;
  pool.regions.push_back({4096, 1000, {std::byte{1}, std::byte{2}}});
  pool.buffers.push_back({0, 4096, 10, 100});
  REQUIRE(ucx::decode_pool(ucx::encode_pool(pool)).has_value());
  const auto refused = [](ucx::RemotePool changed) {
    return !ucx::decode_pool(ucx::encode_pool(changed)).has_value();
  };
  auto changed = pool;
  changed.buffers[0].rows = 11;
  CHECK(refused(changed));
  changed = pool;
  changed.buffers[0].base = 4095;
  CHECK(refused(changed));
  changed = pool;
  changed.buffers[0].rows = UINT64_MAX / 50;
  CHECK(refused(changed));
  changed = pool;
  changed.buffers[0].region = 1;
  CHECK(refused(changed));
  changed = pool;
  changed.regions[0].base = UINT64_MAX - 10;
  CHECK(refused(changed));
  auto json = nlohmann::json::parse(ucx::encode_pool(pool));
  json["regions"][0]["key"] = "0103";
  const auto damaged = ucx::decode_pool(json.dump());
  REQUIRE_FALSE(damaged.has_value());
  CHECK(damaged.error().code == Code::kCorrupt);
}

TEST_CASE("only puts over an RDMA lane count as one-sided") {
  const auto native = [](const char* lanes) { return ucx::puts_are_native(ucx::parse_lanes(lanes)); };
  CHECK(
      native("# lane[0]:  2:rc_mlx5/mlx5_0:1.0 md[3]  -> md[3]/ib/sysdev[255] rma_bw#0 am am_bw#0 rma#0\n"));
  CHECK_FALSE(native("# lane[0]:  0:tcp/lo.0 md[0]  -> md[0]/tcp/sysdev[255] am am_bw#0 keepalive wireup\n"));
  CHECK_FALSE(native("# lane[0]:  0:sysv/memory.0 md[0]  -> md[0]/sysv/sysdev[255] am rma_bw#0 keepalive\n"));
  CHECK_FALSE(native("# lane[0]:  0:posix/memory.0 md[0]  -> md[0]/posix/sysdev[255] am rma#0\n"));
  CHECK_FALSE(native(""));
}

TEST_CASE("segments on shared memory stay below what UCX's 16-bit lengths hold") {
  for (const unsigned version : {113u, 122u}) {
    for (const auto& [name, value] : ucx::settings(over_shm(), version)) {
      if (name.find("SEG_SIZE") != std::string::npos) {
        CHECK(std::stoul(value) == 32768);
      }
    }
  }
  CHECK(ucx::am_header_limit(over_shm()) < 65536);
}

}  // namespace kvferry::test
