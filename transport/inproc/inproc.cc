#include "transport/inproc/inproc.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvferry {

struct InprocNetwork::Link {
  Link(InprocSendFabric& from, PeerId from_peer, const Admitted& to, const SendQueueLimits& limits)
      : sender(&from),
        sender_peer(from_peer),
        receiver(to.receiver),
        receiver_peer(to.peer),
        queue(from_peer, limits) {}

  InprocSendFabric* sender;
  PeerId sender_peer;
  InprocReceiveFabric* receiver;
  PeerId receiver_peer;
  SendQueue queue;
};

InprocNetwork::InprocNetwork() = default;
InprocNetwork::~InprocNetwork() = default;

bool InprocNetwork::idle() const {
  return calls_.empty() &&
         std::all_of(links_.begin(), links_.end(), [](const auto& link) { return link->queue.empty(); });
}

void InprocNetwork::run() {
  while (step()) {
  }
}

bool InprocNetwork::step(std::uint64_t choice) {
  std::vector<Link*> ready;
  for (const auto& link : links_) {
    if (!link->queue.empty()) {
      ready.push_back(link.get());
    }
  }
  const std::size_t calls = calls_.empty() ? 0 : 1;
  if (calls + ready.size() == 0) {
    return false;
  }
  ++clock_;
  const std::size_t pick = choice % (calls + ready.size());
  if (pick < calls) {
    const auto call = std::move(calls_.front().second);
    calls_.pop_front();
    call();
  } else {
    deliver(*ready[pick - calls]);
  }
  return true;
}

void InprocNetwork::connect(InprocSendFabric& sender, PeerId peer, const std::string& token) {
  const auto admitted = tokens_.find(token);
  if (admitted == tokens_.end()) {
    sender.sink_(fabric_event::PeerDown{
        peer, Error{Code::kUnauthorized, "the token of the fabric offer is unknown or was used already"}});
    return;
  }
  links_.push_back(std::make_unique<Link>(sender, peer, admitted->second, sender.limits_));
  tokens_.erase(admitted);
  sender.sink_(fabric_event::PeerUp{peer, "inproc"});
}

void InprocNetwork::deliver(Link& link) {
  SendQueue::Taken taken;
  if (!link.queue.take(taken, clock_)) {
    return;
  }
  const BlockHeader& header = taken.block.header;
  GrantTable& table = link.receiver->table_;
  Admission<std::optional<fabric_event::Landed>> outcome = std::nullopt;
  if (header.type == BlockType::kNotice) {
    outcome = table.notice(header, link.receiver_peer);
  } else if (auto placement = table.admit(header, link.receiver_peer)) {
    std::span<std::byte> to = placement->next();
    for (std::span<const std::byte> from : taken.block.spans) {
      while (!from.empty()) {
        const std::size_t bytes = std::min(from.size(), to.size());
        std::memcpy(to.data(), from.data(), bytes);
        from = from.subspan(bytes);
        to = to.subspan(bytes);
        to = to.empty() ? placement->next() : to;
      }
    }
    outcome = table.arrived(header, link.receiver_peer);
  } else {
    outcome = tl::unexpected<Refusal>(std::move(placement).error());
  }
  for (const fabric_event::ChunkDone& done : link.queue.sent(taken, clock_)) {
    link.sender->sink_(fabric_event::ChunkDone(done));
  }
  if (outcome) {
    if (*outcome) {
      link.receiver->sink_(fabric_event::Landed(**outcome));
    }
    return;
  }
  const Refusal refusal = std::move(outcome).error();
  link.receiver->sink_(fabric_event::Rejected{link.receiver_peer, refusal.error});
  if (!refusal.discard) {
    cut(&link, refusal.error);
  }
}

void InprocNetwork::cut(Link* link, const Error& error) {
  const auto found =
      std::find_if(links_.begin(), links_.end(), [link](const auto& it) { return it.get() == link; });
  if (found == links_.end()) {
    return;
  }
  const std::unique_ptr<Link> dead = std::move(*found);
  links_.erase(found);
  if (dead->sender != nullptr) {
    dead->sender->sink_(fabric_event::PeerDown{dead->sender_peer, error});
  }
  if (dead->receiver != nullptr) {
    dead->receiver->sink_(fabric_event::PeerDown{dead->receiver_peer, error});
  }
}

InprocNetwork::Link* InprocNetwork::sender_link(const InprocSendFabric& sender, PeerId peer) {
  for (const auto& link : links_) {
    if (link->sender == &sender && link->sender_peer == peer) {
      return link.get();
    }
  }
  return nullptr;
}

