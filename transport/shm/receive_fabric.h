#pragma once
// The decode end of the shm fabric: listens on a Unix socket, passes the descriptors of its pools to each
// admitted prefill daemon, and turns that daemon's notices into Landed. It never touches a byte of KV.
//
// Because the peer writes by itself, close() stops nothing: pages may be reused only after the peer's drain
// or after PeerDown. A memfd cannot be taken back from a process that has mapped it, so fence() asks the peer
// to let go and PeerDown follows when the peer has closed its end: at once from a live daemon, by the kernel
// from a dead one. The kernel closes a dead process' descriptors only when its last thread has left user
// mode, so the end of the stream proves that no copy is running any more. A peer that is stopped (SIGSTOP)
// keeps its pages in quarantine until it goes on or dies.

#include <memory>

#include "transport/fabric.h"
#include "transport/shm/options.h"

namespace kvferry {

class ShmReceiveFabric final : public ReceiveFabric {
 public:
  /// Binds the socket and starts the thread. A socket file that nobody listens on is replaced; kConflict when
  /// a live daemon owns it.
  static Result<std::unique_ptr<ShmReceiveFabric>> create(ShmReceiveOptions options, FabricSink sink);
  ~ShmReceiveFabric() override;

  FabricKind kind() const override { return FabricKind::kShm; }
  bool receiver_places_bytes() const override { return false; }
  void add_pool(std::shared_ptr<const Pool> pool) override;
  void remove_pool(RankIndex rank) override;
  /// JSON {host_id, path, token, epoch}. The token is good for one connection; a second offer to the same
  /// peer replaces a token that has not been used.
  Result<FabricOffer> offer(PeerId peer) override;
  /// A grant that does not fit its pool comes back as Rejected with peer 0.
  void open(Grant grant) override;
  void close(const GrantKey& key) override;
  void fence(PeerId peer) override;

 private:
  class Core;
  explicit ShmReceiveFabric(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace kvferry
