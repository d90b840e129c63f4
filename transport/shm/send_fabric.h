#pragma once
// The prefill end of the shm fabric: copies strided runs straight from the source pool into the decode
// daemon's pools, which it maps from the descriptors that daemon passes over a Unix socket. One copy, no
// staging, nothing to do for the decode CPU.
//
// Rows are addressed physically (RowRun::dst_row) and checked against the mapped pool, not against the grant:
// whoever maps a pool can write all of it, so the decode daemon admits only daemons it trusts with its pools.
// A chunk may be posted before its destination pool has been announced; it waits for at most pool_wait. After
// a ChunkFailed the transfer stays failed (later chunks fail too) until cancel() or the end of the peer.

#include <memory>

#include "transport/fabric.h"
#include "transport/shm/options.h"

namespace kvferry {

class ShmSendFabric final : public SendFabric {
 public:
  /// Starts the threads. kInvalid names the option that is out of range.
  static Result<std::unique_ptr<ShmSendFabric>> create(ShmSendOptions options, FabricSink sink);
  ~ShmSendFabric() override;

  FabricKind kind() const override { return FabricKind::kShm; }
  /// A peer that is still being torn down is connected again after its PeerDown.
  void connect(PeerId peer, const FabricOffer& offer) override;
  void post(PeerId peer, ChunkJob job) override;
  /// Drained follows when the slice in progress, if any, has been copied.
  void cancel(PeerId peer, const TransferKey& key) override;
  void fence(PeerId peer) override;

 private:
  class Core;
  explicit ShmSendFabric(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace kvferry
