#include "transport/shm/receive_fabric.h"

#include "transport/shm/receive_core.h"

namespace kvferry {

Result<std::unique_ptr<ShmReceiveFabric>> ShmReceiveFabric::create(ShmReceiveOptions options,
                                                                   FabricSink sink) {
  auto core = std::make_unique<Core>(std::move(options), std::move(sink));
  KVF_TRY_VOID(core->start());
  return std::unique_ptr<ShmReceiveFabric>(new ShmReceiveFabric(std::move(core)));
}

ShmReceiveFabric::ShmReceiveFabric(std::unique_ptr<Core> core) : core_(std::move(core)) {}
ShmReceiveFabric::~ShmReceiveFabric() = default;

void ShmReceiveFabric::add_pool(std::shared_ptr<const Pool> pool) {
  core_->post(Core::AddPool{std::move(pool)});
}

void ShmReceiveFabric::remove_pool(RankIndex rank) {
  core_->post(Core::RemovePool{rank});
}

Result<FabricOffer> ShmReceiveFabric::offer(PeerId peer) {
  return core_->offer(peer);
}

void ShmReceiveFabric::open(Grant grant) {
  core_->post(Core::Open{std::move(grant)});
}

void ShmReceiveFabric::close(const GrantKey& key) {
  core_->post(Core::Close{key});
}

void ShmReceiveFabric::fence(PeerId peer) {
  core_->post(Core::Fence{peer});
}

}  // namespace kvferry
