#include "common/bootstrap/routes.h"

#include <catch2/catch.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "samples.h"

using namespace kvferry;
using Catch::Contains;
using nlohmann::json;

namespace {

struct Server {
  Registry registry{RegistryOptions{}};
  BootstrapRoutes routes{registry};

  BootstrapResponse call(std::string_view method, std::string_view path, std::string_view body = "",
                         const BootstrapRoutes::Query& query = {}) {
    const auto response = routes.handle(method, path, query, body, 0);
    REQUIRE(response.has_value());
    return *response;
  }
  BootstrapResponse get(const char* dp, const char* cp, const char* tp, const char* pp) {
    return call(
        "GET", "/route", "",
        {{"prefill_dp_rank", dp}, {"prefill_cp_rank", cp}, {"target_tp_rank", tp}, {"target_pp_rank", pp}});
  }
};

json registration() {
  return {{"attn_tp_size", 1},   {"attn_tp_rank", 0},       {"attn_cp_size", 1},     {"attn_cp_rank", 0},
          {"attn_dp_size", 1},   {"attn_dp_rank", 0},       {"pp_size", 1},          {"pp_rank", 0},
          {"system_dp_size", 1}, {"system_dp_rank", 0},     {"rank_ip", "10.0.0.1"}, {"rank_port", 45001},
          {"page_size", 64},     {"kv_cache_dtype", "auto"}};
}

void check_4xx(const BootstrapResponse& response) {
  INFO(response.body);
  CHECK(response.status >= 400);
  CHECK(response.status < 500);
  CHECK_FALSE(response.body.empty());
}

}  // namespace

TEST_CASE("the topology answer is exactly the documented JSON") {
  Server server;
  json body = registration();
  body["load_balance_method"] = "round_robin";
  body["prefill_http_port"] = 30000;
  body["enable_dsa_cache_layer_split"] = true;
  body["dcp_size"] = 1;  // a newer engine's key
  const BootstrapResponse put = server.call("PUT", "/route", body.dump());
  CHECK(put.status == 200);
  CHECK(put.body == "OK");
  CHECK(put.content_type == "text/plain; charset=utf-8");
  const BootstrapResponse topology = server.get("-1", "-1", "-1", "-1");
  CHECK(topology.status == 200);
  CHECK(topology.content_type == "application/json; charset=utf-8");
  CHECK(
      topology.body ==
      R"({"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,"kv_cache_dtype":"auto",)"
      R"("follow_bootstrap_room":false,"enable_dsa_cache_layer_split":true,"prefill_http_port":30000})");
}

TEST_CASE("absent optional values are null or their default in the topology answer") {
  Server server;
  json body = registration();
  body["kv_cache_dtype"] = nullptr;
  body["prefill_http_port"] = nullptr;
  REQUIRE(server.call("PUT", "/route", body.dump()).status == 200);
  CHECK(server.get("-1", "-1", "-1", "-1").body ==
        R"({"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,"kv_cache_dtype":null,)"
        R"("follow_bootstrap_room":true,"enable_dsa_cache_layer_split":false,"prefill_http_port":null})");
}

TEST_CASE("a rank answer has its address, and numbers may come as text") {
  Server server;
  json body = registration();
  body["rank_ip"] = "2001:db8::5";
  body["rank_port"] = "45001";
  body["page_size"] = "16";
  REQUIRE(server.call("PUT", "/route", body.dump()).status == 200);
  const BootstrapResponse rank = server.get("0", "0", "0", "0");
  CHECK(rank.status == 200);
  CHECK(rank.body == R"({"rank_ip":"2001:db8::5","rank_port":45001})");
  CHECK(json::parse(server.get("-1", "-1", "-1", "-1").body)["page_size"] == 16);
}

