#include "transport/ucx/endpoint.h"

#include <ucp/api/ucp.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/base/check.h"
#include "common/base/log.h"
#include "transport/ucx/lanes.h"

namespace kvferry::ucx {
namespace {

static_assert(sizeof(IoPiece) == sizeof(ucp_dt_iov_t) &&
              offsetof(IoPiece, bytes) == offsetof(ucp_dt_iov_t, length));

constexpr std::uint32_t kControlOps = 64;

}  // namespace

struct EndpointCallbacks {
  static void on_error(void* arg, ucp_ep_h, ucs_status_t status) noexcept {
    static_cast<Endpoint*>(arg)->fail_with(ucs_error(status, "ucx: the connection broke"));
  }
  static void on_done(void* request, ucs_status_t status, void* arg) noexcept {
    auto* op = static_cast<Op*>(arg);
    ucp_request_free(request);
    op->endpoint->finish(op, status);
  }
  static void on_closed(void* request, ucs_status_t, void* arg) noexcept {
    ucp_request_free(request);
    static_cast<Endpoint*>(arg)->close_done_ = true;
  }
};

Endpoint::Endpoint(std::shared_ptr<Worker> worker, std::uint32_t window) : worker_(std::move(worker)) {
  ops_.reserve(window + kControlOps);
  for (std::uint32_t i = 0; i < window + kControlOps; ++i) {
    ops_.push_back(std::make_unique<Op>());
    Op* op = ops_.back().get();
    op->endpoint = this;
    op->control = i >= window;
    (op->control ? free_control_ : free_).push_back(op);
  }
}

Endpoint::~Endpoint() = default;

Result<std::unique_ptr<Endpoint>> Endpoint::open(std::shared_ptr<Worker> worker,
                                                 std::span<const std::byte> address, std::uint32_t window) {
  ucp_worker* const handle = worker->handle();
  std::unique_ptr<Endpoint> endpoint(new Endpoint(std::move(worker), window));
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &EndpointCallbacks::on_error;
  params.err_handler.arg = endpoint.get();
  if (const ucs_status_t status = ucp_ep_create(handle, &params, &endpoint->ep_); status != UCS_OK) {
    return fail(
        ucs_error(status, "ucx: no endpoint to the peer; both sides need a common transport and device"));
  }
  return endpoint;
}

Op* Endpoint::take_from(std::vector<Op*>& list) {
  if (list.empty() || closing_ || error_) {
    return nullptr;
  }
  Op* op = list.back();
  list.pop_back();
  op->header_bytes = 0;
  op->pieces.clear();
  op->body.clear();
  op->owner = nullptr;
  op->done = nullptr;
  op->tag = 0;
  op->bytes = 0;
  return op;
}

Op* Endpoint::take() {
  return take_from(free_);
}

Op* Endpoint::take_control() {
  return take_from(free_control_);
}

void Endpoint::give_back(Op* op) {
  (op->control ? free_control_ : free_).push_back(op);
}

void Endpoint::send(std::uint32_t id, Op* op) {
  KVF_CHECK(!closing_);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                       UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &EndpointCallbacks::on_done;
  param.user_data = op;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  const void* buffer = nullptr;
  std::size_t count = 0;
  param.datatype = ucp_dt_make_contig(1);
  if (!op->body.empty()) {
    buffer = op->body.data();
    count = op->body.size();
  } else if (op->pieces.size() == 1) {
    buffer = op->pieces[0].data;
    count = op->pieces[0].bytes;
  } else if (!op->pieces.empty()) {
    param.datatype = ucp_dt_make_iov();
    buffer = op->pieces.data();
    count = op->pieces.size();
  }
  ++in_flight_;
  posted(op, ucp_am_send_nbx(ep_, id, op->header.data(), op->header_bytes, buffer, count, &param), "sending");
}

void Endpoint::put(Op* op, std::uint64_t remote, ucp_rkey* rkey, ucp_mem* local) {
  KVF_CHECK(!closing_ && op->pieces.size() == 1);
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &EndpointCallbacks::on_done;
  param.user_data = op;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  if (local != nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = local;
  }
  ++in_flight_;
  posted(op, ucp_put_nbx(ep_, op->pieces[0].data, op->pieces[0].bytes, remote, rkey, &param), "putting");
}

void Endpoint::flush(Op* op) {
  KVF_CHECK(!closing_);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &EndpointCallbacks::on_done;
  param.user_data = op;
  ++in_flight_;
  posted(op, ucp_ep_flush_nbx(ep_, &param), "flushing");
}

void Endpoint::posted(Op* op, void* request, const char* what) {
  if (request == nullptr) {
    finish(op, UCS_OK);
  } else if (UCS_PTR_IS_ERR(request)) {
    fail_with(ucs_error(UCS_PTR_STATUS(request), fmt::format("ucx: {} failed", what)));
    finish(op, UCS_PTR_STATUS(request));
  }
}

void Endpoint::finish(Op* op, int status) {
  KVF_CHECK(in_flight_ > 0);
  --in_flight_;
  if (status != UCS_OK && !closing_) {
    fail_with(ucs_error(status, "ucx: an operation failed"));
  }
  if (op->done != nullptr) {
    op->done(*op, status == UCS_OK);
  }
  give_back(op);
}

void Endpoint::fail_with(Error error) {
  if (!error_) {
    error_ = std::move(error);
  }
}

void Endpoint::shut() {
  if (closing_) {
    return;
  }
  closing_ = true;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &EndpointCallbacks::on_closed;
  param.user_data = this;
  void* request = ucp_ep_close_nbx(ep_, &param);
  if (request == nullptr) {
    close_done_ = true;
  } else if (UCS_PTR_IS_ERR(request)) {
    KVF_LOG_WARN("ucx endpoint close", log::kv("error", ucs_status_string(UCS_PTR_STATUS(request))));
    close_done_ = true;
  }
}

std::string Endpoint::info() const {
  char* text = nullptr;
  std::size_t size = 0;
  FILE* stream = open_memstream(&text, &size);
  if (stream == nullptr) {
    return {};
  }
  ucp_ep_print_info(ep_, stream);
  std::fclose(stream);
  std::string out(text, size);
  std::free(text);
  return out;
}

std::string Endpoint::lanes() const {
  return lane_names(parse_lanes(info()));
}

bool Endpoint::has_rma_lane() const {
  return puts_are_native(parse_lanes(info()));
}

Result<ucp_rkey*> Endpoint::unpack(std::span<const std::byte> key) const {
  ucp_rkey_h rkey = nullptr;
  if (const ucs_status_t status = ucp_ep_rkey_unpack(ep_, key.data(), &rkey); status != UCS_OK) {
    return fail(ucs_error(status, "ucx: unpacking the peer's memory key"));
  }
  return rkey;
}

}  // namespace kvferry::ucx
