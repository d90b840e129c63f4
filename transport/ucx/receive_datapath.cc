// Receive side: every block is checked against its grant, then placed.
#include "kernels/copy.h"
#include "transport/ucx/receive_core.h"

namespace kvferry {

using ucx::BlockMessage;

void UcxReceiveFabric::Core::on_block(const ucx::Message& message) {
  Peer* peer = find_session(message.header);
  if (peer == nullptr) {
    strangers_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (peer->link->broken) {
    return;
  }
  const auto block = ucx::decode_block_message(message.header);
  if (!block) {
    refuse(*peer, GrantKey{}, Refusal{false, block.error()});
    return;
  }
  switch (block->block.type) {
    case BlockType::kRows:
    case BlockType::kAux:
      on_rows(*peer, *block, message.payload);
      return;
    case BlockType::kNotice:
      on_notice(*peer, *block);
      return;
    case BlockType::kDrain: {
      // Messages of one endpoint arrive in order, so all blocks before it are placed or discarded by now.
      BlockHeader answer = make_drain(block->block.key);
      answer.type = BlockType::kDrained;
      peer->link->outbox.push_block(peer->link->session, answer);
      return;
    }
    case BlockType::kDrained:
      refuse(*peer, block->block.key.grant,
             Refusal{false, Error{Code::kProtocol, "ucx: drained without a drain"}});
      return;
  }
}

void UcxReceiveFabric::Core::on_rows(Peer& peer, const BlockMessage& message,
                                     std::span<const std::byte> payload) {
  const BlockHeader& header = message.block;
  if (payload.size() != header.payload_bytes) {
    refuse(peer, header.key.grant,
           Refusal{false, Error{Code::kProtocol, fmt::format("ucx: a block announces {} bytes and carries {}",
                                                             header.payload_bytes, payload.size())}});
    return;
  }
  if (!table_.is_open(header.key.grant)) {
    run_calls();
  }
  auto placement = table_.admit(header, peer.id);
  if (!placement) {
    refuse(peer, header.key.grant, std::move(placement).error());
    return;
  }
  const std::byte* from = payload.data();
  for (auto span = placement->next(); !span.empty(); span = placement->next()) {
    copy_run(span.data(), from, span.size(), 1, span.size(), span.size());
    from += span.size();
  }
  blocks_.fetch_add(1, std::memory_order_relaxed);
  auto arrived = table_.arrived(header, peer.id);
  if (!arrived) {
    refuse(peer, header.key.grant, std::move(arrived).error());
  } else if (*arrived) {
    landed(**arrived);
  }
}

void UcxReceiveFabric::Core::on_notice(Peer& peer, const BlockMessage& message) {
  const BlockHeader& header = message.block;
  if (message.put_bytes != 0 && !options_.put_mode()) {
    refuse(peer, header.key.grant,
           Refusal{false, Error{Code::kProtocol, "ucx: a notice of puts without put mode"}});
    return;
  }
  if (!table_.is_open(header.key.grant)) {
    run_calls();
  }
  auto noticed = table_.notice(header, peer.id);
  if (!noticed) {
    refuse(peer, header.key.grant, std::move(noticed).error());
    return;
  }
  if (message.put_bytes != 0) {
    put_bytes_[header.key] = message.put_bytes;
  }
  if (*noticed) {
    landed(**noticed);
  }
}

void UcxReceiveFabric::Core::landed(fabric_event::Landed event) {
  copy_fence();
  if (const auto it = put_bytes_.find(event.key); it != put_bytes_.end()) {
    event.bytes += it->second;
    put_bytes_.erase(it);
  }
  sink_(std::move(event));
}

void UcxReceiveFabric::Core::refuse(Peer& peer, const GrantKey& key, Refusal refusal) {
  if (!refusal.discard) {
    reject(peer.id, refusal.error);
    break_link(*peer.link, std::move(refusal.error));
    return;
  }
  // Late bytes of a closed grant come in thousands; one report per grant says it all.
  discarded_.fetch_add(1, std::memory_order_relaxed);
  if (peer.link->discarded != key) {
    peer.link->discarded = key;
    reject(peer.id, std::move(refusal.error));
  }
}

}  // namespace kvferry
