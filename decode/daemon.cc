#include "decode/daemon.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <nlohmann/json.hpp>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/daemon/runtime.h"
#include "decode/fabrics.h"

namespace kvferry::decode {

using log::kv;

namespace {

RoomsOptions rooms_options(const DaemonConfig& config) {
  RoomsOptions out;
  out.model = config.model;
  out.topology = config.topology;
  out.bootstrap = config.timeouts.bootstrap;
  out.transfer = config.timeouts.transfer;
  out.drain = config.timeouts.drain;
  out.rooms_max = config.limits.rooms;
  out.pages_per_room_max = config.limits.pages_per_room;
  out.verify = config.verify.rate();
  // Generations of different decode daemons of one service must not meet by accident.
  out.first_generation = (random_u64() >> 1) | 1;
  return out;
}

}  // namespace

Daemon::Daemon(DaemonConfig config)
    : config_(std::move(config)),
      epoch_(random_u64() | 1),
      started_(steady_now()),
      observer_(Role::kDecode, config_),
      rooms_(rooms_options(config_)) {}

Daemon::~Daemon() = default;

int Daemon::run() {
  const auto started = start();
  if (!started) {
    KVF_LOG_ERROR("cannot start", kv("error", started.error().message));
    fabrics_.clear();
    return 1;
  }
  const nlohmann::json ready = {{"ready", true},
                                {"role", "decode"},
                                {"metrics", address_.to_string()},
                                {"engine_socket", config_.engine_socket.path}};
  fmt::print("{}\n", ready.dump());
  std::fflush(stdout);
  notify_systemd("READY=1");
  KVF_LOG_INFO("kvferry-decode is up", kv("version", KVF_VERSION), kv("metrics", address_.to_string()),
               kv("model", config_.model.name), kv("topology", to_string(config_.topology)));
  io_.run();
  fabrics_.clear();  // joins their threads; nothing calls the sink any more
  return 0;
}

Result<void> Daemon::start() {
  const SinkFor sink_for = [this](FabricKind kind) {
    return [this, kind](FabricEvent&& event) {
      boost::asio::post(io_, [this, kind, moved = std::move(event)] { on_fabric(kind, moved); });
    };
  };
  KVF_TRY(fabrics_, open_fabrics(config_, epoch_, sink_for));
  services_ = std::make_unique<Services>(io_, config_, fabrics_, *this);
  KVF_TRY_VOID(start_http());
  EngineServerOptions engines;
  engines.path = config_.engine_socket.path;
  engines.mode = config_.engine_socket.mode;
  engines.allowed_uids = config_.engine_socket.allowed_uids;
  engines.allowed_gids = config_.engine_socket.allowed_gids;
  engines.engines_max = config_.limits.engines;
  engines_ = std::make_unique<EngineServer>(io_, std::move(engines), *this);
  KVF_TRY_VOID(engines_->start());
  signals_.async_wait([this](const boost::system::error_code& error, int signal) {
    if (!error) {
      KVF_LOG_INFO("stopping", kv("signal", signal));
      stop();
    }
  });
  tick();
  return {};
}

void Daemon::stop() {
  stopping_ = true;
  notify_systemd("STOPPING=1");
  engines_->stop();
  http_->stop();
  io_.stop();
}

void Daemon::tick() {
  timer_.expires_after(config_.timeouts.heartbeat_interval);
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error && !stopping_) {
      tick();
    }
  });
  const std::int64_t now = steady_now();
  services_->tick(now);
  Actions actions;
  rooms_.tick(now, actions);
  perform(actions);
}

void Daemon::on_fabric(FabricKind kind, const FabricEvent& event) {
  if (const auto* rejected = std::get_if<fabric_event::Rejected>(&event)) {
    observer_.block_rejected();
    KVF_LOG_WARN("block rejected", kv("fabric", to_string(kind)), kv("error", rejected->error.message));
    return;
  }
  const auto* down = std::get_if<fabric_event::PeerDown>(&event);
  if (down != nullptr) {
    // A peer is offered several fabrics and uses one; the end of a connection attempt over another means
    // nothing.
    const auto used = peer_fabric_.find(down->peer);
    if (used == peer_fabric_.end() || used->second->kind() != kind) {
      services_->fabric_down(down->peer, kind);
      return;
    }
  }
  Actions actions;
  if (down == nullptr) {
    rooms_.on_fabric(steady_now(), event, actions);
    perform(actions);
    return;
  }
  // Engines are told who went away, so the name goes into the reason before the peer is forgotten.
  const Error named{down->error.code,
                    fmt::format("prefill daemon {}: {}", services_->name(down->peer), down->error.message)};
  rooms_.on_fabric(steady_now(), fabric_event::PeerDown{down->peer, named}, actions);
  perform(actions);
  peer_fabric_.erase(down->peer);
}

void Daemon::perform(Actions& actions) {
  for (Action& action : actions) {
    std::visit([this](auto& one) { perform_one(one); }, action);
  }
}

