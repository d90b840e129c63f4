// Good configurations of both daemons: defaults, the examples of deploy/, every key once, and that what is
// printed reads back as the same. And the one rule that looks at several keys: what leaves this host.

#include "common/daemon/config.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <set>

#include "common/config/fields.h"
#include "tests/unit/base/config_support.h"

using namespace kvferry;
using namespace kvferry::test;
using namespace std::chrono_literals;
using nlohmann::json;

namespace {

/// One that this process may use.
std::string some_cpu() {
  cpu_set_t cpus{};
  REQUIRE(::sched_getaffinity(0, sizeof cpus, &cpus) == 0);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &cpus)) {
    ++cpu;
  }
  return std::to_string(cpu);
}

// Every key of a configuration with a value that is not its default, as print_daemon_config writes it.
json every_key(Role role) {
  json out = json::parse(R"({
    "instance": "node-7", "model": "deepseek-v3", "dtype": "fp16", "draft_layers": 1, "page_size": 128,
    "topology": {"tp": 8, "pp": 2, "cp": 3, "cp_split": "pages", "dp": 5, "dcp": 4,
                 "dcp_interleave": 16, "pp_layers": [30, 31]},
    "ranks": [7, 0, 239],
    "engine_socket": {"path": "/tmp/engine.sock", "mode": "0600", "allowed_uids": [0, 1000, 4294967294], "allowed_gids": [7]},
    "metrics": {"listen": "[::1]:1234"},
    "auth": {"window": "31s"},
    "fabrics": ["ucx", "shm", "tcp"],
    "shm": {"allowed_uids": [12]},
    "tcp": {"socket_buffer": 4096},
    "ucx": {"transports": "tcp", "device": "lo", "staging": 65536},
    "threads": {"spin_us": 7},
    "timeouts": {"bootstrap": "101s", "transfer": "102s", "drain": "103s", "connect": "1500ms",
                 "heartbeat_interval": "50000001ns", "heartbeat_misses": 9},
    "limits": {"rooms": 11, "chunks_per_room": 12, "pages_per_room": 13, "peers": 14, "engines": 15,
               "http_body": 1024, "http_header": 512, "http_connections": 18, "dp_rank_entries": 19},
    "insecure": true,
    "log": {"level": "debug"}})");
  static const TextFile secret("0123456789abcdef0123456789abcdef", 0600);
  out["threads"]["cpus"] = some_cpu();
  out["auth"]["key_file"] = secret.path();
  out["metrics"]["token_file"] = secret.path();
  if (role == Role::kPrefill) {
    out["shm"]["copy_threads"] = 64u;
    out["tcp"]["connections"] = 16u;
    out["tcp"]["congestion"] = "reno";
    out["bootstrap"] = json::parse(
        R"({"listen": "10.0.0.7:8999", "advertise": "node-7.example.com", "registry": "node-1:8998"})");
  } else {
    out["verify"] = {{"mode", "full"}, {"one_in", 20}};
    out["shm"]["socket"] = "/tmp/pools.sock";
    out["tcp"]["listen"] = "10.0.0.7:0";
    out["tcp"]["advertise"] = "node-7.example.com";
  }
  return out;
}

json printed(Role role, const json& document) {
  return json::parse(print_daemon_config(role, good_config(role, document)));
}

}  // namespace

