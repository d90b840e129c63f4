#pragma once
// Reads UCX's own description of an endpoint: which transports its lanes use and what for. 1.13 has no other
// way to ask. Pure text functions.

#include <string>
#include <string_view>
#include <vector>

namespace kvferry::ucx {

struct Lane {
  std::string transport;  // "posix/memory", "tcp/lo", "rc_mlx5/mlx5_0:1"
  std::string uses;       // "am am_bw#0 keepalive"
};

std::vector<Lane> parse_lanes(std::string_view info);

/// Distinct transports in lane order: "posix/memory, sysv/memory"; "none" without lanes.
std::string lane_names(const std::vector<Lane>& lanes);

/// True when puts go over an RDMA transport's own lane; false when UCX would emulate them by messages.
bool puts_are_native(const std::vector<Lane>& lanes);

}  // namespace kvferry::ucx
