#pragma once
// What an operator may choose about UCX. Everything else is fixed in settings.cc, because the wrong values
// corrupt data or kill the process on some UCX versions.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/result.h"

namespace kvferry {

/// Which UCX transports may carry bytes. kShm and kTcp use active messages that the receiver checks; kRdma
/// uses one-sided puts. UCX over TCP trusts whoever reaches its port: use it by name and on trusted networks
/// only.
enum class UcxTransports : std::uint8_t { kShm, kTcp, kRdma };
std::string_view to_string(UcxTransports transports);  // "shm", "tcp", "rdma"
Result<UcxTransports> parse_ucx_transports(std::string_view text);

struct UcxOptions {
  UcxTransports transports = UcxTransports::kRdma;
  /// Network devices in UCX's words ("eth0", "mlx5_0:1,mlx5_1:1"). Empty: "lo" for tcp (a TCP interface must
  /// be named, UCX would listen on all of them), "all" for rdma. Not used for shm.
  std::string device;
  /// Ports that UCX may listen on (tcp only), "first-last"; empty lets the system choose.
  std::string port_range;
  /// Registered ring for packing strided rows in put mode, 64 KiB to 2 MiB. Larger leaves the L2 cache and
  /// halves the speed.
  std::uint32_t staging_bytes = 1u << 20;
  /// Operations in flight per peer; 0 = 8 for shm, 16 for tcp, 64 for rdma.
  std::uint32_t window = 0;
  /// The fabric's thread polls for up to this long before it sleeps: see adaptive_spin.h. 0 = never polls.
  std::uint32_t spin_us = 100;
  /// From connect() to the receiver's welcome. A wrong token is never answered, so it ends here.
  std::uint32_t connect_timeout_ms = 10'000;
  /// Put mode: a chunk may overtake the announcement of its destination pool by this much.
  std::uint32_t pool_wait_ms = 5'000;
  /// For tests: lets the put path run where UCX emulates puts (shared memory), which the data path never
  /// does.
  bool allow_emulated_puts = false;

  bool put_mode() const { return transports == UcxTransports::kRdma || allow_emulated_puts; }
};

/// Ranges of the numbers, form of the port range, a named device for tcp, test options only with shm. One
/// message with every violation.
Result<void> validate(const UcxOptions& options);

/// The devices of this host that UCX could use for RDMA, e.g. "mlx5_0"; an error names the reason when there
/// are none.
Result<std::string> rdma_devices();

}  // namespace kvferry
