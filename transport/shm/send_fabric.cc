#include "transport/shm/send_fabric.h"

#include "transport/shm/send_core.h"

namespace kvferry {

Result<std::unique_ptr<ShmSendFabric>> ShmSendFabric::create(ShmSendOptions options, FabricSink sink) {
  auto core = std::make_unique<Core>(std::move(options), std::move(sink));
  KVF_TRY_VOID(core->start());
  return std::unique_ptr<ShmSendFabric>(new ShmSendFabric(std::move(core)));
}

ShmSendFabric::ShmSendFabric(std::unique_ptr<Core> core) : core_(std::move(core)) {}
ShmSendFabric::~ShmSendFabric() = default;

void ShmSendFabric::connect(PeerId peer, const FabricOffer& offer) {
  core_->post(Core::Connect{peer, offer});
}

void ShmSendFabric::post(PeerId peer, ChunkJob job) {
  core_->post(Core::Post{peer, std::move(job)});
}

void ShmSendFabric::cancel(PeerId peer, const TransferKey& key) {
  core_->post(Core::Cancel{peer, key});
}

void ShmSendFabric::fence(PeerId peer) {
  core_->post(Core::Fence{peer});
}

}  // namespace kvferry
