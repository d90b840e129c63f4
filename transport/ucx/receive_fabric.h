#pragma once
// The decode end of the ucx fabric. One thread owns UCX; calls hand it commands.
//
// A connection exists once a hello has proved the token of an offer; blocks of any other session are dropped.
// Over shm and tcp the thread checks every block against its grant and places it, so close() alone is final.
// In put mode the peer writes into the registered pools by itself (the NIC keeps it inside them): there the
// source's drain or fence() must come before pages are reused.

#include <memory>

#include "transport/fabric.h"
#include "transport/ucx/ucx_options.h"

namespace kvferry {

struct UcxReceiveStats {
  std::uint64_t blocks = 0;     // placed
  std::uint64_t discarded = 0;  // of grants that are not open
  std::uint64_t strangers = 0;  // messages without an accepted session
  std::uint64_t wakeups = 0;    // of the fabric's thread
};

class UcxReceiveFabric final : public ReceiveFabric {
 public:
  static Result<std::unique_ptr<UcxReceiveFabric>> create(const UcxOptions& options, FabricSink sink);
  ~UcxReceiveFabric() override;

  FabricKind kind() const override { return FabricKind::kUcx; }
  bool receiver_places_bytes() const override;
  void add_pool(std::shared_ptr<const Pool> pool) override;
  void remove_pool(RankIndex rank) override;
  /// The token is good for one connection; a second offer to the same peer replaces an unused one.
  Result<FabricOffer> offer(PeerId peer) override;
  /// A grant that does not fit its pool comes back as Rejected with peer 0.
  void open(Grant grant) override;
  void close(const GrantKey& key) override;
  void fence(PeerId peer) override;

  UcxReceiveStats stats() const;

 private:
  class Core;
  explicit UcxReceiveFabric(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace kvferry
