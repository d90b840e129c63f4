#include "common/daemon/config.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <set>

#include "common/config/fields.h"
#include "common/handshake/descriptor_json.h"

namespace kvferry {
namespace {

using nlohmann::json;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kSocketPathMax = 100;    // of the 107 that a sockaddr_un holds
constexpr std::uint32_t kUidMax = 0xFFFFFFFE;  // one more is (uid_t)-1, "nobody at all"
constexpr std::uint32_t kRanksServedMax = 65536;
constexpr std::uint32_t kConnectionsMax = 16;  // as the hello of transport/tcp allows

HostPort read_address(FieldReader& in, std::string_view key, const HostPort& fallback,
                      bool port_zero = true) {
  const auto parsed = parse_host_port(in.text(key, fallback.to_string()), std::nullopt, port_zero);
  if (!parsed) {
    in.errors().add(in.path(key), parsed.error().message);
    return fallback;
  }
  return *parsed;
}

std::string read_socket_path(FieldReader& in, std::string_view key, std::string fallback) {
  std::string path = in.text(key, std::move(fallback));
  if (path.empty()) {
    in.errors().add(in.path(key), "is empty");
  }
  if (path.size() > kSocketPathMax) {
    in.errors().add(in.path(key), fmt::format("has {} characters; a Unix socket path has at most {}",
                                              path.size(), kSocketPathMax));
  }
  return path;
}

void read_engine_socket(FieldReader in, Role role, EngineSocketConfig& out) {
  out.path = read_socket_path(in, "path", fmt::format("/run/kvferry/{}.sock", to_string(role)));
  const std::string mode = in.text("mode", "0660");
  const char* mode_end = mode.data() + mode.size();
  const auto [end, error] = std::from_chars(mode.data(), mode_end, out.mode, 8);
  if (error != std::errc{} || end != mode_end || out.mode > 0777) {
    in.errors().add(in.path("mode"),
                    fmt::format("is '{}', must be an octal file mode such as \"0660\"", mode));
  }
  out.allowed_uids = in.numbers("allowed_uids", {}, kUidMax);
  out.allowed_gids = in.numbers("allowed_gids", {}, kUidMax);
  in.finish();
}

void read_fabrics(FieldReader& root, Role role, DaemonConfig& out) {
  out.fabrics = root.texts("fabrics", {"shm", "tcp"});
  std::set<std::string> seen;
  for (const std::string& name : out.fabrics) {
    if (name != "shm" && name != "tcp" && name != "ucx") {
      root.errors().add("fabrics", fmt::format("'{}' is not a fabric; known: shm, tcp, ucx", name));
    } else if (!seen.insert(name).second) {
      root.errors().add("fabrics", fmt::format("'{}' appears twice", name));
    }
  }
  if (out.fabrics.empty()) {
    root.errors().add("fabrics", "is empty; name at least one of shm, tcp, ucx");
  }
  FieldReader shm = root.object("shm");
  if (role == Role::kDecode) {
    out.shm.socket = read_socket_path(shm, "socket", "/run/kvferry/decode-shm.sock");
    if (!out.shm.socket.empty() && out.shm.socket.front() != '/') {
      shm.errors().add(
          shm.path("socket"),
          fmt::format("is '{}', must be an absolute path: prefill daemons must find it too", out.shm.socket));
    }
  } else {
    out.shm.copy_threads = static_cast<std::uint32_t>(shm.number("copy_threads", 0, 0, 64));
  }
  out.shm.allowed_uids = shm.numbers("allowed_uids", {}, kUidMax);
  shm.finish();
  FieldReader tcp = root.object("tcp");
  if (role == Role::kDecode) {
    out.tcp.listen = read_address(tcp, "listen", out.tcp.listen);
    out.tcp.advertise = tcp.text("advertise", "");
  } else {
    out.tcp.connections = static_cast<std::uint32_t>(tcp.number("connections", 1, 1, kConnectionsMax));
    out.tcp.congestion = tcp.text("congestion", "");
  }
  out.tcp.socket_buffer_bytes = tcp.bytes("socket_buffer", 1u << 20, 0, 1u << 30);
  tcp.finish();
  FieldReader ucx = root.object("ucx");
  out.ucx.transports = ucx.text("transports", "rdma");
  if (out.ucx.transports != "rdma" && out.ucx.transports != "shm" && out.ucx.transports != "tcp") {
    ucx.errors().add(ucx.path("transports"),
                     fmt::format("is '{}', must be rdma, shm or tcp", out.ucx.transports));
  }
  out.ucx.device = ucx.text("device", "");
  if (out.ucx.transports == "tcp" && out.ucx.device.empty()) {
    ucx.errors().add(
        ucx.path("device"),
        "is missing: UCX over TCP listens on every interface unless one is named, e.g. \"eth1\"");
  }
  out.ucx.staging_bytes = ucx.bytes("staging", 2u << 20, 64u << 10, 2u << 20);
  ucx.finish();
}

void read_threads(FieldReader in, ThreadConfig& out) {
  if (auto cpus = CpuSet::parse(in.text("cpus", ""))) {
    out.cpus = *std::move(cpus);
  } else {
    in.errors().add(in.path("cpus"), cpus.error().message);
  }
  out.spin_us = static_cast<std::uint32_t>(in.number("spin_us", 100, 0, 10'000));
  in.finish();
}

void read_topology(FieldReader& root, DaemonConfig& out) {
  FieldReader in = root.object("topology");
  const auto size = [&](std::string_view key, std::uint32_t max = kParallelSizeMax) {
    return static_cast<std::uint32_t>(in.number(key, 1, 1, max));
  };
  out.topology.tp = size("tp");
  out.topology.pp = size("pp");
  out.topology.cp = size("cp");
  const std::string split = in.text("cp_split", std::string(to_string(CpSplit::kNone)));
  if (const auto parsed = parse_cp_split(split)) {
    out.topology.cp_split = *parsed;
  } else {
    in.errors().add(in.path("cp_split"), parsed.error().message);
  }
  out.topology.dp = size("dp");
  out.topology.dcp = size("dcp");
  out.topology.dcp_interleave = size("dcp_interleave", kDcpInterleaveMax);
  out.topology.pp_layers = in.numbers("pp_layers", {}, 65536);
  in.finish();
  const std::uint64_t world =
      std::uint64_t{out.topology.tp} * out.topology.pp * out.topology.cp * out.topology.dp;
  // Asked for also where the topology is wrong: a key that nobody asks for is reported as unknown.
  std::vector<RankIndex> all(world <= kRanksServedMax ? world : 0);
  std::iota(all.begin(), all.end(), 0);
  out.ranks = root.numbers("ranks", all, kRanksServedMax - 1);
  if (world > kRanksServedMax) {
    root.errors().add(
        "topology", fmt::format("tp*pp*cp*dp is {}; at most {} ranks are supported", world, kRanksServedMax));
    return;
  }
  if (out.ranks.empty()) {
    root.errors().add("ranks", "is empty; leave it out to serve every rank of the topology");
  }
  std::set<RankIndex> seen;
  for (const RankIndex rank : out.ranks) {
    if (rank >= out.topology.rank_count()) {
      root.errors().add("ranks", fmt::format("{} is not a rank of this topology, which has {}", rank,
                                             out.topology.rank_count()));
    } else if (!seen.insert(rank).second) {
      root.errors().add("ranks", fmt::format("{} appears twice", rank));
    }
  }
}

void read_model(FieldReader& root, DaemonConfig& out) {
  out.model_name = root.required_text("model");
  bool known = false;
  if (!out.model_name.empty()) {
    auto model = load_geometry(out.model_name);
    known = model.has_value();
    if (known) {
      out.model = *std::move(model);
    } else {
      root.errors().add("model", model.error().message);
    }
  }
  const auto dtype = parse_dtype(root.text("dtype", std::string(to_string(out.model.dtype))));
  if (dtype) {
    out.model.dtype = *dtype;
  } else {
    root.errors().add("dtype", dtype.error().message);
  }
  out.model.draft_layers = static_cast<std::uint32_t>(root.number("draft_layers", 0, 0, 64));
  if (!known) {
    return;
  }
  if (const auto valid = validate(out.topology, out.model); !valid) {
    root.errors().add("topology", valid.error().message);
  }
}

void read_timeouts(FieldReader in, TimeoutConfig& out) {
  out.bootstrap = in.duration("bootstrap", out.bootstrap, milliseconds(100), hours(24));
  out.transfer = in.duration("transfer", out.transfer, milliseconds(100), hours(24));
  out.drain = in.duration("drain", out.drain, milliseconds(100), hours(1));
  out.connect = in.duration("connect", out.connect, milliseconds(100), seconds(600));
  out.heartbeat_interval =
      in.duration("heartbeat_interval", out.heartbeat_interval, milliseconds(50), seconds(60));
  out.heartbeat_misses =
      static_cast<std::uint32_t>(in.number("heartbeat_misses", out.heartbeat_misses, 1, 100));
  in.finish();
}

void read_limits(FieldReader in, LimitConfig& out) {
  const auto u32 = [&](std::string_view key, std::uint32_t fallback, std::uint32_t max) {
    return static_cast<std::uint32_t>(in.number(key, fallback, 1, max));
  };
  out.rooms = u32("rooms", out.rooms, 1u << 20);
  out.chunks_per_room = u32("chunks_per_room", out.chunks_per_room, 1u << 20);
  out.pages_per_room = u32("pages_per_room", out.pages_per_room, 1u << 22);
  out.peers = u32("peers", out.peers, 65536);
  out.engines = u32("engines", out.engines, 4096);
  out.http_body_bytes = in.bytes("http_body", out.http_body_bytes, 1024, 64u << 20);
  out.http_header_bytes =
      static_cast<std::uint32_t>(in.bytes("http_header", out.http_header_bytes, 512, 1u << 20));
  out.http_connections = u32("http_connections", out.http_connections, 65536);
  out.dp_rank_entries = u32("dp_rank_entries", out.dp_rank_entries, 1u << 24);
  in.finish();
}

void read_verify(FieldReader in, ConfigErrors& errors, VerifyConfig& out) {
  out.mode = in.text("mode", out.mode);
  if (out.mode != "off" && out.mode != "sampled" && out.mode != "full") {
    errors.add("verify.mode", fmt::format("is '{}', must be off, sampled or full", out.mode));
  }
  out.one_in = static_cast<VerifyRate>(in.number("one_in", out.one_in, 2, 1'000'000));
  in.finish();
}

void read_auth(FieldReader in, ConfigErrors& errors, AuthConfig& out) {
  out.key_file = in.text("key_file", "");
  out.window = in.duration("window", out.window, std::chrono::seconds(1), std::chrono::hours(1));
  if (!out.key_file.empty()) {
    auto key = SharedKey::load(out.key_file);
    if (key) {
      out.key = *std::move(key);
    } else {
      errors.add("auth.key_file", key.error().message);
    }
  }
  in.finish();
}

void read_metrics_token(const std::string& path, ConfigErrors& errors, DaemonConfig& out) {
  out.metrics_token_file = path;
  if (path.empty()) {
    return;
  }
  auto text = read_config_file(path);
  if (!text) {
    errors.add("metrics.token_file", text.error().message);
    return;
  }
  while (!text->empty() && (text->back() == '\n' || text->back() == '\r')) {
    text->pop_back();
  }
  if (text->size() < 16) {
    errors.add("metrics.token_file",
               fmt::format("'{}' holds {} characters, a token has at least 16", path, text->size()));
  }
  out.metrics_token = *std::move(text);
}

// What is open beyond this host must be authenticated, or asked for in words.
void check_exposure(Role role, const DaemonConfig& config, ConfigErrors& errors) {
  if (config.insecure) {
    return;
  }
  const auto check = [&](const std::string& key, const HostPort& address, bool guarded, const char* guard) {
    if (!guarded && !is_loopback(address.host)) {
      errors.add(key, fmt::format(
                          "'{}' is not a loopback address, and who connects is not authenticated; set {}, or "
                          "\"insecure\": true if this network is trusted",
                          address.to_string(), guard));
    }
  };
  check("metrics.listen", config.metrics_listen, !config.metrics_token.empty(), "metrics.token_file");
  const bool keyed = config.auth.key != nullptr;
  if (role == Role::kPrefill) {
    check("bootstrap.listen", config.bootstrap_listen, keyed, "auth.key_file");
  } else if (std::find(config.fabrics.begin(), config.fabrics.end(), "tcp") != config.fabrics.end()) {
    check("tcp.listen", config.tcp.listen, keyed, "auth.key_file");
  }
  if (config.ucx.transports == "tcp" && config.ucx.device != "lo" &&
      std::find(config.fabrics.begin(), config.fabrics.end(), "ucx") != config.fabrics.end()) {
    errors.add("ucx.device",
               fmt::format("'{}' is not lo: anyone who reaches a UCX TCP port can write this process's "
                           "memory; set \"insecure\": true on a trusted network only",
                           config.ucx.device));
  }
}

}  // namespace

Result<DaemonConfig> parse_daemon_config(Role role, std::string_view text, std::string_view source) {
  KVF_TRY(const json document, parse_config_text(text, source));
  ConfigErrors errors;
  DaemonConfig out;
  FieldReader root(&document, "", errors);
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  out.instance = root.text("instance", fmt::format("{}-{}", host, to_string(role)));
  if (out.instance.empty() || out.instance.size() > 128) {
    errors.add("instance", "must have 1 to 128 characters");
  }
  out.page_size = static_cast<std::uint32_t>(root.number("page_size", 64, 1, 65536));
  read_topology(root, out);
  read_model(root, out);
  read_engine_socket(root.object("engine_socket"), role, out.engine_socket);
  FieldReader metrics = root.object("metrics");
  out.metrics_listen = read_address(
      metrics, "listen", {"127.0.0.1", static_cast<std::uint16_t>(role == Role::kPrefill ? 9401 : 9402)});
  read_metrics_token(metrics.text("token_file", ""), errors, out);
  metrics.finish();
  read_auth(root.object("auth"), errors, out.auth);
  read_fabrics(root, role, out);
  read_threads(root.object("threads"), out.threads);
  read_timeouts(root.object("timeouts"), out.timeouts);
  read_limits(root.object("limits"), out.limits);
  out.insecure = root.flag("insecure", false);
  FieldReader logging = root.object("log");
  const std::string level = logging.text("level", "info");
  if (!log::parse_level(level, out.log_level)) {
    errors.add("log.level", fmt::format("is '{}', must be debug, info, warn or error", level));
  }
  logging.finish();
  if (role == Role::kDecode) {
    read_verify(root.object("verify"), errors, out.verify);
  }
  if (role == Role::kPrefill) {
    FieldReader bootstrap = root.object("bootstrap");
    out.bootstrap_listen = read_address(bootstrap, "listen", out.bootstrap_listen);
    out.bootstrap_advertise = bootstrap.text("advertise", "");
    out.registry = bootstrap.text("registry", "");
    if (!out.registry.empty()) {
      const auto parsed = parse_host_port(out.registry, 8998);
      if (!parsed) {
        errors.add("bootstrap.registry", parsed.error().message);
      }
    }
    bootstrap.finish();
  }
  root.finish();
  check_exposure(role, out, errors);
  if (!errors.ok()) {
    std::string all;
    for (const std::string& line : errors.list) {
      all += fmt::format("{}{}: {}", all.empty() ? "" : "\n", source, line);
    }
    return fail(Error{Code::kInvalid, all});
  }
  return out;
}

Result<DaemonConfig> load_daemon_config(Role role, const std::string& path) {
  KVF_TRY(const std::string text, read_config_file(path));
  return parse_daemon_config(role, text, path);
}

std::string print_daemon_config(Role role, const DaemonConfig& config) {
  json out = {
      {"instance", config.instance},
      {"model", config.model_name},
      {"dtype", to_string(config.model.dtype)},
      {"draft_layers", config.model.draft_layers},
      {"page_size", config.page_size},
      {"topology", topology_to_json(config.topology)},
      {"ranks", config.ranks},
      {"engine_socket",
       {{"path", config.engine_socket.path},
        {"mode", fmt::format("{:04o}", config.engine_socket.mode)},
        {"allowed_uids", config.engine_socket.allowed_uids},
        {"allowed_gids", config.engine_socket.allowed_gids}}},
      {"metrics", {{"listen", config.metrics_listen.to_string()}, {"token_file", config.metrics_token_file}}},
      {"auth", {{"key_file", config.auth.key_file}, {"window", format_duration(config.auth.window)}}},
      {"fabrics", config.fabrics},
      {"ucx",
       {{"transports", config.ucx.transports},
        {"device", config.ucx.device},
        {"staging", config.ucx.staging_bytes}}},
      {"timeouts",
       {{"bootstrap", format_duration(config.timeouts.bootstrap)},
        {"transfer", format_duration(config.timeouts.transfer)},
        {"drain", format_duration(config.timeouts.drain)},
        {"connect", format_duration(config.timeouts.connect)},
        {"heartbeat_interval", format_duration(config.timeouts.heartbeat_interval)},
        {"heartbeat_misses", config.timeouts.heartbeat_misses}}},
      {"limits",
       {{"rooms", config.limits.rooms},
        {"chunks_per_room", config.limits.chunks_per_room},
        {"pages_per_room", config.limits.pages_per_room},
        {"peers", config.limits.peers},
        {"engines", config.limits.engines},
        {"http_body", config.limits.http_body_bytes},
        {"http_header", config.limits.http_header_bytes},
        {"http_connections", config.limits.http_connections},
        {"dp_rank_entries", config.limits.dp_rank_entries}}},
      {"threads", {{"cpus", config.threads.cpus.text()}, {"spin_us", config.threads.spin_us}}},
      {"insecure", config.insecure},
      {"log",
       {{"level", config.log_level == log::Level::kDebug  ? "debug"
                  : config.log_level == log::Level::kInfo ? "info"
                  : config.log_level == log::Level::kWarn ? "warn"
                                                          : "error"}}},
  };
  if (role == Role::kPrefill) {
    out["bootstrap"] = {{"listen", config.bootstrap_listen.to_string()},
                        {"advertise", config.bootstrap_advertise},
                        {"registry", config.registry}};
    out["shm"] = {{"copy_threads", config.shm.copy_threads}, {"allowed_uids", config.shm.allowed_uids}};
    out["tcp"] = {{"connections", config.tcp.connections},
                  {"congestion", config.tcp.congestion},
                  {"socket_buffer", config.tcp.socket_buffer_bytes}};
  } else {
    out["verify"] = {{"mode", config.verify.mode}, {"one_in", config.verify.one_in}};
    out["shm"] = {{"socket", config.shm.socket}, {"allowed_uids", config.shm.allowed_uids}};
    out["tcp"] = {{"listen", config.tcp.listen.to_string()},
                  {"advertise", config.tcp.advertise},
                  {"socket_buffer", config.tcp.socket_buffer_bytes}};
  }
  return out.dump(2);
}

}  // namespace kvferry