TEST_CASE("config: what is left out takes its default") {
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    const DaemonConfig config = good_config(role, config_with("{}"));
    char host[256] = {};
    REQUIRE(::gethostname(host, sizeof host - 1) == 0);
    CHECK(config.instance == fmt::format("{}-{}", host, to_string(role)));
    CHECK(config.model_name == "llama-3.1-8b");
    CHECK(config.model.kv_heads == 8);
    CHECK(config.model.dtype == Dtype::kBf16);
    CHECK(config.page_size == 64);
    CHECK(config.topology == Topology{});
    CHECK(config.ranks == std::vector<RankIndex>{0});
    CHECK(config.engine_socket.path == fmt::format("/run/kvferry/{}.sock", to_string(role)));
    CHECK(config.engine_socket.mode == 0660);
    CHECK(config.engine_socket.allowed_uids.empty());
    CHECK(config.metrics_listen.to_string() ==
          (role == Role::kPrefill ? "127.0.0.1:9401" : "127.0.0.1:9402"));
    CHECK(config.fabrics == Lines{"shm", "tcp"});
    CHECK(config.tcp.connections == 1);
    CHECK(config.tcp.listen.to_string() == "127.0.0.1:0");
    CHECK(config.tcp.socket_buffer_bytes == 1u << 20);
    CHECK(config.ucx.transports == "rdma");
    CHECK(config.timeouts.transfer == 300s);
    CHECK(config.timeouts.heartbeat_interval == 1s);
    CHECK(config.limits.rooms == 4096);
    CHECK(config.limits.pages_per_room == 1u << 20);
    CHECK_FALSE(config.insecure);
    CHECK(config.log_level == log::Level::kInfo);
    CHECK(config.bootstrap_listen.to_string() == "127.0.0.1:8998");
    CHECK(config.registry.empty());
  }
  CHECK(good_config(Role::kDecode, config_with("{}")).shm.socket == "/run/kvferry/decode-shm.sock");
}

TEST_CASE("config: the examples of deploy/ are good and say what they seem to say") {
  const auto prefill = load_daemon_config(Role::kPrefill, KVF_DEPLOY_DIR "/prefill.json");
  REQUIRE(prefill);
  CHECK(prefill->instance == "prefill-0");
  CHECK(prefill->topology.tp == 2);
  CHECK(prefill->ranks == std::vector<RankIndex>{0, 1});
  CHECK(prefill->bootstrap_listen == HostPort{"127.0.0.1", 8998});
  CHECK(prefill->engine_socket.path == "/run/kvferry/prefill.sock");
  const auto decode = load_daemon_config(Role::kDecode, KVF_DEPLOY_DIR "/decode.json");
  REQUIRE(decode);
  CHECK(decode->instance == "decode-0");
  CHECK(decode->topology.dcp == 4);
  CHECK(decode->ranks == std::vector<RankIndex>{0, 1, 2, 3});
  CHECK(decode->shm.socket == "/run/kvferry/decode-shm.sock");
  // They are not interchangeable: each has keys that only its daemon knows.
  const auto swapped = load_daemon_config(Role::kDecode, KVF_DEPLOY_DIR "/prefill.json");
  REQUIRE_FALSE(swapped);
  CHECK_THAT(swapped.error().message, Catch::Contains("/prefill.json: bootstrap: is not a known key"));
}

TEST_CASE("config: every key is read, and printed as it reads back") {
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    const json full = every_key(role);
    CHECK(printed(role, full) == full);
    // The list above is complete, and none of its values is what an unread key would print.
    const json full_flat = full.flatten();
    const json least_flat = printed(role, config_with("{}")).flatten();
    std::set<std::string> sections;
    for (const auto& [path, value] : full_flat.items()) {
      CAPTURE(path);
      CHECK((!least_flat.contains(path) || least_flat[path] != value));
      sections.insert(path);
    }
    for (const auto& [path, value] : least_flat.items()) {
      CAPTURE(path);
      const bool is_list = !value.is_primitive() || value.is_null();  // an empty list flattens to null
      CHECK((is_list || sections.contains(path)));
    }
  }
}

TEST_CASE("config: a printed configuration prints itself") {
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    for (const json& document : {config_with("{}"), config_with(R"({"topology": {"tp": 4, "dcp": 1}})"),
                                 config_with(R"({"timeouts": {"drain": "4.1s", "connect": "0.1h"}})")}) {
      const json once = printed(role, document);
      CHECK(printed(role, once) == once);
    }
  }
  const json config = printed(Role::kDecode, config_with(R"({"timeouts": {"drain": "4.1s"}})"));
  CHECK(config["timeouts"]["drain"] == "4100ms");
}

