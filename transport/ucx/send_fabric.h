#pragma once
// The prefill end of the ucx fabric. One thread owns UCX; every call hands it a command and returns.
//
// Over shm and tcp, blocks go as eager active messages and the receiver places them. Over rdma, rows are put
// into the decode pool and the notice follows after a flush; slices that are strided at the destination go as
// blocks. One-sided puts must be real: where UCX would emulate them (the receiver's CPU would copy, and over
// TCP a broken connection would abort it), connect() ends in PeerDown with the reason.

#include <memory>

#include "transport/fabric.h"
#include "transport/ucx/ucx_options.h"

namespace kvferry {

struct UcxSendStats {
  std::uint64_t blocks = 0;  // active messages with payload
  std::uint64_t puts = 0;
  std::uint64_t packed_puts = 0;  // of these, from staging
  std::uint64_t staging_peak_bytes = 0;
  std::uint64_t wakeups = 0;  // of the fabric's thread
};

class UcxSendFabric final : public SendFabric {
 public:
  /// Refuses options out of range, rdma on a host without RDMA device, and a UCX that does not take our
  /// settings.
  static Result<std::unique_ptr<UcxSendFabric>> create(const UcxOptions& options, FabricSink sink);
  ~UcxSendFabric() override;

  FabricKind kind() const override { return FabricKind::kUcx; }
  void connect(PeerId peer, const FabricOffer& offer) override;
  void post(PeerId peer, ChunkJob job) override;
  void cancel(PeerId peer, const TransferKey& key) override;
  void fence(PeerId peer) override;

  UcxSendStats stats() const;

 private:
  class Core;
  explicit UcxSendFabric(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace kvferry