/// A fabric is being destroyed: its calls vanish, its links break for the other end.
void InprocNetwork::forget(const void* fabric) {
  std::erase_if(calls_, [fabric](const auto& call) { return call.first == fabric; });
  std::erase_if(tokens_, [fabric](const auto& token) { return token.second.receiver == fabric; });
  std::vector<Link*> broken;
  for (const auto& link : links_) {
    if (link->sender == fabric) {
      link->sender = nullptr;
      broken.push_back(link.get());
    } else if (link->receiver == fabric) {
      link->receiver = nullptr;
      broken.push_back(link.get());
    }
  }
  for (Link* link : broken) {
    cut(link, Error{Code::kPeerLost, "the other end of the in-process fabric is gone"});
  }
}

InprocSendFabric::InprocSendFabric(InprocNetwork& network, SendQueueLimits limits, FabricSink sink)
    : network_(network), limits_(limits), sink_(std::move(sink)) {}

InprocSendFabric::~InprocSendFabric() {
  network_.forget(this);
}

void InprocSendFabric::connect(PeerId peer, const FabricOffer& offer) {
  network_.calls_.emplace_back(this,
                               [this, peer, token = offer.json] { network_.connect(*this, peer, token); });
}

void InprocSendFabric::post(PeerId peer, ChunkJob job) {
  network_.calls_.emplace_back(this, [this, peer, job = std::move(job)]() mutable {
    InprocNetwork::Link* link = network_.sender_link(*this, peer);
    const TransferKey key = job.key;
    const std::uint64_t ticket = job.ticket;
    if (link == nullptr) {
      sink_(fabric_event::ChunkFailed{peer, key, ticket,
                                      Error{Code::kUnavailable, "the peer is not connected"}});
      return;
    }
    if (auto added = link->queue.add(std::move(job)); !added) {
      sink_(fabric_event::ChunkFailed{peer, key, ticket, std::move(added).error()});
      return;
    }
    for (const fabric_event::ChunkDone& done : link->queue.collect_empty(key, network_.clock_)) {
      sink_(fabric_event::ChunkDone(done));
    }
  });
}

void InprocSendFabric::cancel(PeerId peer, const TransferKey& key) {
  network_.calls_.emplace_back(this, [this, peer, key] {
    if (InprocNetwork::Link* link = network_.sender_link(*this, peer)) {
      link->queue.cancel(key);
    }
    sink_(fabric_event::Drained{peer, key});
  });
}

void InprocSendFabric::fence(PeerId peer) {
  network_.calls_.emplace_back(this, [this, peer] {
    network_.cut(network_.sender_link(*this, peer),
                 Error{Code::kAborted, "the connection was fenced by the sender"});
  });
}

InprocReceiveFabric::InprocReceiveFabric(InprocNetwork& network, FabricSink sink)
    : network_(network), sink_(std::move(sink)) {}

InprocReceiveFabric::~InprocReceiveFabric() {
  network_.forget(this);
}

void InprocReceiveFabric::add_pool(std::shared_ptr<const Pool> pool) {
  network_.calls_.emplace_back(this, [this, pool = std::move(pool)] { table_.add_pool(pool); });
}

void InprocReceiveFabric::remove_pool(RankIndex rank) {
  network_.calls_.emplace_back(this, [this, rank] { table_.remove_pool(rank); });
}

Result<FabricOffer> InprocReceiveFabric::offer(PeerId peer) {
  const std::string token = fmt::format("{{\"token\":{}}}", network_.next_token_++);
  network_.tokens_[token] = InprocNetwork::Admitted{this, peer};
  return FabricOffer{FabricKind::kInproc, token};
}

void InprocReceiveFabric::open(Grant grant) {
  network_.calls_.emplace_back(this, [this, grant = std::move(grant)]() mutable {
    if (auto opened = table_.open(std::move(grant)); !opened) {
      sink_(fabric_event::Rejected{0, std::move(opened).error()});
    }
  });
}

void InprocReceiveFabric::close(const GrantKey& key) {
  network_.calls_.emplace_back(this, [this, key] {
    table_.close(key);
    sink_(fabric_event::GrantClosed{key});
  });
}

void InprocReceiveFabric::fence(PeerId peer) {
  network_.calls_.emplace_back(this, [this, peer] {
    std::erase_if(network_.tokens_, [&](const auto& token) {
      return token.second.receiver == this && token.second.peer == peer;
    });
    InprocNetwork::Link* found = nullptr;
    for (const auto& link : network_.links_) {
      if (link->receiver == this && link->receiver_peer == peer) {
        found = link.get();
      }
    }
    network_.cut(found, Error{Code::kAborted, "the connection was fenced by the receiver"});
  });
}

}  // namespace kvferry
