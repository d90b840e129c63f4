#include "prefill/daemon.h"

#include <boost/asio/post.hpp>
#include <nlohmann/json.hpp>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/daemon/runtime.h"
#include "prefill/fabrics.h"

namespace kvferry::prefill {

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
  out.chunks_per_room_max = config.limits.chunks_per_room;
  out.stopwatch = steady_now;
  return out;
}

RegistryOptions registry_options(const DaemonConfig& config) {
  RegistryOptions out;
  out.rooms_max = config.limits.dp_rank_entries;
  return out;
}

}  // namespace

Daemon::Daemon(DaemonConfig config)
    : config_(std::move(config)),
      epoch_(random_u64() | 1),
      started_(steady_now()),
      observer_(Role::kPrefill, config_),
      rooms_(rooms_options(config_)),
      registry_(registry_options(config_)) {
  if (config_.auth.key) {
    guard_.emplace(config_.auth.key,
                   std::chrono::duration_cast<std::chrono::milliseconds>(config_.auth.window));
  }
}

Daemon::~Daemon() = default;

int Daemon::run() {
  const auto started = start();
  if (!started) {
    KVF_LOG_ERROR("cannot start", kv("error", started.error().message));
    fabrics_.clear();
    return 1;
  }
  const nlohmann::json ready = {{"ready", true},
                                {"role", "prefill"},
                                {"bootstrap", bootstrap_.to_string()},
                                {"metrics", metrics_address_.to_string()},
                                {"engine_socket", config_.engine_socket.path}};
  fmt::print("{}\n", ready.dump());
  std::fflush(stdout);
  notify_systemd("READY=1");
  KVF_LOG_INFO("kvferry-prefill is up", kv("version", KVF_VERSION), kv("bootstrap", bootstrap_.to_string()),
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
  KVF_TRY(fabrics_, open_fabrics(config_, sink_for));
  sessions_ = std::make_unique<Sessions>(io_, config_, fabrics_, *this);
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
  metrics_http_->stop();
  fences_.clear();
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
  sessions_->tick(now);
  Actions actions;
  rooms_.tick(now, actions);
  perform(actions);
}

void Daemon::on_fabric(FabricKind kind, const FabricEvent& event) {
  if (const auto* up = std::get_if<fabric_event::PeerUp>(&event)) {
    sessions_->on_fabric_up(up->peer, kind, up->carries);
    return;
  }
  if (std::holds_alternative<fabric_event::Rejected>(event)) {
    observer_.block_rejected();
    return;
  }
  const auto* down = std::get_if<fabric_event::PeerDown>(&event);
  if (down != nullptr && sessions_->connecting(down->peer)) {
    sessions_->on_candidate_down(down->peer, kind,
                                 down->error);  // nothing was posted yet: the next one is tried
    return;
  }
  Actions actions;
  if (down == nullptr) {
    rooms_.on_fabric(steady_now(), event, actions);
  } else {
    // Engines are told who went away, so the name goes into the reason before the peer is forgotten.
    const Error named{down->error.code,
                      fmt::format("decode daemon {}: {}", sessions_->name(down->peer), down->error.message)};
    rooms_.on_fabric(steady_now(), fabric_event::PeerDown{down->peer, named}, actions);
  }
  perform(actions);
}

void Daemon::perform(Actions& actions) {
  for (Action& action : actions) {
    std::visit([this](auto& one) { perform_one(one); }, action);
  }
}

void Daemon::perform_one(PostChunk& action) {
  if (SendFabric* fabric = sessions_->fabric(action.peer)) {
    fabric->post(action.peer, std::move(action.job));
  }
}

void Daemon::perform_one(DigestChunk& action) {
  crew_.read(std::move(action.task), [this, key = action.key, chunk = action.chunk](Digest&& digest) {
    boost::asio::post(io_, [this, key, chunk, digest = std::move(digest)] {
      Actions actions;
      rooms_.digest_done(steady_now(), key, chunk, digest, actions);
      perform(actions);
    });
  });
}

void Daemon::perform_one(CancelTransfer& action) {
  if (SendFabric* fabric = sessions_->fabric(action.peer)) {
    fabric->cancel(action.peer, action.key);
  }
}

void Daemon::perform_one(FencePeer& action) {
  sessions_->lose(action.peer, action.reason);
}

void Daemon::perform_one(SendMessage& action) {
  sessions_->send(action.peer, action.message);
}

void Daemon::perform_one(TellEngine& action) {
  if (action.event.type != EngineEventType::kGranted && action.event.type != EngineEventType::kChunkDone) {
    std::erase_if(fences_, [&](const auto& item) {
      return item.second->engine == action.engine && item.second->room == action.event.room;
    });
  }
  engines_->send_event(action.engine, action.event);
}

void Daemon::perform_one(TransferReport& action) {
  const auto fabric = peer_fabric_.find(action.peer);
  observer_.transfer_ended(action, fabric == peer_fabric_.end() ? "" : fabric->second);
  if (action.state != TransferState::kLanded) {
    KVF_LOG_WARN("transfer ended", kv("room", action.key.grant.room),
                 kv("prefill_rank", action.key.prefill_rank), kv("decode_rank", action.key.grant.decode_rank),
                 kv("code", to_string(action.error.code)), kv("error", action.error.message));
  }
}

// --- peers ---

void Daemon::on_connected(PeerId peer, const Descriptor& decode) {
  rooms_.peer_connected(peer, decode.instance, decode.topology);
}

void Daemon::on_up(PeerId peer, const std::string& fabric, const std::string& carries) {
  peer_fabric_[peer] = fabric;
  observer_.peer_up(peer, sessions_->instance(peer), fabric, carries);
  Actions actions;
  rooms_.peer_ready(steady_now(), peer, actions);
  perform(actions);
}

void Daemon::on_control(PeerId peer, const ControlMessage& message) {
  Actions actions;
  rooms_.on_message(steady_now(), peer, message, actions);
  perform(actions);
}

void Daemon::on_lost(PeerId peer, const Error& error) {
  Actions actions;
  rooms_.peer_lost(steady_now(), peer, error, actions);
  perform(actions);
  peer_fabric_.erase(peer);
  observer_.peer_gone(peer);
}

void Daemon::on_verdict(const Verdict& verdict) {
  observer_.handshake(verdict.violations, verdict.accepted);
}

}  // namespace kvferry::prefill
