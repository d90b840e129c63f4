#pragma once
// What a daemon reports about itself, in the daemon's words; turned into metrics here. Thread: the
// io_context's, except text().

#include <memory>
#include <string>

#include "common/daemon/config.h"
#include "common/daemon/report.h"
#include "common/handshake/verdict.h"

namespace kvferry {

class Metrics;

struct Gauges {
  std::uint64_t rooms = 0;
  std::uint64_t waiting = 0;
  std::uint64_t live_pages = 0;
  std::uint64_t quarantined_pages = 0;
  std::uint64_t engine_pages = 0;  // in attached pools, owned by their engines
  std::uint64_t engines = 0;
  std::uint64_t peers = 0;
  std::uint64_t stale_messages = 0;  // total so far
};

class Observer {
 public:
  Observer(Role role, const DaemonConfig& config);
  ~Observer();

  void transfer_ended(const TransferReport& report, const std::string& fabric);
  void handshake(const std::vector<Violation>& violations, bool accepted);
  void peer_up(PeerId peer, const std::string& name, const std::string& fabric, const std::string& carries);
  void peer_gone(PeerId peer);
  void block_rejected();
  void gauges(const Gauges& now);
  /// Prometheus text format.
  std::string text() const;

 private:
  Role role_;
  std::unique_ptr<Metrics> metrics_;
  std::uint64_t stale_seen_ = 0;
};

}  // namespace kvferry
