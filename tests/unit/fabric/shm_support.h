#pragma once
// Helpers of the shm fabric's tests: both ends in this process, plain pools of one buffer, and plans that
// copy them whole, once or for as long as a test needs.

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "common/base/check.h"
#include "tests/support/fabric_fixture.h"
#include "transport/shm/receive_fabric.h"
#include "transport/shm/send_fabric.h"

namespace kvferry::test {

/// A folder of its own for the socket, gone with the object.
class TempFolder {
 public:
  TempFolder() { KVF_CHECK(::mkdtemp(path_.data()) != nullptr); }
  ~TempFolder() {
    ::unlink(socket().c_str());
    ::rmdir(path_.c_str());
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string socket() const { return path_ + "/shm.sock"; }

 private:
  std::string path_ = "/tmp/kvferry-shm-XXXXXX";
};

struct ShmEnds {
  explicit ShmEnds(ShmSendOptions send_options = {}, ShmReceiveOptions receive_options = {}) {
    receive_options.path = folder.socket();
    auto made_receive = ShmReceiveFabric::create(receive_options, [this](FabricEvent&& event) {
      if (on_receive) {
        on_receive(event);
      }
      receive_log.sink()(std::move(event));
    });
    auto made_send = ShmSendFabric::create(send_options, [this](FabricEvent&& event) {
      if (on_send) {
        on_send(event);
      }
      send_log.sink()(std::move(event));
    });
    KVF_CHECK(made_receive.has_value() && made_send.has_value());
    receive = std::move(*made_receive);
    send = std::move(*made_send);
  }

  bool connect(PeerId peer = kPeer) {
    const std::size_t before = send_log.count<fabric_event::PeerUp>();
    const auto offer = receive->offer(peer);
    KVF_CHECK(offer.has_value());
    send->connect(peer, *offer);
    return send_log.wait_for<fabric_event::PeerUp>(before + 1);
  }
  std::string events() const {
    return "sender: " + send_log.describe() + "\nreceiver: " + receive_log.describe();
  }

  TempFolder folder;
  // Called on the fabric's thread before the event is logged; set before any traffic.
  std::function<void(const FabricEvent&)> on_send;
  std::function<void(const FabricEvent&)> on_receive;
  EventLog send_log;
  EventLog receive_log;
  std::unique_ptr<ShmReceiveFabric> receive;
  std::unique_ptr<ShmSendFabric> send;
};

inline constexpr std::uint32_t kRowBytes = 1024;
inline constexpr std::uint32_t kPageRows = 16;

/// One layer of `pages` pages, every byte `fill`.
inline std::shared_ptr<Pool> plain_pool(RankIndex rank, std::uint64_t pages, std::byte fill) {
  PoolLayout layout;
  layout.rank = rank;
  layout.page_size = kPageRows;
  layout.buffers.push_back(BufferPlace{BufferShape{0, BufferKind::kLatent, kRowBytes, pages}, 0, 0});
  return make_pool(std::move(layout), fill);
}

/// Copies the first `rows` rows onto the same rows of the destination, `times` times over. Many times keep a
/// copy thread busy until it is stopped.
inline std::shared_ptr<const Plan> row_plan(std::uint32_t rows, std::size_t times = 1) {
  auto plan = std::make_shared<Plan>();
  plan->runs.assign(times, RowRun{0, 0, 0, rows, 1, rows, rows});
  plan->pairs.push_back(BufferPair{0, 0, kRowBytes, kRowBytes, 0, 0, kRowBytes});
  plan->rows = std::uint64_t{rows} * times;
  plan->bytes = plan->rows * kRowBytes;
  return plan;
}
/// 1 MiB copied again and again for many seconds; what needs an end must cancel.
inline std::shared_ptr<const Plan> endless_plan() {
  static const std::shared_ptr<const Plan> plan = row_plan(1024, 1 << 16);
  return plan;
}

inline TransferKey transfer_key(Generation generation, RankIndex decode_rank = 0,
                                RankIndex prefill_rank = 0) {
  return TransferKey{GrantKey{99, generation, decode_rank}, prefill_rank};
}

inline ChunkJob chunk(const TransferKey& key, std::shared_ptr<const Plan> plan,
                      std::shared_ptr<const Pool> source, bool last = false) {
  ChunkJob job;
  job.key = key;
  job.plan = std::move(plan);
  job.source = std::move(source);
  job.last = last;
  job.ticket = key.grant.generation;
  return job;
}

inline bool all_bytes_are(std::span<const std::byte> bytes, std::byte value) {
  return bytes.empty() ||
         (bytes[0] == value && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

/// Waits, without a clock, until the copy has reached this place of a pool whose buffer starts its
/// descriptor. Reads through the descriptor: what orders this with the fabric's threads is a socket, which
/// the thread sanitizer does not see.
inline void wait_for_byte(const Pool& pool, std::size_t at, std::byte value) {
  std::byte found{};
  do {
    std::this_thread::yield();
    KVF_CHECK(::pread(pool.fds()[0].get(), &found, 1, static_cast<off_t>(at)) == 1);
  } while (found != value);
}

}  // namespace kvferry::test
