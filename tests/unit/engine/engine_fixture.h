#pragma once
// An EngineServer on its own thread with a handler that records what it was told, and raw clients that can
// say what libkvferry never would.

#include <sys/types.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/base/unique_fd.h"
#include "common/engine/kvferry.h"
#include "common/engine/server.h"
#include "common/engine/wire.h"

namespace kvferry::test {

/// A folder of its own, removed with everything in it.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }
  std::size_t entries() const;

 private:
  std::string path_;
};

/// What the handler was told, as short words: "attach 1", "send 1 room=7", "gone 1".
class RecordingHandler : public EngineHandler {
 public:
  Result<void> on_attach(EngineId engine, EngineAttach attach) override;
  Result<void> on_send(EngineId engine, EngineChunk chunk) override;
  Result<void> on_expect(EngineId engine, EngineExpectation expectation) override;
  Result<void> on_abort(EngineId engine, EngineAbort abort) override;
  void on_gone(EngineId engine) override;

  /// Waits until `line` has been recorded `count` times; false after 30 s.
  bool wait_for(const std::string& line, std::size_t count = 1);
  std::size_t count(const std::string& line);
  std::vector<std::string> lines();

  // Set before the server starts; called on its thread, after the call was recorded.
  std::function<Result<void>(EngineId, const EngineAttach&)> attach_hook;
  std::function<Result<void>(EngineId, const EngineChunk&)> send_hook;
  std::function<Result<void>(EngineId, const EngineExpectation&)> expect_hook;
  std::function<void(EngineId)> gone_hook;

  // Read them only after the call that sets them has been answered.
  EngineAttach last_attach;
  EngineChunk last_chunk;
  EngineExpectation last_expectation;
  std::string last_reason;

 private:
  void record(std::string line);

  std::mutex mutex_;  // guards lines_
  std::condition_variable changed_;
  std::vector<std::string> lines_;
};

class RunningServer {
 public:
  explicit RunningServer(RecordingHandler& handler, EngineServerOptions options);
  ~RunningServer() { stop(); }
  RunningServer(const RunningServer&) = delete;
  RunningServer& operator=(const RunningServer&) = delete;

  /// Runs `body` on the server's thread and waits for it.
  void run(const std::function<void(EngineServer&)>& body);
  void stop();

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::optional<EngineServer> server_;
  std::thread thread_;
};

/// Options with a socket in `folder`.
EngineServerOptions options_in(const TempFolder& folder);

/// A sealed memfd of `bytes`.
UniqueFd make_memfd(std::size_t bytes);

/// A pool with one buffer of 64 pages of 16 rows of 32 bytes, and an aux field of 4 slots, on one descriptor.
struct SmallPool {
  static constexpr std::uint32_t kPages = 64;
  static constexpr std::uint32_t kPageSize = 16;
  static constexpr std::uint32_t kRowBytes = 32;
  static constexpr std::uint64_t kBufferBytes = std::uint64_t{kPages} * kPageSize * kRowBytes;
  static constexpr std::uint32_t kAuxSlots = 4;

  SmallPool();
  UniqueFd fd;
  kvf_buffer buffer{};
  kvf_aux_field aux{};
  kvf_pool pool{};
};

struct EngineCloser {
  void operator()(kvf_engine* engine) const { kvf_detach(engine); }
};
using Engine = std::unique_ptr<kvf_engine, EngineCloser>;
/// Attaches, and fails the test with the reason when that is refused.
Engine attach(const std::string& path, const kvf_pool& pool);
kvf_chunk chunk_of(Room room, const std::vector<std::uint32_t>& pages);
kvf_event empty_event();

/// A client that writes any bytes and descriptors.
class RawClient {
 public:
  explicit RawClient(const std::string& path);
  /// False when the daemon has closed.
  bool send(std::string_view bytes, const std::vector<int>& fds = {});
  void finish_sending();
  /// The next reply; nullopt at the end of the stream. Events are counted and skipped.
  std::optional<wire::Reply> reply();
  /// Reads to the end of the stream.
  void drain();
  std::size_t events = 0;

 private:
  UniqueFd socket_;
  FrameBuffer in_{wire::kReplyFrameBytesMax};
};

wire::Attach small_attach();
/// The frame that carries this MessagePack body.
std::string frame_of(std::string_view body);
/// Descriptors open in this process.
std::size_t open_fds();

}  // namespace kvferry::test