void Daemon::perform_one(OpenGrant& action) {
  std::vector<ReceiveFabric*> opened;
  for (const auto& [rank, peer] : action.grant.sources) {
    const auto fabric = peer_fabric_.find(peer);
    if (fabric != peer_fabric_.end() &&
        std::find(opened.begin(), opened.end(), fabric->second) == opened.end()) {
      opened.push_back(fabric->second);
      fabric->second->open(action.grant);
    }
  }
}

void Daemon::perform_one(VerifyRoom& action) {
  crew_.read(std::move(action.task), [this, key = action.key](Digest&& digest) {
    boost::asio::post(io_, [this, key, digest = std::move(digest)] {
      Actions actions;
      rooms_.digest_done(steady_now(), key, digest, actions);
      perform(actions);
    });
  });
}

void Daemon::perform_one(CloseGrant& action) {
  // One GrantClosed per peer is counted, so each peer's fabric is asked, also when two peers share it.
  for (const PeerId peer : action.peers) {
    const auto fabric = peer_fabric_.find(peer);
    if (fabric != peer_fabric_.end()) {
      fabric->second->close(action.key);
    } else {
      boost::asio::post(io_, [this, key = action.key] {
        Actions actions;
        rooms_.on_fabric(steady_now(), fabric_event::GrantClosed{key}, actions);
        perform(actions);
      });
    }
  }
}

void Daemon::perform_one(FencePeer& action) {
  services_->lose(action.peer, action.reason);
}

void Daemon::perform_one(SendMessage& action) {
  services_->send(action.peer, action.message);
}

void Daemon::perform_one(TellEngine& action) {
  engines_->send_event(action.engine, action.event);
}

void Daemon::perform_one(ResolveDpRank& action) {
  services_->resolve_dp_rank(
      action.service, action.room,
      [this, service = action.service, room = action.room](std::optional<std::uint32_t> dp) {
        Actions actions;
        rooms_.dp_rank_resolved(steady_now(), service, room, dp, actions);
        perform(actions);
      });
}

void Daemon::perform_one(ReleasePool& action) {
  for (const auto& fabric : fabrics_) {
    fabric->remove_pool(action.rank);
  }
  pools_.erase(action.rank);
  services_->broadcast(message::RankGone{action.rank});
}

void Daemon::perform_one(TransferReport& action) {
  const auto fabric = peer_fabric_.find(action.peer);
  observer_.transfer_ended(
      action, fabric == peer_fabric_.end() ? "" : std::string(to_string(fabric->second->kind())));
  if (action.state != TransferState::kLanded) {
    KVF_LOG_WARN("transfer ended", kv("room", action.key.grant.room),
                 kv("prefill_rank", action.key.prefill_rank), kv("decode_rank", action.key.grant.decode_rank),
                 kv("code", to_string(action.error.code)), kv("error", action.error.message));
  }
}

// --- engines ---

Result<void> Daemon::on_attach(EngineId engine, EngineAttach attach) {
  KVF_TRY(const RankIndex rank, check_attach(config_, attach));
  if (rooms_.rank_attached(rank)) {
    return fail(Code::kConflict, "rank {} is attached already; detach the other engine process first", rank);
  }
  attach.layout.rank = rank;
  set_spaces(config_.model, attach.layout);
  KVF_TRY(std::shared_ptr<const Pool> pool, Pool::map(std::move(attach.layout), std::move(attach.fds)));
  KVF_TRY_VOID(rooms_.attach(engine, rank, pool));
  KVF_LOG_INFO("engine attached", kv("rank", rank), kv("pid", attach.pid), kv("bytes", pool->mapped_bytes()));
  for (const auto& fabric : fabrics_) {
    fabric->add_pool(pool);
  }
  pools_[rank] = std::move(pool);
  for (const message::RankUp& up : rooms_.announcements()) {
    if (up.rank == rank) {
      services_->broadcast(up);
    }
  }
  return {};
}

Result<void> Daemon::on_send(EngineId, EngineChunk) {
  return fail(Code::kInvalid, "this is a decode daemon: it receives; kvf_send belongs to the prefill side");
}

Result<void> Daemon::on_expect(EngineId engine, EngineExpectation expectation) {
  KVF_TRY(const ServiceId service, services_->need(expectation.bootstrap));
  Actions actions;
  auto expected = rooms_.expect(steady_now(), engine, std::move(expectation), service, actions);
  perform(actions);
  return expected;
}

Result<void> Daemon::on_abort(EngineId engine, EngineAbort abort) {
  Actions actions;
  auto aborted = rooms_.abort(steady_now(), engine, abort, actions);
  perform(actions);
  return aborted;
}

void Daemon::on_gone(EngineId engine) {
  const auto rank = rooms_.rank_of(engine);
  Actions actions;
  rooms_.engine_gone(steady_now(), engine, actions);
  perform(actions);
  if (rank) {
    KVF_LOG_INFO("engine gone", kv("rank", *rank));
  }
}

}  // namespace kvferry::decode
