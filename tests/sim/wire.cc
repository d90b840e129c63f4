#include "tests/sim/wire.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace kvferry::sim {

Wire::Wire(Schedule& time, std::uint64_t seed, WireOptions options, Ends ends)
    : time_(time),
      rng_(seed),
      options_(options),
      ends_(std::move(ends)),
      queue_(ends_.sender_peer, options.limits) {}

Nanos Wire::trip() {
  const Nanos jitter = static_cast<Nanos>(rng_.below(static_cast<std::uint64_t>(options_.latency)));
  return std::max(time_.now(), stalled_until_) - time_.now() + options_.latency + jitter;
}

void Wire::post(ChunkJob job) {
  if (!sending_) {
    return;  // the peer is going down, which ends the transfer
  }
  const TransferKey key = job.key;
  const std::uint64_t ticket = job.ticket;
  if (auto added = queue_.add(std::move(job)); !added) {
    ends_.sender(fabric_event::ChunkFailed{ends_.sender_peer, key, ticket, added.error()});
    return;
  }
  for (const fabric_event::ChunkDone& done : queue_.collect_empty(key, time_.now())) {
    ends_.sender(fabric_event::ChunkDone(done));
  }
  pump();
}

void Wire::pump() {
  while (sending_ && in_air_ < options_.window) {
    auto flight = std::make_shared<Flight>();
    if (!queue_.take(flight->taken, time_.now())) {
      return;
    }
    flight->key = flight->taken.block.header.key;
    ++flying_[flight->key];
    ++in_air_;
    Nanos lands = time_.now() + trip();
    if (options_.reach == Reach::kPlaced) {
      lands = std::max(lands, last_landing_);  // a stream keeps its order
      last_landing_ = lands;
    }
    time_.at(lands, [self = shared_from_this(), flight] { self->land(flight); });
  }
}

void Wire::land(const std::shared_ptr<Flight>& flight) {
  if (time_.now() < stalled_until_) {
    time_.at(stalled_until_, [self = shared_from_this(), flight] { self->land(flight); });
    return;
  }
  const bool reaches = options_.reach == Reach::kShared ? sender_alive_ : receiving_;
  if (reaches) {
    place(*flight);
  }
  time_.after(options_.latency, [self = shared_from_this(), flight] { self->acknowledged(flight); });
}

void Wire::place(const Flight& flight) {
  std::array<std::byte, kBlockHeaderBytes> bytes{};
  encode_block(flight.taken.block.header, bytes);
  const auto header = decode_block(bytes);
  Admission<std::optional<fabric_event::Landed>> outcome = std::nullopt;
  if (!header) {
    outcome = tl::unexpected<Refusal>(Refusal{false, header.error()});
  } else if (header->type == BlockType::kNotice) {
    outcome = table_.notice(*header, ends_.receiver_peer);
  } else if (auto placement = table_.admit(*header, ends_.receiver_peer)) {
    std::span<std::byte> to;
    std::span<std::byte> whole;
    for (std::span<const std::byte> from : flight.taken.block.spans) {
      while (!from.empty()) {
        if (to.empty()) {
          to = whole = placement->next();
          ends_.place(*header, whole, false);
        }
        const std::size_t count = std::min(from.size(), to.size());
        std::memcpy(to.data(), from.data(), count);
        from = from.subspan(count);
        to = to.subspan(count);
        if (to.empty()) {
          ends_.place(*header, whole, true);
        }
      }
    }
    outcome = table_.arrived(*header, ends_.receiver_peer);
  } else {
    outcome = tl::unexpected<Refusal>(std::move(placement).error());
  }
  if (outcome && *outcome && receiver_alive_) {
    ends_.receiver(fabric_event::Landed(**outcome));
  } else if (!outcome && receiver_alive_) {
    ends_.receiver(fabric_event::Rejected{ends_.receiver_peer, outcome.error().error});
    if (!outcome.error().discard) {
      reset(outcome.error().error);
    }
  }
}

