// Every rule of a configuration, one broken at a time: the one line that comes back names the key, what it
// holds and what it must be. Nothing else is complained of.

#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/unit/base/config_support.h"

using namespace kvferry;
using namespace kvferry::test;
using nlohmann::json;

namespace {

constexpr Role kPrefill = Role::kPrefill;
constexpr Role kDecode = Role::kDecode;

struct Broken {
  const char* patch;
  const char* line;
};

template <std::size_t N>
void check(std::initializer_list<Role> roles, const Broken (&cases)[N]) {
  for (const Role role : roles) {
    for (const Broken& one : cases) {
      CAPTURE(one.patch, to_string(role));
      CHECK(problems_of(role, config_with(one.patch)) == Lines{one.line});
    }
  }
}

std::string setting(const std::string& pointer, const std::string& value) {
  json document;
  document[json::json_pointer(pointer)] = json::parse(value);
  return document.dump();
}

}  // namespace

TEST_CASE("config rules: the document is one object, without keys that appear twice") {
  for (const Role role : {kPrefill, kDecode}) {
    const auto error_of = [&](const char* text) {
      const auto config = parse_daemon_config(role, text, "test.json");
      REQUIRE_FALSE(config);
      return config.error().message;
    };
    CHECK(
        error_of("[1]") ==
        "test.json: (top level): must be an object, is [1]\ntest.json: model: is missing and has no default");
    CHECK(error_of(R"({"model": "llama-3.1-8b", "model": "llama-3.1-8b"})") ==
          "test.json: key 'model' appears twice in one object; remove one");
    CHECK_THAT(error_of("{\n\"model\": }"), Catch::Contains("line 2, column 10"));
  }
}

TEST_CASE("config rules: the model is required and must be known") {
  check({kPrefill, kDecode},
        {
            {R"({"model": null})", "model: is missing and has no default"},
            {R"({"model": ""})", "model: is empty and has no default"},
            {R"({"model": 8})", "model: is 8, must be a text"},
            // A dtype beside a wrong model is a known key all the same.
            {R"({"model": null, "dtype": "fp16"})", "model: is missing and has no default"},
            {R"({"dtype": 16})", "dtype: is 16, must be a text"},
        });
  const Lines unknown = problems_of(kDecode, config_with(R"({"model": "deepseek-v4", "dtype": "bf16"})"));
  REQUIRE(unknown.size() == 1);
  CHECK_THAT(unknown[0], Catch::StartsWith("model: ") && Catch::Contains("deepseek-v4") &&
                             Catch::Contains("deepseek-v3.2") &&
                             Catch::Contains("no config.json at that path"));
  for (const char* name : {"bf17", "", "BF16", "auto"}) {
    const Lines dtype = problems_of(kDecode, config_with(setting("/dtype", json(name).dump())));
    REQUIRE(dtype.size() == 1);
    CHECK_THAT(dtype[0], Catch::StartsWith(fmt::format("dtype: dtype \"{}\" is unknown; use bf16", name)));
  }
}

TEST_CASE("config rules: the instance has a name of 1 to 128 characters") {
  const std::string most(128, 'x');
  CHECK(good_config(kDecode, config_with(setting("/instance", json(most).dump()))).instance == most);
  check({kPrefill, kDecode}, {
                                 {R"({"instance": ""})", "instance: must have 1 to 128 characters"},
                                 {R"({"instance": 7})", "instance: is 7, must be a text"},
                             });
  CHECK(problems_of(kDecode, config_with(setting("/instance", json(most + "x").dump()))) ==
        Lines{"instance: must have 1 to 128 characters"});
}

TEST_CASE("config rules: processors are a list or a NUMA node that this host has") {
  check({kPrefill, kDecode},
        {
            {R"({"threads": {"cpus": "9-1"}})",
             R"(threads.cpus: is '9-1', must be a list like "0-3,8" or a NUMA node like "node0")"},
            {R"({"threads": {"cpus": "node987"}})",
             "threads.cpus: 'node987' is no NUMA node with processors on this host "
             "(/sys/devices/system/node/node987/cpulist)"},
        });
}

