#include "transport/ucx/settings.h"

#include "transport/ucx/put_limits.h"

namespace kvferry::ucx {
namespace {

// Shared memory is fastest with 32 KiB segments; TCP needs 256 KiB to get past the per-segment cost
// (measured: 0.22 of memcpy at 8 KiB, 0.6 to 0.8 at 256 KiB).
constexpr std::uint32_t kShmSegment = 32u << 10;
constexpr std::uint32_t kTcpSegment = 256u << 10;
constexpr std::uint32_t kSegmentReserve = 512;  // UCX's headers and ours
constexpr unsigned kPrefixedKeysSince = 114;

std::string transport_list(const UcxOptions& options) {
  switch (options.transports) {
    case UcxTransports::kShm:
      return "posix,sysv";
    case UcxTransports::kTcp:
      return "tcp";
    case UcxTransports::kRdma:
      return "rc,ud,self";
  }
  return "";
}

void add_shm(std::vector<Setting>& out, bool prefixed) {
  const std::string segment = std::to_string(kShmSegment);
  for (const std::string prefix : {"POSIX_", "SYSV_"}) {
    // 1.13 knows the keys of both by the name of their common part.
    const std::string name = prefixed ? prefix : "MM_";
    out.emplace_back(name + "SEG_SIZE", segment);
    out.emplace_back(name + "ERROR_HANDLING", "y");
    if (!prefixed) {
      break;
    }
  }
}

void add_tcp(std::vector<Setting>& out, const UcxOptions& options, bool prefixed) {
  const std::string name = prefixed ? "TCP_" : "";
  out.emplace_back(name + "TX_SEG_SIZE", std::to_string(kTcpSegment));
  out.emplace_back(name + "RX_SEG_SIZE", std::to_string(kTcpSegment));
  out.emplace_back(name + "PUT_ENABLE", "n");
  if (!options.port_range.empty()) {
    out.emplace_back(name + "PORT_RANGE", options.port_range);
  }
}

}  // namespace

std::vector<Setting> settings(const UcxOptions& options, unsigned version) {
  const bool prefixed = version >= kPrefixedKeysSince;
  std::vector<Setting> out{
      {"TLS", transport_list(options)},
      {"KEEPALIVE_INTERVAL", "1s"},  // 20 s by default: too long to notice a dead daemon over shared memory
      {"ADDRESS_VERSION", "v2"},     // v1 lacks the segment size; a receiver with smaller segments aborts
  };
  if (version < 116) {
    out.emplace_back("PROTO_ENABLE", "n");  // aborts on native puts in 1.13
  }
  switch (options.transports) {
    case UcxTransports::kShm:
      add_shm(out, prefixed);
      break;
    case UcxTransports::kTcp:
      out.emplace_back("NET_DEVICES", options.device.empty() ? "lo" : options.device);
      add_tcp(out, options, prefixed);
      break;
    case UcxTransports::kRdma:
      out.emplace_back("NET_DEVICES", options.device.empty() ? "all" : options.device);
      break;
  }
  if (options.transports != UcxTransports::kRdma) {
    // Zero-copy sends assert on some disconnects, and a rendezvous would let the peer read our memory.
    out.emplace_back("ZCOPY_THRESH", "inf");
    out.emplace_back("RNDV_THRESH", "inf");
  }
  return out;
}

std::uint32_t payload_max(const UcxOptions& options) {
  switch (options.transports) {
    case UcxTransports::kShm:
      return kShmSegment - kSegmentReserve;
    case UcxTransports::kTcp:
      return kTcpSegment - kSegmentReserve;
    case UcxTransports::kRdma:
      return static_cast<std::uint32_t>(kPutModeBlocks.payload_bytes_max);
  }
  return 0;
}

std::uint64_t am_header_limit(const UcxOptions& options) {
  return options.transports == UcxTransports::kShm ? kShmSegment : UINT64_MAX;
}

std::uint64_t am_header_need(const UcxOptions& options) {
  return options.transports == UcxTransports::kRdma ? 512 : payload_max(options);
}

std::uint32_t window(const UcxOptions& options) {
  if (options.window != 0) {
    return options.window;
  }
  switch (options.transports) {
    case UcxTransports::kShm:
      return 8;
    case UcxTransports::kTcp:
      return 16;
    case UcxTransports::kRdma:
      return 64;
  }
  return 8;
}

}  // namespace kvferry::ucx
