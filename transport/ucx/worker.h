#pragma once
// One UCX worker: an address that peers send to, its handlers and its event descriptor. Made, progressed and
// destroyed on the thread of its Progress.
//
// Over shared memory every peer gets a worker of its own. All senders to one worker share one ring, and a
// sender that dies between taking an element of it and filling it stops the ring for everybody, for ever:
// only the worker's end frees the others of it. TCP and RDMA have a stream or a queue pair per peer and share
// one.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "transport/ucx/progress.h"

struct ucp_worker;

namespace kvferry::ucx {

class Worker {
 public:
  static Result<std::shared_ptr<Worker>> open(Progress& progress);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  static constexpr std::uint32_t kMessageIds = 16;

  ucp_worker* handle() const { return worker_; }
  const std::vector<std::byte>& address() const { return address_; }

 private:
  friend class Progress;
  friend struct WorkerCallbacks;
  struct HandlerSlot {
    Worker* worker = nullptr;
    std::uint32_t id = 0;
  };

  explicit Worker(Progress& progress) : progress_(&progress) {}
  Result<void> create();
  Result<void> check_segments(std::size_t max_am_header) const;
  Result<void> set_handlers();
  /// Also called by the Progress when it ends first; nothing of the worker is used after that.
  void destroy();

  Progress* progress_;
  ucp_worker* worker_ = nullptr;
  int event_fd_ = -1;  // UCX's
  std::vector<std::byte> address_;
  std::vector<HandlerSlot> slots_;
};

/// UCX's words for a status number.
Error ucs_error(int status, std::string_view what);

}  // namespace kvferry::ucx
