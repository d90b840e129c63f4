#pragma once
// One fabric connection between two simulated daemons: the real send queue, block codec and grant table, with
// a network between them that has delays, stalls and an end. Source rows are read when a block lands, not
// when it is posted, as a NIC does; so a page that is given back too early at either end is noticed.
//
// Three kinds of fabric differ in who can stop a byte that is under way:
//   kPlaced    the receiver places each block (tcp, active messages): closing the grant is enough
//   kHardware  the sender writes, the receiver can destroy the connection (RDMA)
//   kShared    the sender copies into shared memory: only the sender, or its death, stops it

#include <functional>
#include <map>
#include <memory>
#include <set>

#include "tests/sim/schedule.h"
#include "tests/support/rng.h"
#include "transport/fabric.h"
#include "transport/grant_table.h"
#include "transport/send_queue.h"

namespace kvferry::sim {

enum class Reach { kPlaced, kHardware, kShared };

struct WireOptions {
  Reach reach = Reach::kPlaced;
  SendQueueLimits limits;
  Nanos latency = 20 * kMicro;
  std::size_t window = 4;  // blocks under way
};

/// Called for every span of the destination before (`written` false) and after it is written.
using OnPlace = std::function<void(const BlockHeader&, std::span<std::byte>, bool written)>;

class Wire : public std::enable_shared_from_this<Wire> {
 public:
  struct Ends {
    PeerId sender_peer = 0;  // the sender's number for the receiver
    PeerId receiver_peer = 0;
    FabricSink sender;  // handed over at once; the daemons queue
    FabricSink receiver;
    OnPlace place;
  };
  Wire(Schedule& time, std::uint64_t seed, WireOptions options, Ends ends);

  // The sender's calls.
  void post(ChunkJob job);
  void cancel(const TransferKey& key);
  void fence_by_sender(const Error& why);
  void sender_died();

  // The receiver's calls.
  void add_pool(std::shared_ptr<const Pool> pool) { table_.add_pool(std::move(pool)); }
  void remove_pool(RankIndex rank);
  void open(Grant grant);
  void close(const GrantKey& key);
  void fence_by_receiver(const Error& why);
  void receiver_died();

  /// The network's doing: nothing moves before `until`; or the connection is cut.
  void stall(Nanos until) { stalled_until_ = std::max(stalled_until_, until); }
  void reset(const Error& why);

  /// A byte may still land, whatever the receiver does.
  bool writing() const {
    return options_.reach == Reach::kShared && sender_alive_ && (sending_ || in_air_ > 0);
  }
  bool receiver_is_dead() const { return !receiver_alive_; }
  std::size_t queued() const { return queue_.chunk_count(); }

 private:
  struct Flight {
    SendQueue::Taken taken;
    TransferKey key;
  };
  void pump();
  void land(const std::shared_ptr<Flight>& flight);
  void place(const Flight& flight);
  void acknowledged(const std::shared_ptr<Flight>& flight);
  void stop_sending(const Error& why);
  void stop_receiving(const Error& why);
  void tell_sender_down();
  void drained_if_quiet(const TransferKey& key);
  Nanos trip();

  Schedule& time_;
  test::Rng rng_;
  WireOptions options_;
  Ends ends_;
  SendQueue queue_;
  GrantTable table_;
  std::map<TransferKey, std::size_t> flying_;  // not yet acknowledged
  std::set<TransferKey> cancelled_;
  std::size_t in_air_ = 0;
  bool sending_ = true;
  bool receiving_ = true;
  bool sender_alive_ = true;
  bool receiver_alive_ = true;
  bool sender_told_ = false;
  bool receiver_told_ = false;
  Error sender_error_;
  Nanos stalled_until_ = 0;
  Nanos last_landing_ = 0;
};

}  // namespace kvferry::sim