TEST_CASE("config rules: numbers, durations and sizes take their limits and nothing beyond") {
  struct Range {
    const char* pointer;
    const char* values[4];  // below, least, most, above
    const char* expected;
  };
  constexpr const char* kDay = "a duration from 100ms to 86400s, e.g. \"5s\"";
  const Range both[] = {
      {"/page_size", {"0", "1", "65536", "65537"}, "a whole number from 1 to 65536"},
      {"/timeouts/bootstrap", {"\"99ms\"", "\"100ms\"", "\"24h\"", "\"86401s\""}, kDay},
      {"/timeouts/transfer", {"0", "\"0.1s\"", "86400", "\"24.001h\""}, kDay},
      {"/timeouts/drain",
       {"\"99ms\"", "\"100ms\"", "\"1h\"", "3601"},
       "a duration from 100ms to 3600s, e.g. \"5s\""},
      {"/timeouts/connect", {"0", "\"100ms\"", "600", "601"}, "a duration from 100ms to 600s, e.g. \"5s\""},
      {"/timeouts/heartbeat_interval",
       {"\"49ms\"", "\"50ms\"", "60", "61"},
       "a duration from 50ms to 60s, e.g. \"5s\""},
      {"/timeouts/heartbeat_misses", {"0", "1", "100", "101"}, "a whole number from 1 to 100"},
      {"/limits/rooms", {"0", "1", "1048576", "1048577"}, "a whole number from 1 to 1048576"},
      {"/limits/chunks_per_room", {"0", "1", "1048576", "1048577"}, "a whole number from 1 to 1048576"},
      {"/limits/pages_per_room", {"0", "1", "4194304", "4194305"}, "a whole number from 1 to 4194304"},
      {"/limits/peers", {"0", "1", "65536", "65537"}, "a whole number from 1 to 65536"},
      {"/limits/engines", {"0", "1", "4096", "4097"}, "a whole number from 1 to 4096"},
      {"/limits/http_body",
       {"1023", "\"1KiB\"", "\"64MiB\"", "67108865"},
       "a size from 1024 to 67108864 bytes, e.g. \"2MiB\""},
      {"/limits/http_header",
       {"511", "512", "\"1MiB\"", "\"2MiB\""},
       "a size from 512 to 1048576 bytes, e.g. \"2MiB\""},
      {"/limits/http_connections", {"0", "1", "65536", "65537"}, "a whole number from 1 to 65536"},
      {"/limits/dp_rank_entries", {"0", "1", "16777216", "16777217"}, "a whole number from 1 to 16777216"},
      {"/tcp/socket_buffer",
       {"-1", "0", "\"1GiB\"", "\"1025MiB\""},
       "a size from 0 to 1073741824 bytes, e.g. \"2MiB\""},
      {"/threads/spin_us", {"-1", "0", "10000", "10001"}, "a whole number from 0 to 10000"},
      {"/ucx/staging",
       {"\"63KiB\"", "\"64KiB\"", "\"2MiB\"", "2097153"},
       "a size from 65536 to 2097152 bytes, e.g. \"2MiB\""},
  };
  const Range prefill[] = {
      {"/shm/copy_threads", {"-1", "0", "64", "65"}, "a whole number from 0 to 64"},
      {"/tcp/connections", {"0", "1", "16", "17"}, "a whole number from 1 to 16"},
  };
  const auto check_range = [](Role role, const Range& range) {
    for (int i = 0; i < 4; ++i) {
      CAPTURE(range.pointer, range.values[i]);
      std::string key(range.pointer + 1);
      std::replace(key.begin(), key.end(), '/', '.');
      const Lines found = problems_of(role, config_with(setting(range.pointer, range.values[i])));
      if (i == 1 || i == 2) {
        CHECK(found.empty());
      } else {
        CHECK(found == Lines{fmt::format("{}: is {}, must be {}", key, range.values[i], range.expected)});
      }
    }
  };
  for (const Range& range : both) {
    check_range(kPrefill, range);
    check_range(kDecode, range);
  }
  for (const Range& range : prefill) {
    check_range(kPrefill, range);
  }
}

TEST_CASE("config rules: the topology's sizes are limited, and it must suit the model") {
  for (const char* key : {"tp", "pp", "cp", "dp", "dcp", "dcp_interleave"}) {
    const int most = std::string(key) == "dcp_interleave" ? 65536 : 4096;
    for (const int value : {-1, 0, most + 1}) {
      CAPTURE(key, value);
      CHECK(problems_of(kDecode,
                        config_with(setting(fmt::format("/topology/{}", key), std::to_string(value)))) ==
            Lines{fmt::format("topology.{}: is {}, must be a whole number from 1 to {}", key, value, most)});
    }
  }
  check({kPrefill, kDecode},
        {
            {R"({"topology": {"tp": 4096, "pp": 32}})",
             "topology: tp*pp*cp*dp is 131072; at most 65536 ranks are supported"},
            // The ranks of a topology that is too large are a known key all the same.
            {R"({"topology": {"tp": 4096, "pp": 32}, "ranks": [0]})",
             "topology: tp*pp*cp*dp is 131072; at most 65536 ranks are supported"},
            {R"({"topology": {"pp_layers": [-1]}})",
             "topology.pp_layers: is [-1], must be a list of whole numbers from 0 to 65536"},
            {R"({"topology": {"cp_split": "half"}})",
             "topology.cp_split: cp_split \"half\" is none of none, pages, zigzag"},
            {R"({"topology": {"cp_split": 2}})", "topology.cp_split: is 2, must be a text"},
            {R"({"topology": "tp=2"})", "topology: must be an object, is \"tp=2\""},
        });
  CHECK(good_config(kDecode, config_with(R"({"topology": {"tp": 4096, "pp": 16}})")).ranks.size() == 65536);
}