TEST_CASE("config: a file that cannot be read is named") {
  const auto config = load_daemon_config(Role::kDecode, "/nowhere/decode.json");
  REQUIRE_FALSE(config);
  CHECK(config.error() ==
        Error{Code::kIo, "cannot read configuration /nowhere/decode.json: No such file or directory"});
}

TEST_CASE("config: a listener that leaves this host must be asked for") {
  struct Case {
    Role role;
    const char* patch;
    Lines lines;
  };
  const auto open = [](const char* key, const char* address) {
    return fmt::format(
        "{}: '{}' is not a loopback address, and who connects is not authenticated; set {}, or \"insecure\": "
        "true "
        "if this network is trusted",
        key, address, std::string_view(key).starts_with("metrics") ? "metrics.token_file" : "auth.key_file");
  };
  const std::string ucx =
      "ucx.device: 'eth1' is not lo: anyone who reaches a UCX TCP port can write this process's memory; set "
      "\"insecure\": true on a trusted network only";
  const Case cases[] = {
      {Role::kPrefill,
       R"({"metrics": {"listen": "0.0.0.0:9401"}})",
       {open("metrics.listen", "0.0.0.0:9401")}},
      {Role::kDecode, R"({"metrics": {"listen": "[::]:9402"}})", {open("metrics.listen", "[::]:9402")}},
      {Role::kPrefill,
       R"({"bootstrap": {"listen": "10.0.0.1:8998"}})",
       {open("bootstrap.listen", "10.0.0.1:8998")}},
      {Role::kPrefill,
       R"({"bootstrap": {"listen": "127.example.com:8998"}})",
       {open("bootstrap.listen", "127.example.com:8998")}},
      {Role::kDecode, R"({"tcp": {"listen": "node-7:0"}})", {open("tcp.listen", "node-7:0")}},
      {Role::kDecode,
       R"({"tcp": {"listen": "10.0.0.1:1"}, "metrics": {"listen": "10.0.0.1:2"}})",
       {open("metrics.listen", "10.0.0.1:2"), open("tcp.listen", "10.0.0.1:1")}},
      {Role::kPrefill, R"({"fabrics": ["ucx"], "ucx": {"transports": "tcp", "device": "eth1"}})", {ucx}},
      {Role::kDecode,
       R"({"fabrics": ["shm", "ucx"], "ucx": {"transports": "tcp", "device": "eth1"}})",
       {ucx}},
      // Beside other problems, so that one look at the list is enough.
      {Role::kDecode,
       R"({"page_size": 0, "tcp": {"listen": "10.0.0.1:1"}})",
       {"page_size: is 0, must be a whole number from 1 to 65536", open("tcp.listen", "10.0.0.1:1")}},
      // None of these opens a port beyond this host.
      {Role::kDecode, R"({"tcp": {"listen": "127.8.8.8:0"}, "metrics": {"listen": "[::1]:0"}})", {}},
      {Role::kPrefill, R"({"bootstrap": {"listen": "localhost:8998", "registry": "10.0.0.1:8998"}})", {}},
      {Role::kDecode, R"({"fabrics": ["shm"], "tcp": {"listen": "10.0.0.1:1"}})", {}},
      {Role::kPrefill, R"({"fabrics": ["tcp"], "ucx": {"transports": "tcp", "device": "eth1"}})", {}},
      {Role::kPrefill, R"({"fabrics": ["ucx"], "ucx": {"transports": "tcp", "device": "lo"}})", {}},
      {Role::kPrefill, R"({"fabrics": ["ucx"], "ucx": {"transports": "rdma", "device": "mlx5_0:1"}})", {}},
  };
  for (const Case& one : cases) {
    CAPTURE(one.patch);
    json document = config_with(one.patch);
    CHECK(problems_of(one.role, document) == one.lines);
    if (one.lines.size() == 1) {
      document["insecure"] = true;
      CHECK(problems_of(one.role, document).empty());
    }
  }
}