TEST_CASE("each documented case of GET /route has its status") {
  Server server;
  CHECK(server.get("-1", "-1", "-1", "-1").status == 503);
  json body = registration();
  body["attn_tp_size"] = 2;
  REQUIRE(server.call("PUT", "/route", body.dump()).status == 200);
  const BootstrapResponse waiting = server.get("0", "0", "0", "0");
  CHECK(waiting.status == 503);
  CHECK_THAT(waiting.body, Contains("1 of 2 workers registered"));

  body["attn_tp_rank"] = 1;
  body["rank_port"] = 45002;
  REQUIRE(server.call("PUT", "/route", body.dump()).status == 200);
  CHECK(server.get("0", "0", "1", "0").status == 200);
  CHECK(server.get("0", "0", "2", "0").status == 404);
  CHECK(server.get("-1", "-1", "-1", "0").status == 404);
  CHECK(server.get("9223372036854775807", "0", "0", "0").status == 404);
  CHECK_THAT(server.get("0", "0", "2", "0").body, Contains("tp 2") && Contains("tp 2 pp 1"));

  const BootstrapResponse missing =
      server.call("GET", "/route", "", {{"prefill_dp_rank", "0"}, {"target_tp_rank", ""}});
  CHECK(missing.status == 400);
  CHECK_THAT(missing.body, Contains("prefill_cp_rank, target_tp_rank, target_pp_rank"));
  for (const char* text : {"x", "1.0", " 1", "1 ", "0x1", "--1", "9223372036854775808", "1e0", "\xff"}) {
    CAPTURE(text);
    const BootstrapResponse bad = server.get("0", "0", text, "0");
    CHECK(bad.status == 400);
    CHECK_THAT(bad.body, Contains("target_tp_rank is not an integer"));
  }
}

TEST_CASE("other methods are 405 with Allow, other paths are not ours") {
  Server server;
  for (const auto& [path, allow] : std::map<std::string, std::string>{{"/route", "GET, PUT"},
                                                                      {"/health", "GET"},
                                                                      {"/register_dp_rank", "POST"},
                                                                      {"/query_dp_ranks", "POST"}}) {
    for (const char* method : {"DELETE", "PATCH", "", "get", "\xff\n"}) {
      const BootstrapResponse response = server.call(method, path);
      CHECK(response.status == 405);
      CHECK(response.allow == allow);
    }
  }
  CHECK(server.call("POST", "/route").status == 405);
  for (const char* path : {"/v1/handshake", "/", "", "/route/", "/routes", "route"}) {
    CHECK_FALSE(server.routes.handle("GET", path, {}, "", 0).has_value());
  }
}

TEST_CASE("health answers OK before any rank has registered") {
  Server server;
  CHECK(server.call("GET", "/health").status == 200);
  CHECK(server.call("GET", "/health").body == "OK");
}

TEST_CASE("a room's DP rank is stored and found, unknown rooms are left out") {
  Server server;
  const BootstrapResponse stored =
      server.call("POST", "/register_dp_rank", R"({"bootstrap_room":9223372036854775807,"dp_rank":3})");
  CHECK(stored.status == 200);
  CHECK(stored.body == "OK");
  const BootstrapResponse found =
      server.call("POST", "/query_dp_ranks", R"({"bootstrap_rooms":[5,9223372036854775807]})");
  CHECK(found.status == 200);
  CHECK(found.body == R"({"9223372036854775807":3})");
  CHECK(server.call("POST", "/query_dp_ranks", R"({"bootstrap_rooms":[]})").body == "{}");
}

TEST_CASE("a duplicate rank from another address is 409") {
  Server server;
  json body = registration();
  REQUIRE(server.call("PUT", "/route", body.dump()).status == 200);
  REQUIRE(server.call("PUT", "/route", body.dump()).status == 200);
  body["rank_ip"] = "10.0.0.2";
  const BootstrapResponse response = server.call("PUT", "/route", body.dump());
  CHECK(response.status == 409);
  CHECK_THAT(response.body, Contains("10.0.0.1:45001") && Contains("10.0.0.2:45001"));
  CHECK(json::parse(server.get("0", "0", "0", "0").body)["rank_ip"] == "10.0.0.1");
}

