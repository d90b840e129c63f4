#pragma once
// One prefill side and one decode side in this process, with real pools in sealed memfds, for testing any
// SendFabric/ReceiveFabric pair. Each source row holds a value derived from (layer, kind, head, position,
// byte); all other bytes of both sides hold guards. What the destination must hold afterwards is computed
// from ownership alone, without the planner, and compared byte for byte, gaps between buffers included.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "common/model/geometry.h"
#include "common/plan/plan.h"
#include "common/pool/pool.h"
#include "common/topology/topology.h"
#include "transport/fabric.h"

namespace kvferry::test {

/// Collects the events of one fabric end. The sink may be called from any thread.
class EventLog {
 public:
  using Events = std::vector<FabricEvent>;

  FabricSink sink();
  /// For fabrics that only move when stepped: wait() calls it, until it returns false.
  void set_pump(std::function<bool()> pump) { pump_ = std::move(pump); }
  /// False when `done` did not hold within a generous deadline (or the pump ran dry).
  bool wait(const std::function<bool(const Events&)>& done);
  Events events() const;

  template <class T>
  static std::size_t count(const Events& events) {
    std::size_t found = 0;
    for (const FabricEvent& event : events) {
      found += std::holds_alternative<T>(event) ? 1 : 0;
    }
    return found;
  }
  template <class T>
  std::size_t count() const {
    return count<T>(events());
  }
  template <class T>
  bool wait_for(std::size_t wanted = 1) {
    return wait([wanted](const Events& events) { return count<T>(events) >= wanted; });
  }
  template <class T>
  std::vector<T> all() const {
    std::vector<T> found;
    for (const FabricEvent& event : events()) {
      if (const T* match = std::get_if<T>(&event)) {
        found.push_back(*match);
      }
    }
    return found;
  }
  /// One word per event, with its error where it has one; for INFO().
  std::string describe() const;

 private:
  mutable std::mutex mutex_;  // guards events_
  std::condition_variable changed_;
  Events events_;
  std::function<bool()> pump_;
};

struct FabricCase {
  std::string name;
  ModelGeometry model;
  Topology prefill;
  Topology decode;
  std::uint32_t src_page_size = 16;
  std::uint32_t dst_page_size = 16;
  std::uint64_t pages = 64;  // per rank and side
  std::uint64_t tokens = 300;
  std::uint64_t chunk_tokens = 128;
  std::uint64_t prefix = 0;  // tokens that decode already has; multiple of both virtual pages
  std::uint64_t seed = 1;
};

ModelGeometry small_mla(std::uint32_t layers = 3);
ModelGeometry small_gqa(std::uint32_t heads, std::uint32_t layers = 3);
Topology tp(std::uint32_t size, std::uint32_t dcp = 1);
/// MLA TP2->TP4, MLA DCP 1->4, GQA TP4->TP8 (replicated heads) and TP8->TP2.
std::vector<FabricCase> standard_cases();

inline constexpr PeerId kPeer = 7;
inline constexpr std::byte kDstGuard{0xA5};
inline constexpr std::byte kSrcGuard{0x5A};

/// A pool in fresh sealed memfds: buffers with gaps in the first, aux in the second; every byte is `guard`.
std::shared_ptr<Pool> make_pool(PoolLayout layout, std::byte guard);

class FabricFixture {
 public:
  explicit FabricFixture(FabricCase spec);

  struct Pair {
    RankIndex prefill = 0;
    RankIndex decode = 0;
  };
  const FabricCase& spec() const { return spec_; }
  const std::vector<Pair>& pairs() const { return pairs_; }  // those that send
  const std::vector<std::shared_ptr<Pool>>& sources() const { return sources_; }
  const std::vector<std::shared_ptr<Pool>>& destinations() const { return destinations_; }
  TransferKey key(const Pair& pair) const;
  Grant grant(RankIndex decode_rank, PeerId peer = kPeer) const;
  /// The chunks of one transfer in order; the last carries aux where this source is elected for it.
  std::vector<ChunkJob> jobs(const Pair& pair) const;
  /// KV and aux bytes that `pair` moves.
  std::uint64_t bytes(const Pair& pair) const;

  /// Pools and grants at the receiver, then connect; the text is empty when PeerUp came.
  std::string connect(SendFabric& send, EventLog& send_log, ReceiveFabric& receive);
  /// connect(), post everything, wait for all Landed and ChunkDone, close all grants, compare all bytes.
  /// Returns what went wrong; empty when nothing did.
  std::string run(SendFabric& send, EventLog& send_log, ReceiveFabric& receive, EventLog& receive_log);
  /// The first wrong byte of all destination pools, or empty.
  std::string mismatch() const;
  /// Like mismatch(), but granted rows may also still hold the guard: for interrupted transfers.
  std::string foreign_bytes() const;

 private:
  std::vector<std::uint32_t> shuffled_pages(std::uint64_t salt) const;
  void fill_source(RankIndex rank);
  std::vector<std::byte> expected_image(RankIndex rank) const;
  std::string compare(bool may_be_guard) const;

  FabricCase spec_;
  std::vector<std::shared_ptr<Pool>> sources_;
  std::vector<std::shared_ptr<Pool>> destinations_;
  std::vector<std::vector<std::uint32_t>> src_pages_;
  std::vector<std::vector<std::uint32_t>> dst_pages_;
  std::vector<Pair> pairs_;
  GrantKey grant_key_;  // without the rank
};

}  // namespace kvferry::test
