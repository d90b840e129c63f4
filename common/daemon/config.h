#pragma once
// What both daemons read from their configuration file. Units: durations in nanoseconds, sizes in bytes.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/auth/shared_key.h"
#include "common/base/cpu_set.h"
#include "common/base/host_port.h"
#include "common/base/ids.h"
#include "common/base/log.h"
#include "common/base/result.h"
#include "common/handshake/descriptor.h"
#include "common/model/geometry.h"
#include "common/topology/topology.h"
#include "common/verify/digest.h"

namespace kvferry {

using Duration = std::chrono::nanoseconds;

struct EngineSocketConfig {
  std::string path;
  std::uint32_t mode = 0660;
  std::vector<std::uint32_t> allowed_uids;  // empty: the daemon's own uid and root
  std::vector<std::uint32_t> allowed_gids;
};

struct ShmConfig {
  std::string socket;              // decode: where pools are handed to prefill daemons of this host
  std::uint32_t copy_threads = 0;  // prefill; 0: what a calibration at start finds worth it
  std::vector<std::uint32_t> allowed_uids;
};

struct TcpConfig {
  HostPort listen{"127.0.0.1", 0};  // decode: where blocks arrive
  std::string advertise;            // host that prefill dials; empty: the listen host
  // Prefill, per peer. One thread serves all, so more of them are no faster by themselves, and slower for a
  // few pages: each has a window of its own to open.
  std::uint32_t connections = 1;
  std::string congestion;                        // prefill: congestion control; empty: the system's choice
  std::uint64_t socket_buffer_bytes = 1u << 20;  // per direction; 0: the kernel's own tuning
};

struct UcxConfig {
  std::string transports = "rdma";  // rdma | shm | tcp
  std::string device;               // UCX_NET_DEVICES; required for tcp
  std::uint64_t staging_bytes = 2u << 20;
};

struct ThreadConfig {
  CpuSet cpus;                  // of the fabrics' threads
  std::uint32_t spin_us = 100;  // they poll for up to this long before they sleep; 0: never

  Duration spin() const { return std::chrono::microseconds(spin_us); }
};

struct TimeoutConfig {
  Duration bootstrap = std::chrono::seconds(300);  // room known here, the other side not there yet
  Duration transfer = std::chrono::seconds(300);   // decode: grant to landing; prefill: without progress
  Duration drain = std::chrono::seconds(30);       // stop to drained, then the peer is fenced
  Duration connect = std::chrono::seconds(5);      // one HTTP exchange or fabric connection attempt
  Duration heartbeat_interval = std::chrono::seconds(1);
  std::uint32_t heartbeat_misses = 3;

  /// A peer that says nothing for longer is lost.
  Duration silence_max() const { return heartbeat_interval * heartbeat_misses; }
};

struct VerifyConfig {
  std::string mode = "sampled";  // off, sampled, full: how much of each room is compared with what prefill
  VerifyRate one_in = 16;        // meant to send; sampled: one (layer, range of tokens) in so many

  VerifyRate rate() const { return mode == "off" ? kVerifyOff : mode == "full" ? kVerifyFull : one_in; }
};

struct AuthConfig {
  std::string key_file;                        // empty: peers are not authenticated
  Duration window = std::chrono::seconds(30);  // a signed request is good for so long
  std::shared_ptr<const SharedKey> key;        // read from key_file
};

struct LimitConfig {
  std::uint32_t rooms = 4096;  // alive at once, per daemon
  std::uint32_t chunks_per_room = 4096;
  std::uint32_t pages_per_room = 1u << 20;
  std::uint32_t peers = 256;
  std::uint32_t engines = 64;
  std::uint64_t http_body_bytes = 1u << 20;
  std::uint32_t http_header_bytes = 16u << 10;
  std::uint32_t http_connections = 256;
  std::uint32_t dp_rank_entries = 65536;  // bootstrap server: rooms registered with /register_dp_rank
};

struct DaemonConfig {
  std::string instance;
  std::string model_name;  // as written: preset or path
  ModelGeometry model;  // draft_layers: what the configuration says, 0 unless the draft model's KV is to move
  std::uint32_t page_size = 64;
  Topology topology;
  std::vector<RankIndex> ranks;  // served by this daemon; default: all
  EngineSocketConfig engine_socket;
  HostPort metrics_listen{"127.0.0.1", 0};
  std::vector<std::string> fabrics;  // in order of preference
  ShmConfig shm;
  TcpConfig tcp;
  UcxConfig ucx;
  ThreadConfig threads;
  TimeoutConfig timeouts;
  LimitConfig limits;
  VerifyConfig verify;  // decode
  AuthConfig auth;
  std::string metrics_token_file;
  std::string metrics_token;  // read from it; empty: metrics are for everybody who reaches the listener
  bool insecure = false;
  log::Level log_level = log::Level::kInfo;
  // prefill only
  HostPort bootstrap_listen{"127.0.0.1", 8998};
  std::string bootstrap_advertise;  // host that decode dials; empty: the listen host
  std::string registry;             // host:port of another daemon's bootstrap server; empty: embedded
};

/// Parses and validates a whole configuration. The Error's message has one line per problem, all of them.
Result<DaemonConfig> parse_daemon_config(Role role, std::string_view text, std::string_view source);
Result<DaemonConfig> load_daemon_config(Role role, const std::string& path);

/// The effective configuration, every key present, in the format that parse_daemon_config reads.
std::string print_daemon_config(Role role, const DaemonConfig& config);

}  // namespace kvferry
