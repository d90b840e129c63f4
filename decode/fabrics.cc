#include "decode/fabrics.h"

#include "transport/shm/receive_fabric.h"
#include "transport/tcp/tcp_receive_fabric.h"
#ifdef KVF_HAVE_UCX
#include "transport/ucx/receive_fabric.h"
#endif

namespace kvferry::decode {
namespace {

Result<std::unique_ptr<ReceiveFabric>> open_shm(const DaemonConfig& config, Epoch epoch, FabricSink sink) {
  ShmReceiveOptions options;
  options.path = config.shm.socket;
  options.allowed_uids.assign(config.shm.allowed_uids.begin(), config.shm.allowed_uids.end());
  options.mode = options.allowed_uids.empty() ? 0600 : 0666;  // the uid list decides
  options.epoch = epoch;
  KVF_TRY(std::unique_ptr<ReceiveFabric> fabric,
          ShmReceiveFabric::create(std::move(options), std::move(sink)));
  return fabric;
}

Result<std::unique_ptr<ReceiveFabric>> open_tcp(const DaemonConfig& config, FabricSink sink) {
  TcpReceiveConfig options;
  options.host = config.tcp.listen.host == "localhost" ? "127.0.0.1" : config.tcp.listen.host;
  options.port = config.tcp.listen.port;
  options.advertise = config.tcp.advertise;
  options.socket.buffer_bytes = static_cast<int>(config.tcp.socket_buffer_bytes);
  options.peers_max = config.limits.peers;
  options.spin_max = config.threads.spin().count();
  KVF_TRY(std::unique_ptr<ReceiveFabric> fabric,
          TcpReceiveFabric::create(std::move(options), std::move(sink)));
  return fabric;
}

Result<std::unique_ptr<ReceiveFabric>> open_ucx([[maybe_unused]] const DaemonConfig& config,
                                                [[maybe_unused]] FabricSink sink) {
#ifdef KVF_HAVE_UCX
  UcxOptions options;
  KVF_TRY(options.transports, parse_ucx_transports(config.ucx.transports));
  options.device = config.ucx.device;
  options.spin_us = config.threads.spin_us;
  KVF_TRY(std::unique_ptr<ReceiveFabric> fabric, UcxReceiveFabric::create(options, std::move(sink)));
  return fabric;
#else
  return fail(Code::kUnavailable,
              "this build has no UCX; install libucx-dev and build again, or take ucx out of \"fabrics\"");
#endif
}

}  // namespace

Result<std::vector<std::unique_ptr<ReceiveFabric>>> open_fabrics(const DaemonConfig& config, Epoch epoch,
                                                                 const SinkFor& sink_for) {
  const PinnedScope pinned(config.threads.cpus);  // what the fabrics start inherits it
  std::vector<std::unique_ptr<ReceiveFabric>> out;
  for (const std::string& name : config.fabrics) {
    KVF_TRY(const FabricKind kind, parse_fabric_kind(name));
    auto opened = kind == FabricKind::kShm   ? open_shm(config, epoch, sink_for(kind))
                  : kind == FabricKind::kTcp ? open_tcp(config, sink_for(kind))
                                             : open_ucx(config, sink_for(kind));
    if (!opened) {
      return fail(opened.error().code, "fabric '{}': {}", name, opened.error().message);
    }
    out.push_back(*std::move(opened));
  }
  return out;
}

}  // namespace kvferry::decode
