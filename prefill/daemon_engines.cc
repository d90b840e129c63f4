// The engines of this host: attaching their pools, what they send, and waiting for ready fences.

#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <nlohmann/json.hpp>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/daemon/runtime.h"
#include "common/http/signed_fetch.h"
#include "prefill/daemon.h"

namespace kvferry::prefill {

using log::kv;

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
  pools_[rank] = std::move(pool);
  if (config_.registry.empty()) {
    register_ranks();
  } else {
    register_remotely(rank, 0);
  }
  return {};
}

Result<void> Daemon::on_send(EngineId engine, EngineChunk chunk) {
  std::vector<AuxBytes> aux;
  const auto rank = rooms_.rank_of(engine);
  if (chunk.last && chunk.aux_slot >= 0 && rank) {
    const Pool& pool = *pools_.at(*rank);
    const auto& fields = pool.layout().aux;
    for (std::uint32_t index = 0; index < fields.size(); ++index) {
      if (static_cast<std::uint32_t>(chunk.aux_slot) < fields[index].slots) {
        const auto row = pool.aux_row(index, static_cast<std::uint32_t>(chunk.aux_slot));
        aux.push_back({fields[index].name, {row.begin(), row.end()}});
      }
    }
  }
  UniqueFd ready = std::move(chunk.ready);
  const Room room = chunk.room;
  const std::uint64_t fence = ready ? next_fence_++ : 0;
  Actions actions;
  auto sent = rooms_.send(steady_now(), engine, std::move(chunk), fence, std::move(aux), actions);
  perform(actions);
  if (sent && fence != 0) {
    wait_for_fence(fence, engine, room, std::move(ready));
  }
  return sent;
}

void Daemon::wait_for_fence(std::uint64_t id, EngineId engine, Room room, UniqueFd ready) {
  auto fence = std::make_unique<Fence>(
      Fence{engine, room, boost::asio::posix::stream_descriptor(io_, ready.release())});
  auto& fd = fence->fd;
  fences_.emplace(id, std::move(fence));
  fd.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                [this, id, engine, room](const boost::system::error_code& error) {
                  if (error || fences_.erase(id) == 0) {
                    return;
                  }
                  Actions actions;
                  rooms_.chunk_ready(steady_now(), engine, room, id, actions);
                  perform(actions);
                });
}

Result<void> Daemon::on_expect(EngineId, EngineExpectation) {
  return fail(Code::kInvalid, "this is a prefill daemon: it sends; kvf_expect belongs to the decode side");
}

Result<void> Daemon::on_abort(EngineId engine, EngineAbort abort) {
  Actions actions;
  auto aborted = rooms_.abort(steady_now(), engine, abort, actions);
  perform(actions);
  return aborted;
}

void Daemon::on_gone(EngineId engine) {
  std::erase_if(fences_, [&](const auto& item) { return item.second->engine == engine; });
  const auto rank = rooms_.rank_of(engine);
  Actions actions;
  rooms_.engine_gone(steady_now(), engine, actions);
  perform(actions);
  if (rank) {
    pools_.erase(*rank);
    KVF_LOG_INFO("engine gone", kv("rank", *rank));
  }
}

namespace {

RouteRegistration registration(const DaemonConfig& config, const HostPort& self, RankIndex rank) {
  const RankCoord coord = config.topology.coord(rank);
  RouteRegistration out;
  out.attn_tp_size = config.topology.tp;
  out.attn_tp_rank = coord.tp;
  out.attn_cp_size = config.topology.cp;
  out.attn_cp_rank = coord.cp;
  out.attn_dp_size = config.topology.dp;
  out.attn_dp_rank = coord.dp;
  out.pp_size = config.topology.pp;
  out.pp_rank = coord.pp;
  out.rank_ip = self.host;
  out.rank_port = self.port;
  out.page_size = config.page_size;
  out.kv_cache_dtype = std::string(to_string(config.model.dtype));
  return out;
}

nlohmann::json registration_json(const RouteRegistration& r) {
  return {{"attn_tp_size", r.attn_tp_size},
          {"attn_tp_rank", r.attn_tp_rank},
          {"attn_cp_size", r.attn_cp_size},
          {"attn_cp_rank", r.attn_cp_rank},
          {"attn_dp_size", r.attn_dp_size},
          {"attn_dp_rank", r.attn_dp_rank},
          {"pp_size", r.pp_size},
          {"pp_rank", r.pp_rank},
          {"system_dp_size", r.system_dp_size},
          {"system_dp_rank", r.system_dp_rank},
          {"rank_ip", r.rank_ip},
          {"rank_port", r.rank_port},
          {"page_size", r.page_size},
          {"kv_cache_dtype", *r.kv_cache_dtype}};
}

}  // namespace

void Daemon::register_ranks() {
  for (const auto& [rank, pool] : pools_) {
    const auto accepted = registry_.put_route(registration(config_, bootstrap_, rank), steady_now());
    if (!accepted) {
      KVF_LOG_ERROR("rank is not registered", kv("rank", rank), kv("error", accepted.error().message));
    }
  }
}

// Another daemon's bootstrap server may start later than this one: repeated, with growing pauses, for as long
// as the rank is attached.
void Daemon::register_remotely(RankIndex rank, int attempt) {
  const auto to = parse_host_port(config_.registry, 8998);
  if (!to || !pools_.contains(rank) || stopping_) {
    return;
  }
  HttpFetch fetch;
  fetch.to = *to;
  fetch.method = "PUT";
  fetch.target = "/route";
  fetch.body = registration_json(registration(config_, bootstrap_, rank)).dump();
  fetch.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(config_.timeouts.connect);
  signed_fetch(io_, config_.auth.key, std::move(fetch), [this, rank, attempt](Result<HttpResponse> answer) {
    if (answer && answer->status == 200) {
      KVF_LOG_INFO("rank registered", kv("rank", rank), kv("registry", config_.registry));
      return;
    }
    KVF_LOG_WARN("rank is not registered yet", kv("rank", rank), kv("registry", config_.registry),
                 kv("error", answer ? answer->body : answer.error().message));
    auto timer =
        std::make_shared<boost::asio::steady_timer>(io_, std::chrono::seconds(1 << std::min(attempt, 4)));
    timer->async_wait([this, rank, attempt, timer](const boost::system::error_code& error) {
      if (!error) {
        register_remotely(rank, attempt + 1);
      }
    });
  });
}

}  // namespace kvferry::prefill
