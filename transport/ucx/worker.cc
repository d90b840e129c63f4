#include "transport/ucx/worker.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>

#include <cerrno>
#include <chrono>

#include "common/base/check.h"
#include "common/base/log.h"
#include "transport/ucx/process_setup.h"
#include "transport/ucx/settings.h"

namespace kvferry::ucx {
namespace {

constexpr int kGuardMs = 100;
constexpr int kProgressMax = 64;  // rounds before commands get their turn

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

Error ucs_error(int status, std::string_view what) {
  return Error{Code::kTransport,
               fmt::format("{}: {}", what, ucs_status_string(static_cast<ucs_status_t>(status)))};
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct WorkerCallbacks {
  static ucs_status_t on_message(void* arg, const void* header, size_t header_length, void* data,
                                 size_t length, const ucp_am_recv_param_t* param) noexcept {
    const auto* slot = static_cast<Worker::HandlerSlot*>(arg);
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
      // We never fetch: a rendezvous is dropped here and released by UCX.
      return UCS_OK;
    }
    const Message message{{static_cast<const std::byte*>(header), header_length},
                          {static_cast<const std::byte*>(data), length}};
    slot->worker->hooks_.on_message(slot->id, message);
    return UCS_OK;
  }
};

Result<std::unique_ptr<Worker>> Worker::start(const UcxOptions& options, Hooks hooks) {
  KVF_TRY_VOID(validate(options));
  if (options.transports == UcxTransports::kRdma) {
    KVF_TRY([[maybe_unused]] const std::string devices, rdma_devices());
  }
  std::unique_ptr<Worker> worker(new Worker(options, std::move(hooks)));
  KVF_TRY_VOID(worker->open_events());
  std::promise<Result<void>> opened;
  auto result = opened.get_future();
  auto go = worker->go_.get_future();
  worker->thread_ = std::thread([raw = worker.get(), &opened, go = std::move(go)]() mutable {
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
  return worker;
}

void Worker::begin() {
  begun_ = true;
  go_.set_value();
}

void Worker::stop() {
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

Result<void> Worker::open_events() {
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!wake_ || !epoll_) {
    return fail(errno_error("ucx: eventfd or epoll", errno));
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_.get();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    return fail(errno_error("ucx: epoll_ctl", errno));
  }
  return {};
}

Result<void> Worker::open() {
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
  KVF_TRY_VOID(open_worker());
  return set_handlers();
}

Result<void> Worker::open_worker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (const ucs_status_t status = ucp_worker_create(context_, &params, &worker_); status != UCS_OK) {
    worker_ = nullptr;
    return fail(ucs_error(status, "ucx: creating the worker"));
  }
  ucp_worker_attr_t attr{};
  attr.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER | UCP_WORKER_ATTR_FIELD_ADDRESS;
  if (const ucs_status_t status = ucp_worker_query(worker_, &attr); status != UCS_OK) {
    return fail(ucs_error(status, "ucx: querying the worker"));
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(attr.address);
  address_.assign(bytes, bytes + attr.address_length);
  ucp_worker_release_address(worker_, attr.address);
  if (attr.max_am_header < am_header_need(options_) || attr.max_am_header > am_header_limit(options_)) {
    return fail(
        Code::kUnavailable,
        "ucx: segments allow active-message headers of {} bytes, {}..{} are needed, so UCX did not take our "
        "segment size; use UCX 1.13.1",
        attr.max_am_header, am_header_need(options_), am_header_limit(options_));
  }
  int efd = -1;
  if (const ucs_status_t status = ucp_worker_get_efd(worker_, &efd); status != UCS_OK) {
    return fail(ucs_error(status, "ucx: the worker has no event descriptor"));
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = efd;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, efd, &event) != 0) {
    return fail(errno_error("ucx: epoll_ctl on the worker", errno));
  }
  return {};
}

Result<void> Worker::set_handlers() {
  slots_.resize(kMessageIds);
  for (std::uint32_t id = 1; id <= kMessageIds; ++id) {
    slots_[id - 1] = HandlerSlot{this, id};
    ucp_am_handler_param_t param{};
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    param.id = id;
    param.flags = UCP_AM_FLAG_WHOLE_MSG;
    param.cb = &WorkerCallbacks::on_message;
    param.arg = &slots_[id - 1];
    if (const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_, &param); status != UCS_OK) {
      return fail(ucs_error(status, "ucx: setting an active-message handler"));
    }
  }
  return {};
}

void Worker::close() {
  if (worker_ != nullptr) {
    ucp_worker_destroy(worker_);
    worker_ = nullptr;
  }
  if (context_ != nullptr) {
    ucp_cleanup(context_);
    context_ = nullptr;
  }
}

void Worker::submit(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) {
      return;
    }
    commands_.push_back(std::move(command));
  }
  eventfd_write(wake_.get(), 1);
}

// False when the worker must stop. Commands that came before the stop still run.
bool Worker::run_commands() {
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

void Worker::run() {
  std::int64_t last_progress = 0;
  while (run_commands()) {
    bool moved = false;
    for (int i = 0; i < kProgressMax && ucp_worker_progress(worker_) != 0; ++i) {
      moved = true;
    }
    hooks_.pump();
    if (moved) {
      last_progress = options_.spin_us == 0 ? 0 : now_ns();
      continue;
    }
    if (options_.spin_us != 0 && last_progress != 0) {
      if (now_ns() - last_progress < std::int64_t{options_.spin_us} * 1000) {
        continue;
      }
      last_progress = 0;
    }
    wait();
  }
  hooks_.on_stop();
}

void Worker::wait() {
  // Arming fails while events are pending, also those that the pump's own posts have just made.
  const ucs_status_t status = ucp_worker_arm(worker_);
  if (status == UCS_ERR_BUSY) {
    return;
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

bool Worker::run_until(const std::function<bool()>& done, std::int64_t timeout_ns) {
  const std::int64_t deadline = now_ns() + timeout_ns;
  while (!done()) {
    if (ucp_worker_progress(worker_) == 0 && now_ns() > deadline) {
      return false;
    }
  }
  return true;
}

}  // namespace kvferry::ucx
