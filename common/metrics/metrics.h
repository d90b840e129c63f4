#pragma once
// The Prometheus metrics of a daemon, prefill or decode. Every series exists with 0 from the first scrape,
// and the set of series is fixed at construction: labels are words from short lists, never rooms, ports or
// paths. The one exception, kvferry_peer_fabric_info, has at most peers_max series and loses them with their
// peer. Seconds and bytes throughout. Thread safe.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/error.h"
#include "common/base/ids.h"

namespace kvferry {

struct MetricsOptions {
  std::string version = KVF_VERSION;
  std::vector<std::string> fabrics = {"inproc", "shm", "tcp", "ucx"};
  std::vector<std::string> rules;                                // ids of the compatibility rules
  std::vector<std::string> stale_kinds = {"control", "fabric"};  // where an out-of-date message came from
  std::size_t peers_max = 64;                                    // peers with a series of their own
};

enum class MoveDirection : std::uint8_t { kSent, kReceived };

/// How long a landed transfer took. A stage that this side does not see is left out.
struct TransferSeconds {
  std::optional<double> queue;  // both sides known to first post
  std::optional<double> plan;
  std::optional<double> pack;
  std::optional<double> post;  // first post to source pages read
  std::optional<double> land;  // source pages read to landed
  double total = 0;            // both sides known to landed
};

struct PageCounts {
  std::uint64_t engine = 0;
  std::uint64_t live = 0;
  std::uint64_t quarantine = 0;
};

class Metrics {
 public:
  explicit Metrics(const MetricsOptions& options);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// Exactly one of these three per transfer. `bytes` is the transfer's size.
  void count_landed(std::uint64_t bytes, const TransferSeconds& seconds);
  void count_failed(Code reason);
  void count_aborted();
  /// Payload that was moved, each destination's copy on its own, whatever became of the transfer. A word that
  /// is not among the fabrics counts as "other"; likewise rules and kinds below.
  void count_moved(MoveDirection direction, std::string_view fabric, std::uint64_t bytes,
                   std::uint64_t writes);

  void count_handshake_accepted();
  /// `rules` are those that were violated; each counts once.
  void count_handshake_refused(const std::vector<std::string_view>& rules);
  void count_stale(std::string_view kind, std::uint64_t messages = 1);
  void count_rejected_block();

  void set_transfers_live(std::uint64_t transfers);
  void set_rooms_waiting(std::uint64_t rooms);
  void set_pages(const PageCounts& pages);
  void set_engines(std::uint64_t engines);
  void set_peers(std::uint64_t peers);

  /// `peer` is a host name or address; a port is cut off. Peers above peers_max have no series.
  void set_peer_fabric(PeerId id, std::string_view peer, std::string_view fabric, std::string_view carries);
  void remove_peer(PeerId id);

  /// Prometheus text format.
  std::string text() const;

 private:
  struct Series;
  std::unique_ptr<Series> series_;
};

}  // namespace kvferry
