#include "common/bootstrap/registry.h"

#include <catch2/catch.hpp>

using namespace kvferry;
using Catch::Contains;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

RegistryOptions options() {
  RegistryOptions out;
  out.lease_ns = 30 * kSecond;
  out.room_interval_ns = 120 * kSecond;
  out.rooms_max = 4;
  out.ranks_max = 64;
  return out;
}

RouteRegistration tp_rank(std::uint32_t rank, std::uint32_t size, std::uint16_t port) {
  RouteRegistration out;
  out.attn_tp_size = size;
  out.attn_tp_rank = rank;
  out.rank_ip = "10.0.0.1";
  out.rank_port = port;
  out.page_size = 64;
  out.kv_cache_dtype = "auto";
  return out;
}

RouteRegistration system_dp_rank(std::uint32_t rank, std::uint32_t size, std::uint16_t port) {
  RouteRegistration out = tp_rank(0, 1, port);
  out.system_dp_size = size;
  out.system_dp_rank = rank;
  return out;
}

void put(Registry& registry, const RouteRegistration& registration, std::int64_t now = 0) {
  const auto result = registry.put_route(registration, now);
  INFO((result ? "" : result.error().message));
  REQUIRE(result.has_value());
}

Error refused(Registry& registry, const RouteRegistration& registration, std::int64_t now = 0) {
  const auto result = registry.put_route(registration, now);
  REQUIRE_FALSE(result.has_value());
  return result.error();
}

}  // namespace

TEST_CASE("a rank that registers twice is counted once") {
  Registry registry(options());
  put(registry, tp_rank(0, 2, 7000));
  put(registry, tp_rank(0, 2, 7000));
  CHECK(registry.registered() == 1);
  CHECK_FALSE(registry.ready());
  put(registry, tp_rank(1, 2, 7001));
  CHECK(registry.ready());
  CHECK(registry.rank({0, 0, 1, 0})->port == 7001);
}

TEST_CASE("system DP ranks take their own places and a third claimant is refused") {
  // Seen in the field: two processes that both called themselves DP rank 0 shared one place.
  Registry registry(options());
  put(registry, system_dp_rank(0, 2, 7000));
  put(registry, system_dp_rank(1, 2, 7001));
  CHECK(registry.ready());
  CHECK(registry.topology()->dp_size == 2);
  CHECK(registry.rank({0, 0, 0, 0})->port == 7000);
  CHECK(registry.rank({1, 0, 0, 0})->port == 7001);

  RouteRegistration third = system_dp_rank(1, 2, 7001);
  third.rank_ip = "10.0.0.9";
  const Error error = refused(registry, third, 10 * kSecond);
  CHECK(error.code == Code::kConflict);
  CHECK_THAT(error.message,
             Contains("held by 10.0.0.1:7001") && Contains("10.0.0.9:7001") && Contains("DP rank"));
  CHECK(registry.rank({1, 0, 0, 0})->ip == "10.0.0.1");
}

TEST_CASE("an occupied place changes hands after the lease or when its holder is gone") {
  Registry registry(options());
  put(registry, tp_rank(0, 1, 7000), kSecond);
  CHECK(refused(registry, tp_rank(0, 1, 7009), 31 * kSecond).code == Code::kConflict);

  SECTION("the lease is over") {
    const auto result = registry.put_route(tp_rank(0, 1, 7009), 31 * kSecond + 1);
    REQUIRE(result.has_value());
    CHECK(result->replaced);
    CHECK(registry.rank({})->port == 7009);
  }
  SECTION("a refresh renews the lease, and does not shorten it") {
    registry.refresh({"10.0.0.1", 7000}, 20 * kSecond);
    registry.refresh({"10.0.0.1", 7000}, 2 * kSecond);
    registry.refresh({"10.0.0.1", 7001}, 60 * kSecond);
    CHECK(refused(registry, tp_rank(0, 1, 7009), 50 * kSecond).code == Code::kConflict);
    put(registry, tp_rank(0, 1, 7009), 50 * kSecond + 1);
  }
  SECTION("a repeated registration renews the lease") {
    put(registry, tp_rank(0, 1, 7000), 25 * kSecond);
    CHECK(refused(registry, tp_rank(0, 1, 7009), 55 * kSecond).code == Code::kConflict);
  }
  SECTION("the holder is gone") {
    CHECK(registry.mark_gone({"10.0.0.1", 7001}) == 0);
    CHECK(registry.mark_gone({"10.0.0.1", 7000}) == 1);
    put(registry, tp_rank(0, 1, 7009), 2 * kSecond);
    CHECK(registry.rank({})->port == 7009);
  }
  SECTION("a clock that goes backwards frees nothing") {
    CHECK(refused(registry, tp_rank(0, 1, 7009), INT64_MIN).code == Code::kConflict);
  }
}

