#include "prefill/fabrics.h"

#include "common/base/log.h"
#include "transport/shm/calibrate.h"
#include "transport/shm/send_fabric.h"
#include "transport/tcp/tcp_send_fabric.h"
#ifdef KVF_HAVE_UCX
#include "transport/ucx/send_fabric.h"
#endif

namespace kvferry::prefill {
namespace {

Result<std::unique_ptr<SendFabric>> open_shm(const DaemonConfig& config, FabricSink sink) {
  ShmSendOptions options;
  options.copy_threads = config.shm.copy_threads;
  if (options.copy_threads == 0) {
    options.copy_threads = shm::calibrate_copy_threads();
    KVF_LOG_INFO("shm copy threads chosen", log::kv("threads", options.copy_threads));
  }
  options.allowed_uids.assign(config.shm.allowed_uids.begin(), config.shm.allowed_uids.end());
  options.welcome_wait = std::chrono::duration_cast<std::chrono::milliseconds>(config.timeouts.connect);
  KVF_TRY(std::unique_ptr<SendFabric> fabric, ShmSendFabric::create(std::move(options), std::move(sink)));
  return fabric;
}

Result<std::unique_ptr<SendFabric>> open_tcp(const DaemonConfig& config, FabricSink sink) {
  TcpSendConfig options;
  options.streams = config.tcp.connections;
  options.socket.congestion = config.tcp.congestion;
  options.socket.buffer_bytes = static_cast<int>(config.tcp.socket_buffer_bytes);
  options.connect_deadline = config.timeouts.connect.count();
  options.spin_max = config.threads.spin().count();
  KVF_TRY(std::unique_ptr<SendFabric> fabric, TcpSendFabric::create(options, std::move(sink)));
  return fabric;
}

Result<std::unique_ptr<SendFabric>> open_ucx([[maybe_unused]] const DaemonConfig& config,
                                             [[maybe_unused]] FabricSink sink) {
#ifdef KVF_HAVE_UCX
  UcxOptions options;
  KVF_TRY(options.transports, parse_ucx_transports(config.ucx.transports));
  options.device = config.ucx.device;
  options.staging_bytes = static_cast<std::uint32_t>(config.ucx.staging_bytes);
  options.spin_us = config.threads.spin_us;
  options.connect_timeout_ms = static_cast<std::uint32_t>(config.timeouts.connect.count() / 1'000'000);
  KVF_TRY(std::unique_ptr<SendFabric> fabric, UcxSendFabric::create(options, std::move(sink)));
  return fabric;
#else
  return fail(Code::kUnavailable,
              "this build has no UCX; install libucx-dev and build again, or take ucx out of \"fabrics\"");
#endif
}

}  // namespace

Result<std::vector<std::unique_ptr<SendFabric>>> open_fabrics(const DaemonConfig& config,
                                                              const SinkFor& sink_for) {
  const PinnedScope pinned(config.threads.cpus);  // what the fabrics start inherits it
  std::vector<std::unique_ptr<SendFabric>> out;
  for (const std::string& name : config.fabrics) {
    KVF_TRY(const FabricKind kind, parse_fabric_kind(name));
    auto opened = kind == FabricKind::kShm   ? open_shm(config, sink_for(kind))
                  : kind == FabricKind::kTcp ? open_tcp(config, sink_for(kind))
                                             : open_ucx(config, sink_for(kind));
    if (!opened) {
      return fail(opened.error().code, "fabric '{}': {}", name, opened.error().message);
    }
    out.push_back(*std::move(opened));
  }
  return out;
}

}  // namespace kvferry::prefill