TEST_CASE("config rules: what the model says of the topology is passed on whole") {
  for (const char* patch : {R"({"topology": {"tp": 3}})", R"({"topology": {"pp": 2, "pp_layers": [16]}})",
                            R"({"topology": {"dcp": 2}})"}) {
    CAPTURE(patch);
    const json document = config_with(patch);
    Topology topology;
    topology.tp = document["topology"].value("tp", 1u);
    topology.pp = document["topology"].value("pp", 1u);
    topology.dcp = document["topology"].value("dcp", 1u);
    topology.pp_layers = document["topology"].value("pp_layers", std::vector<std::uint32_t>{});
    const auto valid = validate(topology, preset_geometry("llama-3.1-8b").value());
    REQUIRE_FALSE(valid);
    CHECK(problems_of(kPrefill, document) == Lines{"topology: " + valid.error().message});
  }
}

TEST_CASE("config rules: ranks are those of the topology, each once") {
  check({kPrefill, kDecode},
        {
            {R"({"ranks": [2], "topology": {"tp": 2}})",
             "ranks: 2 is not a rank of this topology, which has 2"},
            {R"({"ranks": [1, 0, 1], "topology": {"tp": 2}})", "ranks: 1 appears twice"},
            {R"({"ranks": []})", "ranks: is empty; leave it out to serve every rank of the topology"},
            {R"({"ranks": "all"})", "ranks: is \"all\", must be a list of whole numbers from 0 to 65535"},
            {R"({"ranks": [65536]})", "ranks: is [65536], must be a list of whole numbers from 0 to 65535"},
        });
  CHECK(good_config(kDecode, config_with(R"({"ranks": [3, 1], "topology": {"tp": 4}})")).ranks ==
        std::vector<RankIndex>{3, 1});
}

TEST_CASE("config rules: the engine socket has a path and an octal mode") {
  check(
      {kPrefill, kDecode},
      {
          {R"({"engine_socket": {"path": ""}})", "engine_socket.path: is empty"},
          {R"({"engine_socket": {"path": 1}})", "engine_socket.path: is 1, must be a text"},
          {R"({"engine_socket": {"mode": 660}})", "engine_socket.mode: is 660, must be a text"},
          {R"({"engine_socket": {"allowed_uids": [4294967295]}})",
           "engine_socket.allowed_uids: is [4294967295], must be a list of whole numbers from 0 to "
           "4294967294"},
          {R"({"engine_socket": {"allowed_gids": [-1]}})",
           "engine_socket.allowed_gids: is [-1], must be a list of whole numbers from 0 to 4294967294"},
          {R"({"engine_socket": {"allowed_uids": ["root"]}})",
           "engine_socket.allowed_uids: is [\"root\"], must be a list of whole numbers from 0 to 4294967294"},
      });
  for (const std::string mode :
       {"", "rw", "0888", "1000", "-1", "+660", " 660", "0660 ", "0x1ff", "77777777777777"}) {
    CHECK(
        problems_of(kDecode, config_with(setting("/engine_socket/mode", json(mode).dump()))) ==
        Lines{fmt::format("engine_socket.mode: is '{}', must be an octal file mode such as \"0660\"", mode)});
  }
  CHECK(good_config(kDecode, config_with(R"({"engine_socket": {"mode": "777"}})")).engine_socket.mode ==
        0777);
  CHECK(good_config(kDecode, config_with(R"({"engine_socket": {"mode": "0"}})")).engine_socket.mode == 0);
  const auto path_of = [](std::size_t size) {
    return config_with(setting("/engine_socket/path", json("/" + std::string(size - 1, 'p')).dump()));
  };
  CHECK(problems_of(kDecode, path_of(100)).empty());
  CHECK(problems_of(kDecode, path_of(101)) ==
        Lines{"engine_socket.path: has 101 characters; a Unix socket path has at most 100"});
}

