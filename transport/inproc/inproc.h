#pragma once
// A fabric inside one thread, for tests and simulation. Calls only queue; every effect happens inside
// InprocNetwork::step(), one item at a time, in an order that the caller chooses. The receiver side is the
// same grant check as on a real network. Nothing here is thread safe: all objects of one network share a
// thread.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/fabric.h"
#include "transport/grant_table.h"
#include "transport/send_queue.h"

namespace kvferry {

class InprocSendFabric;
class InprocReceiveFabric;

/// Joins the two ends. Must outlive the fabrics made with it.
class InprocNetwork {
 public:
  InprocNetwork();
  ~InprocNetwork();
  InprocNetwork(const InprocNetwork&) = delete;
  InprocNetwork& operator=(const InprocNetwork&) = delete;

  /// Does one thing: the oldest queued call, or one block of a link that has some. `choice` picks among them
  /// (modulo their number): 0 is the oldest call while there are calls. False when nothing is left to do.
  bool step(std::uint64_t choice = 0);
  /// Steps until nothing is left.
  void run();
  bool idle() const;

 private:
  friend class InprocSendFabric;
  friend class InprocReceiveFabric;
  struct Link;
  struct Admitted {
    InprocReceiveFabric* receiver = nullptr;
    PeerId peer = 0;
  };

  void connect(InprocSendFabric& sender, PeerId peer, const std::string& token);
  void deliver(Link& link);
  void cut(Link* link, const Error& error);
  Link* sender_link(const InprocSendFabric& sender, PeerId peer);
  void forget(const void* fabric);

  std::deque<std::pair<const void*, std::function<void()>>> calls_;  // with the fabric they belong to
  std::vector<std::unique_ptr<Link>> links_;                         // in order of connecting
  std::map<std::string, Admitted> tokens_;
  std::uint64_t next_token_ = 1;
  Nanos clock_ = 0;  // one per step, so that times are the same in every run
};

class InprocSendFabric final : public SendFabric {
 public:
  InprocSendFabric(InprocNetwork& network, SendQueueLimits limits, FabricSink sink);
  ~InprocSendFabric() override;

  FabricKind kind() const override { return FabricKind::kInproc; }
  void connect(PeerId peer, const FabricOffer& offer) override;
  void post(PeerId peer, ChunkJob job) override;
  void cancel(PeerId peer, const TransferKey& key) override;
  void fence(PeerId peer) override;

 private:
  friend class InprocNetwork;
  InprocNetwork& network_;
  SendQueueLimits limits_;
  FabricSink sink_;
};

class InprocReceiveFabric final : public ReceiveFabric {
 public:
  InprocReceiveFabric(InprocNetwork& network, FabricSink sink);
  ~InprocReceiveFabric() override;

  FabricKind kind() const override { return FabricKind::kInproc; }
  bool receiver_places_bytes() const override { return true; }
  void add_pool(std::shared_ptr<const Pool> pool) override;
  void remove_pool(RankIndex rank) override;
  Result<FabricOffer> offer(PeerId peer) override;
  void open(Grant grant) override;
  void close(const GrantKey& key) override;
  void fence(PeerId peer) override;

 private:
  friend class InprocNetwork;
  InprocNetwork& network_;
  FabricSink sink_;
  GrantTable table_;
};

}  // namespace kvferry