TEST_CASE("each wrong field of PUT /route is a 4xx that names it") {
  struct Case {
    const char* key;
    json value;
  };
  const Case cases[] = {{"attn_tp_size", 0},
                        {"attn_tp_size", "1"},
                        {"attn_tp_size", std::uint64_t{1} << 54},
                        {"attn_tp_rank", -1},
                        {"attn_tp_rank", 1},
                        {"attn_cp_size", 1.0},
                        {"attn_cp_rank", nullptr},
                        {"attn_dp_size", true},
                        {"attn_dp_rank", json::array()},
                        {"pp_size", json::object()},
                        {"pp_rank", 3},
                        {"system_dp_size", -5},
                        {"system_dp_rank", 1e300},
                        {"rank_ip", 5},
                        {"rank_ip", ""},
                        {"rank_ip", std::string(256, 'a')},
                        {"rank_ip", "10.0.0.1:80"},
                        {"rank_port", 0},
                        {"rank_port", 65536},
                        {"rank_port", "45001x"},
                        {"rank_port", "-1"},
                        {"rank_port", ""},
                        {"page_size", nullptr},
                        {"page_size", "0"},
                        {"kv_cache_dtype", 7},
                        {"load_balance_method", 7},
                        {"enable_dsa_cache_layer_split", "yes"},
                        {"prefill_http_port", 70000}};
  for (const Case& one : cases) {
    Server server;
    json body = registration();
    body[one.key] = one.value;
    CAPTURE(one.key, one.value.dump());
    const BootstrapResponse response = server.call("PUT", "/route", body.dump());
    CHECK(response.status == 400);
    CHECK_THAT(response.body, Contains(one.key));
    CHECK(server.registry.registered() == 0);
  }
  const json complete = registration();
  for (const auto& [key, value] : complete.items()) {
    Server server;
    json body = registration();
    body.erase(key);
    const BootstrapResponse response = server.call("PUT", "/route", body.dump());
    CHECK(response.status == 400);
    CHECK_THAT(response.body, Contains(key + ": missing"));
  }
}

TEST_CASE("bodies that are not what they must be are 4xx on every path") {
  for (const char* path : {"/route", "/register_dp_rank", "/query_dp_ranks"}) {
    const char* method = std::string_view(path) == "/route" ? "PUT" : "POST";
    Server server;
    for (const char* body : {"", "{", "null", "5", "[]", "\"x\"", "{}", "\xff\xfe", "{\"a\":1}}", "nan"}) {
      CAPTURE(path, body);
      CHECK(server.call(method, path, body).status == 400);
    }
    check_4xx(server.call(method, path, std::string(100000, '[')));
    check_4xx(server.call(method, path, std::string(BootstrapRoutes::kBodyBytesMax + 1, ' ')));
  }
}

TEST_CASE("rooms out of range are 4xx by name and position") {
  Server server;
  CHECK_THAT(server.call("POST", "/register_dp_rank", R"({"bootstrap_room":-1,"dp_rank":0})").body,
             Contains("bootstrap_room: expected an integer"));
  check_4xx(
      server.call("POST", "/register_dp_rank", R"({"bootstrap_room":9223372036854775808,"dp_rank":0})"));
  check_4xx(server.call("POST", "/register_dp_rank", R"({"bootstrap_room":1.5,"dp_rank":0})"));
  CHECK_THAT(server.call("POST", "/register_dp_rank", R"({"bootstrap_room":1,"dp_rank":65536})").body,
             Contains("dp_rank: expected an integer"));
  CHECK_THAT(server.call("POST", "/query_dp_ranks", R"({"bootstrap_rooms":[1,2,"3"]})").body,
             Contains("bootstrap_rooms[2]: expected an integer"));
  json many = json::array();
  for (std::size_t i = 0; i <= BootstrapRoutes::kRoomsPerQuery; ++i) {
    many.push_back(i);
  }
  const BootstrapResponse response =
      server.call("POST", "/query_dp_ranks", json{{"bootstrap_rooms", many}}.dump());
  CHECK(response.status == 400);
  CHECK_THAT(response.body, Contains("has 32769 elements, more than the 32768 allowed"));
}

TEST_CASE("no truncation and no mutation of a route body crashes or answers 5xx") {
  const std::string put = registration().dump();
  for (std::size_t size = 0; size < put.size(); ++size) {
    Server server;
    check_4xx(server.call("PUT", "/route", put.substr(0, size)));
  }
  const std::uint64_t seed = samples::seed();
  std::cout << "seed " << std::hex << seed << std::dec << "\n";
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Server server;
  for (int i = 0; i < 20000; ++i) {
    const BootstrapResponse response = server.call("PUT", "/route", samples::mutate(put, random));
    REQUIRE((response.status == 200 || (response.status >= 400 && response.status < 500)));
    REQUIRE(json(response.body).dump().size() > 2);  // dump() would throw on a body that is not UTF-8
    for (const auto& [path, body] : {std::pair{"/register_dp_rank", R"({"bootstrap_room":77,"dp_rank":0})"},
                                     std::pair{"/query_dp_ranks", R"({"bootstrap_rooms":[77,78]})"}}) {
      const BootstrapResponse other = server.call("POST", path, samples::mutate(body, random));
      REQUIRE((other.status == 200 || (other.status >= 400 && other.status < 500)));
    }
  }
  CHECK(server.registry.registered() <= RegistryOptions{}.ranks_max);
}