TEST_CASE("a place that is never refreshed still counts and answers") {
  Registry registry(options());
  put(registry, tp_rank(0, 2, 7000), 0);
  put(registry, tp_rank(1, 2, 7001), 100'000 * kSecond);
  CHECK(registry.ready());
  CHECK(registry.rank({0, 0, 0, 0}).has_value());
}

TEST_CASE("the table is not ready again until a lost rank is back") {
  Registry registry(options());
  put(registry, tp_rank(0, 2, 7000));
  put(registry, tp_rank(1, 2, 7001));
  registry.mark_gone({"10.0.0.1", 7000});
  CHECK_FALSE(registry.ready());
  const auto lost = registry.rank({0, 0, 0, 0});
  REQUIRE_FALSE(lost.has_value());
  CHECK(lost.error().code == Code::kNotFound);
  put(registry, tp_rank(0, 2, 7100));
  CHECK(registry.ready());
}

TEST_CASE("every attribute is that of the first rank, and later differences are reported") {
  Registry registry(options());
  put(registry, tp_rank(0, 2, 7000));
  RouteRegistration second = tp_rank(1, 2, 7001);
  second.page_size = 128;
  second.kv_cache_dtype = std::nullopt;
  second.load_balance_method = "round_robin";
  second.enable_dsa_cache_layer_split = true;
  second.prefill_http_port = 30000;
  const auto result = registry.put_route(second, 1);
  REQUIRE(result.has_value());
  CHECK(result->kept_first == std::vector<std::string>{"page_size", "kv_cache_dtype", "load_balance_method",
                                                       "enable_dsa_cache_layer_split", "prefill_http_port"});
  CHECK(*registry.topology() == RouteTopology{2, 1, 1, 1, 64, "auto", true, false, std::nullopt});
}

TEST_CASE("a rank outside the first rank's table is refused with both sizes") {
  Registry registry(options());
  put(registry, tp_rank(0, 2, 7000));
  const Error error = refused(registry, tp_rank(3, 4, 7003));
  CHECK(error.code == Code::kConflict);
  CHECK_THAT(error.message, Contains("rank dp 0 cp 0 tp 3 pp 0") && Contains("dp 1 cp 1 tp 2 pp 1"));
}

TEST_CASE("a restarted fleet may have another layout") {
  Registry registry(options());
  put(registry, tp_rank(0, 2, 7000), 0);
  put(registry, tp_rank(1, 2, 7001), 0);
  SECTION("after every old rank is gone") {
    registry.mark_gone({"10.0.0.1", 7000});
    registry.mark_gone({"10.0.0.1", 7001});
    CHECK_FALSE(registry.topology().has_value());
    CHECK(registry.expected() == 0);
    put(registry, tp_rank(3, 4, 8000), kSecond);
  }
  SECTION("after the lease of every old rank") {
    CHECK(refused(registry, tp_rank(3, 4, 8000), 30 * kSecond).code == Code::kConflict);
    put(registry, tp_rank(3, 4, 8000), 30 * kSecond + 1);
  }
  CHECK(registry.topology()->attn_tp_size == 4);
  CHECK(registry.registered() == 1);
}

TEST_CASE("a registration that cannot be right is refused by field") {
  Registry registry(options());
  CHECK_THAT(refused(registry, tp_rank(2, 2, 7000)).message,
             Contains("attn_tp_rank 2 is not below attn_tp_size 2"));
  CHECK_THAT(refused(registry, system_dp_rank(2, 2, 7000)).message, Contains("system_dp_rank 2"));
  CHECK_THAT(refused(registry, tp_rank(0, 65, 7000)).message, Contains("more than the 64 ranks allowed"));
  CHECK_THAT(refused(registry, tp_rank(0, 1, 0)).message, Contains("rank_port 0"));
  RouteRegistration huge = tp_rank(0, 65536, 7000);
  huge.attn_cp_size = huge.attn_dp_size = huge.pp_size = UINT32_MAX;
  CHECK(refused(registry, huge).code == Code::kInvalid);
  for (const char* address : {"", "10.0.0.1:80", "[::1]:80", "a b", "[::1", "http://x", "a/b"}) {
    RouteRegistration bad = tp_rank(0, 1, 7000);
    bad.rank_ip = address;
    CAPTURE(address);
    CHECK_THAT(refused(registry, bad).message, Contains("rank_ip"));
  }
  CHECK(registry.registered() == 0);
  CHECK_FALSE(registry.topology().has_value());
}

TEST_CASE("addresses of every family are kept as they came") {
  for (const char* address : {"10.0.0.1", "2001:db8:cd51:4600:9c7d:e2a3:a136:efc", "::1", "[2001:db8::5]",
                              "fe80::1%lo", "prefill-0.example"}) {
    Registry registry(options());
    RouteRegistration registration = tp_rank(0, 1, 7000);
    registration.rank_ip = address;
    put(registry, registration);
    CHECK(registry.rank({})->ip == address);
  }
}

TEST_CASE("a room's DP rank lives one to two intervals") {
  Registry registry(options());
  REQUIRE(registry.register_dp_rank(7, 3, 0).has_value());
  REQUIRE(registry.register_dp_rank(kRoomMax, 1, 100 * kSecond).has_value());
  using Ranks = std::vector<std::pair<Room, std::uint32_t>>;
  CHECK(registry.query_dp_ranks({kRoomMax, 8, 7, 7}, 120 * kSecond) == Ranks{{kRoomMax, 1}, {7, 3}});
  CHECK(registry.query_dp_ranks({7, kRoomMax}, 121 * kSecond) == Ranks{{kRoomMax, 1}});
  CHECK(registry.query_dp_ranks({kRoomMax}, 240 * kSecond) == Ranks{{kRoomMax, 1}});
  CHECK(registry.query_dp_ranks({kRoomMax}, 242 * kSecond).empty());
  CHECK(registry.rooms() == 0);
}

TEST_CASE("a full room table refuses new rooms, keeps the old ones, and takes new ones when they expire") {
  Registry registry(options());
  for (Room room = 1; room <= 4; ++room) {
    REQUIRE(registry.register_dp_rank(room, 0, static_cast<std::int64_t>(room)).has_value());
  }
  const auto full = registry.register_dp_rank(5, 0, 119 * kSecond);
  REQUIRE_FALSE(full.has_value());
  CHECK(full.error().code == Code::kExhausted);
  CHECK_THAT(full.error().message, Contains("4 of 4 rooms"));
  CHECK(registry.query_dp_ranks({1, 2, 3, 4, 5}, 119 * kSecond).size() == 4);
  CHECK(registry.register_dp_rank(2, 9, 119 * kSecond).has_value());
  CHECK(registry.register_dp_rank(5, 0, 121 * kSecond).has_value());
  CHECK(registry.query_dp_ranks({2, 1}, 121 * kSecond) ==
        std::vector<std::pair<Room, std::uint32_t>>{{2, 9}});
}

TEST_CASE("a room beyond 63 bits and a DP rank outside the table are refused") {
  Registry registry(options());
  CHECK_FALSE(registry.register_dp_rank(kRoomMax + 1, 0, 0).has_value());
  CHECK(registry.register_dp_rank(1, 7, 0).has_value());
  put(registry, system_dp_rank(0, 2, 7000));
  CHECK_THAT(registry.register_dp_rank(1, 2, 0).error().message,
             Contains("dp_rank 2 is not below dp_size 2"));
}
