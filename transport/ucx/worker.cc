#include "transport/ucx/worker.h"

#include <ucp/api/ucp.h>

#include "transport/ucx/settings.h"

namespace kvferry::ucx {

Error ucs_error(int status, std::string_view what) {
  return Error{Code::kTransport,
               fmt::format("{}: {}", what, ucs_status_string(static_cast<ucs_status_t>(status)))};
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
    slot->worker->progress_->hooks().on_message(slot->id, message);
    return UCS_OK;
  }
};

Result<std::shared_ptr<Worker>> Worker::open(Progress& progress) {
  std::shared_ptr<Worker> worker(new Worker(progress));
  KVF_TRY_VOID(worker->create());
  KVF_TRY_VOID(worker->set_handlers());
  KVF_TRY_VOID(progress.add(*worker));
  return worker;
}

Worker::~Worker() {
  destroy();
}

void Worker::destroy() {
  if (worker_ != nullptr) {
    progress_->remove(*this);
    ucp_worker_destroy(worker_);
    worker_ = nullptr;
  }
}

Result<void> Worker::create() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (const ucs_status_t status = ucp_worker_create(progress_->context(), &params, &worker_);
      status != UCS_OK) {
    worker_ = nullptr;
    return fail(ucs_error(status, "ucx: creating a worker"));
  }
  ucp_worker_attr_t attr{};
  attr.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER | UCP_WORKER_ATTR_FIELD_ADDRESS;
  if (const ucs_status_t status = ucp_worker_query(worker_, &attr); status != UCS_OK) {
    return fail(ucs_error(status, "ucx: querying the worker"));
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(attr.address);
  address_.assign(bytes, bytes + attr.address_length);
  ucp_worker_release_address(worker_, attr.address);
  if (const ucs_status_t status = ucp_worker_get_efd(worker_, &event_fd_); status != UCS_OK) {
    return fail(ucs_error(status, "ucx: the worker has no event descriptor"));
  }
  return check_segments(attr.max_am_header);
}

// The segment size cannot be read back; the room for a header, which follows from it, can.
Result<void> Worker::check_segments(std::size_t max_am_header) const {
  const UcxOptions& options = progress_->options();
  if (max_am_header >= am_header_need(options) && max_am_header <= am_header_limit(options)) {
    return {};
  }
  return fail(
      Code::kUnavailable,
      "ucx: segments allow active-message headers of {} bytes, {}..{} are needed, so UCX did not take "
      "our segment size; use UCX 1.13.1",
      max_am_header, am_header_need(options), am_header_limit(options));
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

}  // namespace kvferry::ucx