TEST_CASE("config rules: fabrics are named from a list, each once") {
  check({kPrefill, kDecode},
        {
            {R"({"fabrics": []})", "fabrics: is empty; name at least one of shm, tcp, ucx"},
            {R"({"fabrics": ["rdma"]})", "fabrics: 'rdma' is not a fabric; known: shm, tcp, ucx"},
            {R"({"fabrics": ["tcp", "shm", "tcp"]})", "fabrics: 'tcp' appears twice"},
            {R"({"fabrics": "tcp"})", "fabrics: is \"tcp\", must be a list of texts"},
            {R"({"fabrics": ["tcp", 5]})", "fabrics: is [\"tcp\",5], must be a list of texts"},
        });
  check({kDecode},
        {
            {R"({"shm": {"socket": ""}})", "shm.socket: is empty"},
            {R"({"shm": {"socket": "here.sock"}})",
             "shm.socket: is 'here.sock', must be an absolute path: prefill daemons must find it too"},
            {R"({"shm": {"copy_threads": 1}})",
             "shm.copy_threads: is not a known key; known here: allowed_uids, socket"},
            {R"({"tcp": {"connections": 1}})",
             "tcp.connections: is not a known key; known here: advertise, listen, socket_buffer"},
            {R"({"tcp": {"listen": "127.0.0.1"}})",
             "tcp.listen: address '127.0.0.1' has no port; write host:port or [ipv6]:port"},
            {R"({"tcp": {"advertise": 7}})", "tcp.advertise: is 7, must be a text"},
        });
  CHECK(problems_of(kDecode, config_with(setting("/shm/socket", json("/" + std::string(100, 's')).dump()))) ==
        Lines{"shm.socket: has 101 characters; a Unix socket path has at most 100"});
  check({kPrefill},
        {
            {R"({"shm": {"socket": "/run/x.sock"}})",
             "shm.socket: is not a known key; known here: allowed_uids, copy_threads"},
            {R"({"tcp": {"listen": "127.0.0.1:0"}})",
             "tcp.listen: is not a known key; known here: congestion, connections, socket_buffer"},
            {R"({"shm": {"allowed_uids": [-1]}})",
             "shm.allowed_uids: is [-1], must be a list of whole numbers from 0 to 4294967294"},
        });
  check({kPrefill, kDecode},
        {
            {R"({"ucx": {"transports": "ib"}})", "ucx.transports: is 'ib', must be rdma, shm or tcp"},
            {R"({"ucx": {"transports": "tcp"}})",
             "ucx.device: is missing: UCX over TCP listens on every interface unless one is named, e.g. "
             "\"eth1\""},
            {R"({"ucx": {"device": 1}})", "ucx.device: is 1, must be a text"},
        });
}

TEST_CASE("config rules: addresses are host and port") {
  check({kPrefill, kDecode},
        {
            {R"({"metrics": {"listen": "9401"}})",
             "metrics.listen: address '9401' has no port; write host:port or [ipv6]:port"},
            {R"({"metrics": {"listen": "127.0.0.1:65536"}})",
             "metrics.listen: port '65536' in '127.0.0.1:65536' is not a number from 0 to 65535"},
            {R"({"metrics": {"listen": 9401}})", "metrics.listen: is 9401, must be a text"},
        });
  check({kPrefill},
        {
            {R"({"bootstrap": {"listen": ":8998"}})", "bootstrap.listen: address ':8998' has no host"},
            {R"({"bootstrap": {"registry": "node:0"}})",
             "bootstrap.registry: port '0' in 'node:0' is not a number from 1 to 65535"},
            {R"({"bootstrap": {"advertise": []}})", "bootstrap.advertise: is [], must be a text"},
        });
  CHECK(good_config(kPrefill, config_with(R"({"bootstrap": {"registry": "node"}})")).registry == "node");
}

TEST_CASE("config rules: log level and insecure") {
  check(
      {kPrefill, kDecode},
      {
          {R"({"log": {"level": "verbose"}})", "log.level: is 'verbose', must be debug, info, warn or error"},
          {R"({"log": {"level": "INFO"}})", "log.level: is 'INFO', must be debug, info, warn or error"},
          {R"({"log": {"level": 3}})", "log.level: is 3, must be a text"},
          {R"({"insecure": "yes"})", "insecure: is \"yes\", must be true or false"},
          {R"({"insecure": 1})", "insecure: is 1, must be true or false"},
      });
}

TEST_CASE("config rules: verify") {
  check({kDecode},
        {
            {R"({"verify": {"mode": "on"}})", "verify.mode: is 'on', must be off, sampled or full"},
            {R"({"verify": {"one_in": 1}})", "verify.one_in: is 1, must be a whole number from 2 to 1000000"},
        });
}

