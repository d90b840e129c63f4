#pragma once
// The state of the send side; everything below the command queue runs on the worker's thread. send_setup.cc
// holds connections, send_datapath.cc transfers and blocks, send_puts.cc the one-sided path.

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/block_cutter.h"
#include "transport/send_order.h"
#include "transport/ucx/endpoint.h"
#include "transport/ucx/farewell.h"
#include "transport/ucx/memory.h"
#include "transport/ucx/outbox.h"
#include "transport/ucx/progress.h"
#include "transport/ucx/put_cutter.h"
#include "transport/ucx/send_fabric.h"
#include "transport/ucx/staging.h"
#include "transport/ucx/wire.h"
#include "transport/ucx/worker.h"

struct ucp_rkey;

namespace kvferry {

class UcxSendFabric::Core {
 public:
  Core(const UcxOptions& options, FabricSink sink) : options_(options), sink_(std::move(sink)) {}
  ~Core();
  Result<void> start();

  void connect(PeerId id, const FabricOffer& offer);
  void post(PeerId id, ChunkJob job);
  void cancel(PeerId id, const TransferKey& key);
  void fence(PeerId id);
  UcxSendStats stats() const;

 private:
  struct Peer;
  struct Transfer;

  struct RemoteKeys {
    ucx::RemotePool pool;
    std::vector<ucp_rkey*> keys;
  };

  struct Chunk {
    ChunkJob job;
    ChunkJob block_job;  // what goes by blocks; shares the source and the aux bytes
    std::unique_ptr<BlockCutter> blocks;
    std::unique_ptr<ucx::PutCutter> puts;
    std::shared_ptr<RemoteKeys> keys;
    ucx::PutSegment segment;  // cut, but not posted for want of a staging slot
    bool segment_waits = false;
    bool prepared = false;
    bool posted = false;  // everything is under way or done
    bool failed = false;  // told already; only its memory has to wait
    Transfer* transfer = nullptr;
    std::uint32_t in_flight = 0;
    std::uint64_t bytes = 0;
    std::uint64_t writes = 0;
    Nanos first_post = 0;
    Nanos last_done = 0;
    Nanos pack = 0;
  };

  /// What follows the last chunk of a transfer, or its cancellation.
  enum class Tail : std::uint8_t { kNone, kFlushing, kFlushed, kDone };

  struct Transfer {
    TransferKey key;
    Peer* peer = nullptr;
    std::deque<std::unique_ptr<Chunk>> chunks;
    std::size_t next = 0;  // first chunk that is not wholly posted
    std::uint64_t total_bytes = 0;
    std::uint64_t total_blocks = 0;
    std::uint64_t put_bytes = 0;
    std::uint64_t bytes_left = 0;  // to be posted
    Tail tail = Tail::kNone;
    bool failed = false;
    std::uint32_t cancels = 0;  // Drained owed
    std::int64_t pool_deadline = 0;
  };

  struct Peer {
    enum class State : std::uint8_t { kConnecting, kUp, kClosing };
    PeerId id = 0;
    State state = State::kConnecting;
    ucx::Session session = 0;
    std::unique_ptr<ucx::Endpoint> endpoint;  // null when it could not even be made
    ucx::Outbox outbox;
    ucx::Farewell farewell;
    std::int64_t connect_deadline = 0;
    std::string carries;
    Error down;  // why it is closing
    std::map<TransferKey, std::unique_ptr<Transfer>> transfers;
    SendOrder<Transfer*> order;  // all of them, by bytes left
    std::unordered_map<RankIndex, std::shared_ptr<RemoteKeys>> pools;
    std::vector<std::shared_ptr<RemoteKeys>> retired;  // replaced; keys may still be in use
  };

  // send_setup.cc
  void do_connect(PeerId id, const FabricOffer& offer);
  Result<void> open_peer(Peer& peer, const FabricOffer& offer);
  Result<void> check_offer(const ucx::OfferText& offer) const;
  void do_fence(PeerId id);
  void begin_close(Peer& peer, Error error, bool say_bye);
  bool finish_close(Peer& peer);
  void on_message(std::uint32_t id, const ucx::Message& message);
  void on_welcome(Peer& peer);
  void on_stop();
  void pump();
  void pump_peer(Peer& peer);
  Peer* find_session(std::span<const std::byte> header);
  Peer* find_peer(PeerId id);

  // send_datapath.cc
  void do_post(PeerId id, ChunkJob job);
  void do_cancel(PeerId id, const TransferKey& key);
  Transfer& transfer_for(Peer& peer, const TransferKey& key);
  void erase_transfer(Peer& peer, const TransferKey& key);
  void fail_transfer(Transfer& transfer, const Error& error);
  void pump_transfers(Peer& peer);
  void reap(Peer& peer);
  bool reap_transfer(Transfer& transfer);
  bool step(Transfer& transfer);
  bool step_tail(Transfer& transfer);
  bool prepare(Chunk& chunk);
  bool post_block(Chunk& chunk);
  void post_notice(Transfer& transfer, ucx::Op* op);
  void on_block(Peer& peer, const ucx::Message& message);
  void count_post(Chunk& chunk, std::uint64_t bytes);
  static void chunk_op_done(ucx::Op& op, bool ok);
  static void flush_done(ucx::Op& op, bool ok);

  // send_puts.cc
  Result<void> start_puts();
  bool prepare_puts(Chunk& chunk);
  bool post_put(Chunk& chunk);
  void on_pool(Peer& peer, const ucx::Message& message);
  void on_no_pool(Peer& peer, const ucx::Message& message);
  void drop_keys(Peer& peer);
  Result<void> register_source(const std::shared_ptr<const Pool>& pool);
  static void put_done(ucx::Op& op, bool ok);

  const UcxOptions options_;
  const FabricSink sink_;
  CutLimits cut_limits_;
  CutBlock scratch_;
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  std::unordered_map<ucx::Session, Peer*> sessions_;
  std::unique_ptr<ucx::Staging> staging_;
  std::map<const Pool*, std::unique_ptr<ucx::PoolRegistration>> sources_;
  std::atomic<std::uint64_t> blocks_{0};
  std::atomic<std::uint64_t> puts_{0};
  std::atomic<std::uint64_t> packed_{0};
  std::unique_ptr<ucx::Progress> progress_;  // last: its thread uses everything above
};

}  // namespace kvferry
