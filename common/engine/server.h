#pragma once
// The daemon's end of the engine socket: accepts engines on a Unix socket, checks their credentials, decodes
// and validates their frames, maps their pools, and calls the handler on the io_context's thread. Frames are
// a 4-byte little-endian length and a MessagePack map (see wire.h); descriptors travel beside the attach
// frame. A malformed frame ends that connection only.

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"
#include "common/base/unique_fd.h"
#include "common/pool/pool.h"

namespace kvferry {

using EngineId = std::uint64_t;  // never reused within a process

struct EngineAttach {
  RankCoord coord;
  Dtype dtype = Dtype::kBf16;
  PoolLayout layout;  // layout.rank is filled in by the handler's side
  std::vector<UniqueFd> fds;
  int pid = 0;  // from SO_PEERCRED
};

struct EngineChunk {
  Room room = 0;
  std::vector<std::uint32_t> pages;
  std::uint64_t first_token = 0;
  std::uint64_t token_count = 0;
  bool last = false;
  int aux_slot = -1;
  UniqueFd ready;          // invalid: ready now
  bool begun = false;      // earlier chunks of this use were sent, and its engine has been told of no end
  HybridRows hybrid = {};  // with last
  std::uint32_t layer_begin = 0;  // global layer ids, end exclusive; both 0: all layers of the rank
  std::uint32_t layer_end = 0;

  bool all_layers() const { return layer_begin == 0 && layer_end == 0; }
};

struct EngineExpectation {
  Room room = 0;
  std::string bootstrap;
  std::vector<std::uint32_t> pages;
  std::uint64_t prefix = 0;
  std::uint64_t token_count = 0;
  int aux_slot = -1;
  int prefill_dp_rank = -1;
  HybridRows hybrid = {};
};

struct EngineAbort {
  Room room = 0;
  std::string reason{};
  bool begun = true;  // by this engine, which has not been told of an end yet; false: never sent, or told
};

enum class EngineEventType : std::uint8_t {
  kGranted = 1,
  kChunkDone = 2,
  kLanded = 3,
  kFailed = 4,
  kAborted = 5
};

struct EngineEvent {
  EngineEventType type = EngineEventType::kFailed;
  Room room = 0;
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;
  std::uint64_t transfer_ns = 0;
  Code code = Code::kInternal;
  std::string reason{};
  std::uint32_t layer_end = 0;  // kChunkDone: of the chunk; 0: all layers
};

/// What a daemon does with its engines. All calls come on the io_context's thread; an Error is sent back as
/// the refusal of that one call.
class EngineHandler {
 public:
  virtual ~EngineHandler() = default;
  virtual Result<void> on_attach(EngineId engine, EngineAttach attach) = 0;
  virtual Result<void> on_send(EngineId engine, EngineChunk chunk) = 0;
  virtual Result<void> on_expect(EngineId engine, EngineExpectation expectation) = 0;
  virtual Result<void> on_abort(EngineId engine, EngineAbort abort) = 0;
  /// The connection ended (detach or death). Called once for each engine whose attach was accepted.
  virtual void on_gone(EngineId engine) = 0;
};

struct EngineServerOptions {
  std::string path;           // replaced if a stale socket is there; refused if somebody listens
  std::uint32_t mode = 0660;  // file mode of the socket
  std::vector<std::uint32_t> allowed_uids;  // empty: the daemon's own uid and root
  std::vector<std::uint32_t> allowed_gids;  // beside them: whoever has one of these as its group
  std::uint32_t engines_max = 64;
  std::uint32_t frame_bytes_max = 16u << 20;
  std::uint32_t event_queue_max = 65536;  // an engine that does not read is cut off above this
};

/// Every call on the io_context's thread; the handler outlives the server. send_event() and stop() may be
/// called from inside the handler, and call nobody back themselves.
class EngineServer {
 public:
  EngineServer(boost::asio::io_context& io, EngineServerOptions options, EngineHandler& handler);
  ~EngineServer();
  EngineServer(const EngineServer&) = delete;
  EngineServer& operator=(const EngineServer&) = delete;

  Result<void> start();
  /// Queues an event; unknown engines are ignored.
  void send_event(EngineId engine, const EngineEvent& event);
  /// Closes the socket and every connection; on_gone is not called for them.
  void stop();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace kvferry
