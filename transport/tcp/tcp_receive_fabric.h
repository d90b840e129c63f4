#pragma once
// The decode daemon's end of the tcp fabric: one listener, one thread. Every block is checked against the
// grants before a byte of it is read, so close() alone guarantees that nothing can land any more. A peer that
// breaks the rules loses its connection; whoever has no token gets no answer, little time and few
// connections.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/fabric.h"
#include "transport/tcp/socket.h"

namespace kvferry {

struct TcpReceiveConfig {
  std::string host = "127.0.0.1";  // numeric address to listen on
  std::uint16_t port = 0;          // 0: the system chooses
  std::string advertise;           // numeric address that peers connect to; default `host`
  TcpSocketOptions socket;
  Nanos hello_deadline = 5'000'000'000;  // from accept to a complete hello
  std::uint32_t strangers_max = 64;      // connections without a hello; above it the oldest one goes
  std::uint32_t peers_max = 1024;        // offered or connected
  Nanos spin_max = 100'000;              // polling before sleep: see adaptive_spin.h
};

/// Totals since start, for metrics.
struct TcpReceiveCounters {
  std::uint64_t placed_bytes = 0;
  std::uint64_t discarded_blocks = 0;  // late blocks of closed grants
  std::uint64_t discarded_bytes = 0;
  std::uint64_t violations = 0;  // connections closed because the peer broke the rules
  std::uint64_t strangers = 0;   // connections closed before a valid hello
};

class TcpReceiveFabric final : public ReceiveFabric {
 public:
  /// Listens and starts the thread. kInvalid for a wildcard address without `advertise`, kIo when the system
  /// refuses.
  static Result<std::unique_ptr<TcpReceiveFabric>> create(TcpReceiveConfig config, FabricSink sink);
  ~TcpReceiveFabric() override;

  FabricKind kind() const override { return FabricKind::kTcp; }
  bool receiver_places_bytes() const override { return true; }
  void add_pool(std::shared_ptr<const Pool> pool) override;
  void remove_pool(RankIndex rank) override;
  Result<FabricOffer> offer(PeerId peer) override;
  /// A grant that cannot be opened comes back as Rejected with peer 0.
  void open(Grant grant) override;
  void close(const GrantKey& key) override;
  void fence(PeerId peer) override;

  std::uint16_t port() const;
  TcpReceiveCounters counters() const;

 private:
  class Impl;
  explicit TcpReceiveFabric(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
