#pragma once
// The state of the receive side; everything below the command queue runs on the worker's thread.
// receive_setup.cc holds pools and connections, receive_datapath.cc blocks and notices.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "transport/grant_table.h"
#include "transport/ucx/endpoint.h"
#include "transport/ucx/farewell.h"
#include "transport/ucx/memory.h"
#include "transport/ucx/outbox.h"
#include "transport/ucx/progress.h"
#include "transport/ucx/receive_fabric.h"
#include "transport/ucx/wire.h"
#include "transport/ucx/worker.h"

namespace kvferry {

class UcxReceiveFabric::Core {
 public:
  Core(const UcxOptions& options, FabricSink sink) : options_(options), sink_(std::move(sink)) {}
  ~Core();
  Result<void> start();

  const UcxOptions& options() const { return options_; }
  void add_pool(std::shared_ptr<const Pool> pool);
  void remove_pool(RankIndex rank);
  Result<FabricOffer> offer(PeerId id);
  void open(Grant grant);
  void close(const GrantKey& key);
  void fence(PeerId id);
  UcxReceiveStats stats() const;

 private:
  struct Hello {
    ucx::Session session = 0;
    std::vector<std::byte> address;
    std::shared_ptr<ucx::Worker> worker;  // that the hello came to
  };

  /// One accepted connection and its way back, which exists mainly for its error handler.
  struct Link {
    ucx::Session session = 0;
    std::unique_ptr<ucx::Endpoint> endpoint;
    ucx::Outbox outbox;
    ucx::Farewell farewell;
    bool broken = false;  // to be closed by the next pump, for the reason in `down`
    Error down;
    std::optional<GrantKey> discarded;  // last grant whose late bytes were reported
  };

  struct Peer {
    PeerId id = 0;
    std::optional<ucx::Token> token;
    std::shared_ptr<ucx::Worker> worker;  // whose address went out with the token
    std::optional<Hello> hello;           // accepted, waits for its endpoint or for the end of an older link
    std::unique_ptr<Link> link;
  };

  // receive_setup.cc
  void do_add_pool(const std::shared_ptr<const Pool>& pool);
  void do_remove_pool(RankIndex rank);
  Result<std::vector<std::byte>> do_offer(PeerId id, const ucx::Token& token);
  void do_fence(PeerId id);
  /// Queues a change of the grants for the worker's thread.
  void call(std::function<void()> change);
  void run_calls();
  void do_open(Grant grant);
  void do_close(const GrantKey& key);
  Result<std::string> describe_pool(const ucx::PoolRegistration& registration) const;
  void on_message(std::uint32_t id, const ucx::Message& message);
  void on_hello(const ucx::Message& message);
  void open_link(Peer& peer);
  void break_link(Link& link, Error error);
  void begin_close(Link& link, bool say_bye);
  void pump();
  void pump_peer(Peer& peer);
  void on_stop();
  Peer* find_session(std::span<const std::byte> header);
  void reject(PeerId peer, Error error);

  // receive_datapath.cc
  void on_block(const ucx::Message& message);
  void on_rows(Peer& peer, const ucx::BlockMessage& message, std::span<const std::byte> payload);
  void on_notice(Peer& peer, const ucx::BlockMessage& message);
  void refuse(Peer& peer, const GrantKey& key, Refusal refusal);
  void landed(fabric_event::Landed event);

  const UcxOptions options_;
  const FabricSink sink_;
  GrantTable table_;
  // Changes of the grants, in order. They have a queue of their own because a block may arrive within the
  // same round of progress as its open(): then they are carried out before it is judged.
  std::mutex calls_mutex_;  // guards calls_
  std::vector<std::function<void()>> calls_;
  std::map<TransferKey, std::uint64_t> put_bytes_;  // announced by notices, until landed or closed
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  std::unordered_map<ucx::Session, Peer*> sessions_;
  std::map<RankIndex, std::unique_ptr<ucx::PoolRegistration>> registrations_;  // put mode
  std::atomic<std::uint64_t> blocks_{0};
  std::atomic<std::uint64_t> discarded_{0};
  std::atomic<std::uint64_t> strangers_{0};
  std::unique_ptr<ucx::Progress> progress_;  // last: its thread uses everything above
};

}  // namespace kvferry
