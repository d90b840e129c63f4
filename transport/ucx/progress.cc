#include "transport/ucx/progress.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cerrno>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "transport/adaptive_spin.h"
#include "transport/ucx/process_setup.h"
#include "transport/ucx/settings.h"
#include "transport/ucx/worker.h"

namespace kvferry::ucx {
namespace {

constexpr int kGuardMs = 100;
constexpr int kProgressMax = 64;  // rounds of one worker before the others and commands get their turn

unsigned runtime_version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  return major * 100 + minor;
}

Result<ucp_config_t*> make_config(const UcxOptions& options) {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return fail(ucs_error(status, "ucx: reading the configuration"));
  }
  for (const auto& [name, value] : settings(options, runtime_version())) {
    if (const ucs_status_t status = ucp_config_modify(config, name.c_str(), value.c_str());
        status != UCS_OK) {
      ucp_config_release(config);
      return fail(ucs_error(status, fmt::format("ucx: setting {}={}", name, value)));
    }
  }
  return config;
}

}  // namespace

Result<std::unique_ptr<Progress>> Progress::start(const UcxOptions& options, Hooks hooks) {
  KVF_TRY_VOID(validate(options));
  if (options.transports == UcxTransports::kRdma) {
    KVF_TRY([[maybe_unused]] const std::string devices, rdma_devices());
  }
  std::unique_ptr<Progress> progress(new Progress(options, std::move(hooks)));
  KVF_TRY_VOID(progress->open_events());
  std::promise<Result<void>> opened;
  auto result = opened.get_future();
  auto go = progress->go_.get_future();
  progress->thread_ = std::thread([raw = progress.get(), &opened, go = std::move(go)]() mutable {
    Result<void> status = raw->open();
    const bool usable = status.has_value();
    opened.set_value(std::move(status));
    go.wait();
    if (usable) {
      raw->run();
    }
    raw->close();
  });
  Result<void> status = result.get();
  if (!status) {
    return fail(std::move(status).error());
  }
  return progress;
}

void Progress::begin() {
  begun_ = true;
  go_.set_value();
}

void Progress::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  if (wake_) {
    eventfd_write(wake_.get(), 1);
  }
  if (thread_.joinable()) {
    if (!begun_) {
      go_.set_value();
    }
    thread_.join();
  }
}

Result<void> Progress::watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return fail(errno_error("ucx: epoll_ctl", errno));
  }
  return {};
}

Result<void> Progress::open_events() {
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!wake_ || !epoll_) {
    return fail(errno_error("ucx: eventfd or epoll", errno));
  }
  return watch(wake_.get());
}

Result<void> Progress::open() {
  prepare_process();
  KVF_TRY(ucp_config_t * config, make_config(options_));
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  // The software handler of puts writes wherever a packet says. Without the RMA feature UCX drops such
  // packets.
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (options_.put_mode()) {
    params.features |= UCP_FEATURE_RMA;
  }
  const ucs_status_t status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK) {
    context_ = nullptr;
    return fail(ucs_error(status, fmt::format("ucx: no context for transports {} on device '{}'",
                                              to_string(options_.transports), options_.device)));
  }
  KVF_TRY(first_worker_, Worker::open(*this));
  return {};
}

Result<std::shared_ptr<Worker>> Progress::worker_for_peer() {
  if (options_.transports != UcxTransports::kShm) {
    return first_worker_;
  }
  return first_worker_ ? std::exchange(first_worker_, nullptr) : Worker::open(*this);
}

Result<void> Progress::add(Worker& worker) {
  workers_.push_back(&worker);
  return watch(worker.event_fd_);
}

void Progress::remove(Worker& worker) {
  std::erase(workers_, &worker);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, worker.event_fd_, nullptr);
}

void Progress::close() {
  while (!workers_.empty()) {
    workers_.back()->destroy();
  }
  if (context_ != nullptr) {
    ucp_cleanup(context_);
    context_ = nullptr;
  }
}

bool Progress::submit(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) {
      return false;
    }
    commands_.push_back(std::move(command));
  }
  eventfd_write(wake_.get(), 1);
  return true;
}

// False when the worker must stop. Commands that came before the stop still run.
bool Progress::run_commands() {
  std::vector<std::function<void()>> commands;
  bool stop = false;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
    stop = stop_;
  }
  for (const auto& command : commands) {
    command();
  }
  return !stop;
}

bool Progress::progress_all() {
  bool moved = false;
  for (Worker* worker : workers_) {
    for (int i = 0; i < kProgressMax && ucp_worker_progress(worker->handle()) != 0; ++i) {
      moved = true;
    }
  }
  return moved;
}

void Progress::run() {
  AdaptiveSpin spin(std::int64_t{options_.spin_us} * 1000);
  std::int64_t idle_since = 0;
  while (run_commands()) {
    const bool moved = progress_all();
    hooks_.pump();
    const std::int64_t now = steady_now();
    if (moved) {
      if (idle_since != 0) {
        spin.waited(now - std::exchange(idle_since, 0));
      }
      continue;
    }
    idle_since = idle_since == 0 ? now : idle_since;
    if (now - idle_since >= spin.budget()) {
      wait();
    }
  }
  hooks_.on_stop();
}

void Progress::wait() {
  for (const Worker* worker : workers_) {
    // Arming fails while events are pending, also those that the pump's own posts have just made.
    if (ucp_worker_arm(worker->handle()) == UCS_ERR_BUSY) {
      // Over shared memory that lasts until the peer has taken what waits in its ring, and the peer, or the
      // thread that its events go to, may need this core for it: without this, p99 of one page was 12 ms.
      std::this_thread::yield();
      return;
    }
  }
  epoll_event events[4];
  const int count = epoll_wait(epoll_.get(), events, 4, kGuardMs);
  wakeups_.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd == wake_.get()) {
      eventfd_t value = 0;
      eventfd_read(wake_.get(), &value);
    }
  }
}

bool Progress::run_until(const std::function<bool()>& done, std::int64_t timeout_ns) {
  const std::int64_t deadline = steady_now() + timeout_ns;
  while (!done()) {
    if (!progress_all() && steady_now() > deadline) {
      return false;
    }
  }
  return true;
}

}  // namespace kvferry::ucx
