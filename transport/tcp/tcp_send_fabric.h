#pragma once
// The prefill daemon's end of the tcp fabric: one thread, a few streams per peer. Source pages are read until
// ChunkDone (or Drained, or PeerDown) and not after. ChunkDone means that the system has taken the bytes;
// that they landed is known at the decode side.

#include <cstdint>
#include <memory>

#include "transport/fabric.h"
#include "transport/send_queue.h"
#include "transport/tcp/socket.h"

namespace kvferry {

struct TcpSendConfig {
  std::uint32_t streams = 1;  // connections per peer, 1..16
  SendQueueLimits queue;
  TcpSocketOptions socket;
  Nanos connect_deadline = 5'000'000'000;  // from connect() to the last stream's welcome
  Nanos spin_max = 100'000;                // polling before sleep: see adaptive_spin.h
};

class TcpSendFabric final : public SendFabric {
 public:
  /// Starts the thread. kInvalid for a number of streams outside 1..16 or a congestion control that this
  /// system does not have, kIo when the system refuses.
  static Result<std::unique_ptr<TcpSendFabric>> create(const TcpSendConfig& config, FabricSink sink);
  ~TcpSendFabric() override;

  FabricKind kind() const override { return FabricKind::kTcp; }
  /// A peer that is connected already is fenced first.
  void connect(PeerId peer, const FabricOffer& offer) override;
  void post(PeerId peer, ChunkJob job) override;
  void cancel(PeerId peer, const TransferKey& key) override;
  void fence(PeerId peer) override;

 private:
  class Impl;
  explicit TcpSendFabric(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
