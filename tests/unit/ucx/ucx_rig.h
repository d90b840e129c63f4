#pragma once
// Both ends of the ucx fabric in this process, over the transport that a test names.

#include <memory>
#include <string>
#include <vector>

#include "tests/support/fabric_fixture.h"
#include "transport/ucx/receive_fabric.h"
#include "transport/ucx/send_fabric.h"

namespace kvferry::test {

inline UcxOptions over_shm() {
  UcxOptions options;
  options.transports = UcxTransports::kShm;
  return options;
}

inline UcxOptions over_tcp() {
  UcxOptions options;
  options.transports = UcxTransports::kTcp;
  options.device = "lo";
  return options;
}

/// The put path, with puts that UCX emulates: same code, same bytes, no NIC.
inline UcxOptions by_puts() {
  UcxOptions options = over_shm();
  options.allow_emulated_puts = true;
  options.staging_bytes = 64u << 10;
  return options;
}

struct NamedOptions {
  std::string name;
  UcxOptions options;
};
inline std::vector<NamedOptions> all_paths() {
  return {{"messages over shm", over_shm()}, {"messages over tcp", over_tcp()}, {"puts", by_puts()}};
}

template <class T>
T take(Result<T> result) {
  if (!result) {
    throw std::runtime_error(result.error().message);
  }
  return *std::move(result);
}

/// Fabrics go before the logs that their sinks write to.
struct UcxRig {
  explicit UcxRig(const UcxOptions& options) : UcxRig(options, options) {}
  UcxRig(const UcxOptions& send_options, const UcxOptions& receive_options)
      : receive(take(UcxReceiveFabric::create(receive_options, receive_log.sink()))),
        send(take(UcxSendFabric::create(send_options, send_log.sink()))) {}

  EventLog receive_log;
  EventLog send_log;
  std::unique_ptr<UcxReceiveFabric> receive;
  std::unique_ptr<UcxSendFabric> send;
};

}  // namespace kvferry::test