void Wire::acknowledged(const std::shared_ptr<Flight>& flight) {
  --in_air_;
  if (--flying_[flight->key] == 0) {
    flying_.erase(flight->key);
  }
  if (sender_alive_ && !sender_told_) {
    for (const fabric_event::ChunkDone& done : queue_.sent(flight->taken, time_.now())) {
      ends_.sender(fabric_event::ChunkDone(done));
    }
    drained_if_quiet(flight->key);
  }
  if (!sending_ && in_air_ == 0) {
    tell_sender_down();
  }
  pump();
}

void Wire::drained_if_quiet(const TransferKey& key) {
  if (!flying_.contains(key) && cancelled_.erase(key) > 0) {
    ends_.sender(fabric_event::Drained{ends_.sender_peer, key});
  }
}

void Wire::cancel(const TransferKey& key) {
  if (sender_told_) {
    return;
  }
  queue_.cancel(key);
  cancelled_.insert(key);
  time_.after(options_.latency, [self = shared_from_this(), key] {
    if (self->sender_alive_ && !self->sender_told_) {
      self->drained_if_quiet(key);
    }
  });
}

void Wire::tell_sender_down() {
  if (sender_alive_ && !sender_told_) {
    sender_told_ = true;
    ends_.sender(fabric_event::PeerDown{ends_.sender_peer, sender_error_});
  }
  if (options_.reach == Reach::kShared) {
    stop_receiving(sender_error_);
  }
}

void Wire::stop_sending(const Error& why) {
  if (!sending_) {
    return;
  }
  sending_ = false;
  sender_error_ = why;
  if (in_air_ == 0) {
    tell_sender_down();
  }
}

void Wire::stop_receiving(const Error& why) {
  receiving_ = false;
  if (receiver_alive_ && !receiver_told_) {
    receiver_told_ = true;
    ends_.receiver(fabric_event::PeerDown{ends_.receiver_peer, why});
  }
}

void Wire::fence_by_sender(const Error& why) {
  stop_sending(why);
  if (options_.reach != Reach::kShared) {
    time_.after(trip(), [self = shared_from_this(), why] { self->stop_receiving(why); });
  }
}

void Wire::fence_by_receiver(const Error& why) {
  if (options_.reach != Reach::kShared || !sender_alive_) {
    stop_receiving(why);
  }
  time_.after(trip(), [self = shared_from_this(), why] { self->stop_sending(why); });
}

void Wire::sender_died() {
  if (!sender_alive_) {
    return;
  }
  sending_ = false;
  sender_alive_ = false;
  const Error why{Code::kPeerLost, "the sending process is gone"};
  time_.after(trip(), [self = shared_from_this(), why] { self->stop_receiving(why); });
}

void Wire::receiver_died() {
  if (!receiver_alive_) {
    return;
  }
  receiver_alive_ = false;
  if (options_.reach != Reach::kShared) {
    receiving_ = false;
  }
  const Error why{Code::kPeerLost, "the receiving process is gone"};
  time_.after(trip(), [self = shared_from_this(), why] { self->stop_sending(why); });
}

void Wire::reset(const Error& why) {
  if (options_.reach == Reach::kShared) {
    return;  // there is no network to cut
  }
  time_.after(trip(), [self = shared_from_this(), why] {
    self->stop_receiving(why);
    self->stop_sending(why);
  });
}

void Wire::remove_pool(RankIndex rank) {
  if (options_.reach == Reach::kPlaced) {
    table_.remove_pool(rank);
  }
}

void Wire::open(Grant grant) {
  if (auto opened = table_.open(std::move(grant)); !opened) {
    ends_.receiver(fabric_event::Rejected{0, opened.error()});
  }
}

void Wire::close(const GrantKey& key) {
  if (options_.reach == Reach::kPlaced) {
    table_.close(key);
  }
  ends_.receiver(fabric_event::GrantClosed{key});
}

}  // namespace kvferry::sim