TEST_CASE("config rules: keys and tokens are read at once, and say what is wrong with them") {
  const TextFile key("0123456789abcdef0123456789abcdef\n", 0600);
  const TextFile open("0123456789abcdef0123456789abcdef\n", 0604);
  const TextFile small("0123456789abcdef\n", 0600);
  const auto with = [](const char* section, const char* field, const std::string& path) {
    return config_with(fmt::format(R"({{"{}": {{"{}": "{}"}}}})", section, field, path));
  };
  for (const Role role : {kPrefill, kDecode}) {
    CHECK(good_config(role, with("auth", "key_file", key.path())).auth.key != nullptr);
    CHECK(good_config(role, config_with("{}")).auth.key == nullptr);
    CHECK_THAT(problems_of(role, with("auth", "key_file", open.path())).at(0),
               Catch::Contains("has mode 0604: anybody on this host can use the key; chmod o-rwx it"));
    CHECK_THAT(problems_of(role, with("auth", "key_file", small.path())).at(0),
               Catch::Contains("holds 16 bytes, a key has 32 to 4096"));
    CHECK_THAT(problems_of(role, with("auth", "key_file", "/nowhere/key")).at(0),
               Catch::StartsWith("auth.key_file: '/nowhere/key' cannot be read"));
    CHECK(good_config(role, with("metrics", "token_file", small.path())).metrics_token == "0123456789abcdef");
    CHECK_THAT(problems_of(role, with("metrics", "token_file", "/nowhere/token")).at(0),
               Catch::StartsWith("metrics.token_file: "));
  }
}

TEST_CASE("config rules: with a key and a token listeners may leave this host") {
  const TextFile key("0123456789abcdef0123456789abcdef\n", 0600);
  const std::string patch = fmt::format(
      R"({{"auth": {{"key_file": "{0}"}}, "metrics": {{"listen": "0.0.0.0:9401", "token_file": "{0}"}}, )",
      key.path());
  CHECK(problems_of(kPrefill, config_with(patch + R"("bootstrap": {"listen": "0.0.0.0:8998"}})")).empty());
  CHECK(problems_of(kDecode, config_with(patch + R"("tcp": {"listen": "10.0.0.7:0"}})")).empty());
}

TEST_CASE("config rules: a key that is not known is refused in every section") {
  for (const char* section :
       {"topology", "engine_socket", "metrics", "shm", "tcp", "ucx", "timeouts", "limits", "log"}) {
    CAPTURE(section);
    for (const Role role : {kPrefill, kDecode}) {
      const Lines found = problems_of(role, config_with(setting(fmt::format("/{}/typo", section), "1")));
      REQUIRE(found.size() == 1);
      CHECK_THAT(found[0],
                 Catch::StartsWith(fmt::format("{}.typo: is not a known key; known here: ", section)));
      CHECK(problems_of(role, config_with(setting(fmt::format("/{}", section), "[]"))) ==
            Lines{fmt::format("{}: must be an object, is []", section)});
    }
  }
  const std::string known =
      "draft_layers, dtype, engine_socket, fabrics, insecure, instance, limits, log, metrics, model, "
      "page_size, "
      "ranks, shm, tcp, threads, timeouts, topology, ucx";
  CHECK(problems_of(kDecode, config_with(R"({"bootstrap": {}})")) ==
        Lines{"bootstrap: is not a known key; known here: auth, " + known + ", verify"});
  CHECK(problems_of(kPrefill, config_with(R"({"topologie": {}})")) ==
        Lines{"topologie: is not a known key; known here: auth, bootstrap, " + known});
  CHECK(problems_of(kPrefill, config_with(R"({"bootstrap": {"port": 1}})")) ==
        Lines{"bootstrap.port: is not a known key; known here: advertise, listen, registry"});
}

TEST_CASE("config rules: everything that is wrong is in one list") {
  const json document = config_with(R"({
    "instance": "", "page_size": 0, "topology": {"tp": 0}, "ranks": [9], "dtype": "bf17",
    "fabrics": ["smoke"],
    "engine_socket": {"mode": "rw"}, "timeouts": {"drain": "soon"}, "limits": {"rooms": 0},
    "metrics": {"listen": "10.0.0.1:1"}, "log": {"level": "loud"}, "extra": 1})");
  Lines keys;
  for (const std::string& line : problems_of(kDecode, document)) {
    keys.push_back(line.substr(0, line.find(':')));
  }
  CHECK(keys == Lines{"instance", "page_size", "topology.tp", "ranks", "dtype", "engine_socket.mode",
                      "fabrics", "timeouts.drain", "limits.rooms", "log.level", "extra", "metrics.listen"});
}
