#pragma once
// One UCX endpoint to one peer, with a bounded set of operations in flight. Everything runs on the worker's
// thread. Errors are polled: failed() turns true once and the owner then calls shut() and waits for closed(),
// because UCX still owns requests and the endpoint until its close has completed.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "transport/ucx/worker.h"

struct ucp_ep;
struct ucp_rkey;
struct ucp_mem;

namespace kvferry::ucx {

class Endpoint;

/// Layout of UCX's iov element, so that sources hand pieces over without a copy.
struct IoPiece {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

/// One operation in flight. UCX reads header and pieces until it is done, so they live here.
struct Op {
  using Done = void (*)(Op& op, bool ok);

  std::array<std::byte, 256> header{};
  std::uint32_t header_bytes = 0;
  std::vector<IoPiece> pieces;
  std::vector<std::byte> body;  // payload of small messages that nobody else keeps
  void* owner = nullptr;        // for `done`
  void* context = nullptr;      // likewise
  Done done = nullptr;          // called once; may be called inside the posting call
  std::uint64_t tag = 0;        // free for the owner
  std::uint64_t bytes = 0;

 private:
  friend class Endpoint;
  friend struct EndpointCallbacks;
  Endpoint* endpoint = nullptr;
  bool control = false;
};

class Endpoint {
 public:
  /// `address` comes from a peer; UCX parses it, so only addresses of authenticated peers may get here.
  static Result<std::unique_ptr<Endpoint>> open(std::shared_ptr<Worker> worker,
                                                std::span<const std::byte> address, std::uint32_t window);
  /// Only after closed(), or when the Progress has stopped. Lets go of the worker.
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  /// A free operation, or nullptr while the window is full or the endpoint is failing. The caller posts it or
  /// gives it back. Data operations keep to the window; control messages have a few of their own.
  Op* take();
  Op* take_control();
  void give_back(Op* op);

  void send(std::uint32_t id, Op* op);
  /// Writes pieces[0] to `remote`, which the caller has checked against the rkey's region.
  void put(Op* op, std::uint64_t remote, ucp_rkey* rkey, ucp_mem* local);
  /// Done when every put before it is visible at the peer.
  void flush(Op* op);

  bool failed() const { return error_.has_value(); }
  const Error& error() const { return *error_; }
  /// Forces the connection down. Outstanding operations end with ok == false.
  void shut();
  bool idle() const { return in_flight_ == 0; }
  /// take() would find nothing.
  bool window_is_full() const { return free_.empty(); }
  bool closed() const { return closing_ && close_done_ && in_flight_ == 0; }

  /// What UCX really chose, read back from it: "posix/memory, sysv/memory".
  std::string lanes() const;
  bool has_rma_lane() const;
  /// Unpacks a key whose length and checksum have been verified (UCX does not survive garbage).
  Result<ucp_rkey*> unpack(std::span<const std::byte> key) const;

 private:
  friend struct EndpointCallbacks;
  Endpoint(std::shared_ptr<Worker> worker, std::uint32_t window);
  Op* take_from(std::vector<Op*>& list);
  void posted(Op* op, void* request, const char* what);
  void finish(Op* op, int status);
  void fail_with(Error error);
  std::string info() const;

  std::shared_ptr<Worker> worker_;  // first: outlives the operations
  ucp_ep* ep_ = nullptr;
  std::optional<Error> error_;
  bool closing_ = false;
  bool close_done_ = false;
  std::uint32_t in_flight_ = 0;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Op*> free_;
  std::vector<Op*> free_control_;
};

}  // namespace kvferry::ucx
