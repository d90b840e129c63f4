// Send side, put mode: keys of the peers' pools, puts, and packing.
#include <ucp/api/ucp.h>

#include <cstring>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "transport/ucx/send_core.h"

namespace kvferry {

using ucx::Op;

Result<void> UcxSendFabric::Core::start_puts() {
  KVF_TRY(staging_, ucx::Staging::make(*progress_, options_.staging_bytes));
  return {};
}

Result<void> UcxSendFabric::Core::register_source(const std::shared_ptr<const Pool>& pool) {
  if (!pool || sources_.contains(pool.get())) {
    return {};
  }
  // Pools that nobody but this table holds any more are let go when the next one comes.
  std::erase_if(sources_, [](const auto& entry) { return entry.second->pool.use_count() == 1; });
  KVF_TRY(auto registration, ucx::PoolRegistration::map(*progress_, pool));
  sources_.emplace(pool.get(), std::move(registration));
  return {};
}

bool UcxSendFabric::Core::prepare_puts(Chunk& chunk) {
  Transfer& transfer = *chunk.transfer;
  const auto& pools = transfer.peer->pools;
  const auto it = pools.find(chunk.job.key.grant.decode_rank);
  if (it == pools.end()) {
    const std::int64_t now = steady_now();
    if (transfer.pool_deadline == 0) {
      transfer.pool_deadline = now + std::int64_t{options_.pool_wait_ms} * 1'000'000;
    } else if (now > transfer.pool_deadline) {
      fail_transfer(transfer,
                    Error{Code::kNotFound, fmt::format("ucx: decode rank {} has not announced a pool",
                                                       chunk.job.key.grant.decode_rank)});
    }
    return false;
  }
  Result<void> ready = ucx::check_puts(chunk.job, it->second->pool);
  if (ready) {
    ready = register_source(chunk.job.source);
  }
  if (!ready) {
    fail_transfer(transfer, ready.error());
    return false;
  }
  chunk.block_job = ucx::block_part(chunk.job);
  chunk.blocks = std::make_unique<BlockCutter>(chunk.block_job, cut_limits_);
  ucx::PutLimits limits;
  limits.slot_bytes = staging_->slot_bytes();
  chunk.puts = std::make_unique<ucx::PutCutter>(chunk.job, it->second->pool, limits);
  chunk.keys = it->second;
  chunk.prepared = true;
  return true;
}

bool UcxSendFabric::Core::post_put(Chunk& chunk) {
  Peer& peer = *chunk.transfer->peer;
  Op* op = peer.endpoint->take();
  if (op == nullptr) {
    return false;
  }
  if (!chunk.segment_waits && !chunk.puts->next(chunk.segment)) {
    peer.endpoint->give_back(op);
    chunk.puts.reset();
    return true;
  }
  const ucx::PutSegment& segment = chunk.segment;
  ucp_mem* local = nullptr;
  op->tag = 0;
  if (segment.spans.size() == 1) {
    op->pieces.push_back(ucx::IoPiece{segment.spans[0].data(), segment.spans[0].size()});
  } else {
    const int slot = staging_->take();
    if (slot < 0) {
      peer.endpoint->give_back(op);
      chunk.segment_waits = true;
      return false;
    }
    // A slot is all that this segment may touch; its neighbours are on their way to other destinations.
    KVF_CHECK(segment.bytes <= staging_->slot_bytes());
    const Nanos begin = steady_now();
    std::byte* out = staging_->slot(slot).data();
    for (const auto& span : segment.spans) {
      std::memcpy(out, span.data(), span.size());
      out += span.size();
    }
    chunk.pack += steady_now() - begin;
    op->pieces.push_back(ucx::IoPiece{staging_->slot(slot).data(), segment.bytes});
    op->tag = static_cast<std::uint64_t>(slot) + 1;
    local = staging_->handle();
    packed_.fetch_add(1, std::memory_order_relaxed);
  }
  chunk.segment_waits = false;
  op->owner = &chunk;
  op->context = this;
  op->done = &Core::put_done;
  count_post(chunk, segment.bytes);
  chunk.transfer->put_bytes += segment.bytes;
  puts_.fetch_add(1, std::memory_order_relaxed);
  peer.endpoint->put(op, segment.remote, chunk.keys->keys[segment.region], local);
  return true;
}

void UcxSendFabric::Core::put_done(Op& op, bool ok) {
  if (op.tag != 0) {
    static_cast<Core*>(op.context)->staging_->release(static_cast<int>(op.tag - 1));
  }
  chunk_op_done(op, ok);
}

void UcxSendFabric::Core::on_pool(Peer& peer, const ucx::Message& message) {
  if (!options_.put_mode()) {
    return;
  }
  const std::string_view text(reinterpret_cast<const char*>(message.payload.data()), message.payload.size());
  auto pool = ucx::decode_pool(text);
  if (!pool) {
    peer.down = pool.error();
    return;
  }
  auto keys = std::make_shared<RemoteKeys>();
  keys->pool = *std::move(pool);
  for (const auto& region : keys->pool.regions) {
    auto key = peer.endpoint->unpack(region.key);
    if (!key) {
      peer.down = key.error();
      break;
    }
    keys->keys.push_back(*key);
  }
  auto& slot = peer.pools[keys->pool.rank];
  if (slot) {
    peer.retired.push_back(std::move(slot));
  }
  slot = std::move(keys);
}

void UcxSendFabric::Core::on_no_pool(Peer& peer, const ucx::Message& message) {
  if (message.header.size() != 2 * ucx::kSessionBytes) {
    return;
  }
  const std::uint64_t rank = ucx::get_u64(message.header.data() + ucx::kSessionBytes);
  for (auto it = peer.pools.begin(); it != peer.pools.end();) {
    if (it->first == rank) {
      peer.retired.push_back(std::move(it->second));
      it = peer.pools.erase(it);
    } else {
      ++it;
    }
  }
}

void UcxSendFabric::Core::drop_keys(Peer& peer) {
  const auto drop = [](const std::shared_ptr<RemoteKeys>& keys) {
    for (ucp_rkey* key : keys->keys) {
      ucp_rkey_destroy(key);
    }
    keys->keys.clear();
  };
  for (const auto& [rank, keys] : peer.pools) {
    drop(keys);
  }
  for (const auto& keys : peer.retired) {
    drop(keys);
  }
  peer.pools.clear();
  peer.retired.clear();
}

}  // namespace kvferry
