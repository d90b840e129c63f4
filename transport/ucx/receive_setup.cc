// Receive side: start, pools, grants, connections and how they end.
#include <ucp/api/ucp.h>

#include "common/base/log.h"
#include "transport/ucx/receive_core.h"
#include "transport/ucx/settings.h"

namespace kvferry {

using ucx::Message;

namespace {
constexpr std::int64_t kCloseNs = 2'000'000'000;
// The way back carries only answers.
constexpr std::uint32_t kBackWindow = 1;
}  // namespace

Result<std::unique_ptr<UcxReceiveFabric>> UcxReceiveFabric::create(const UcxOptions& options,
                                                                   FabricSink sink) {
  auto core = std::make_unique<Core>(options, std::move(sink));
  KVF_TRY_VOID(core->start());
  return std::unique_ptr<UcxReceiveFabric>(new UcxReceiveFabric(std::move(core)));
}

UcxReceiveFabric::UcxReceiveFabric(std::unique_ptr<Core> core) : core_(std::move(core)) {}
UcxReceiveFabric::~UcxReceiveFabric() = default;

bool UcxReceiveFabric::receiver_places_bytes() const {
  return !core_->options().put_mode();
}
void UcxReceiveFabric::add_pool(std::shared_ptr<const Pool> pool) {
  core_->add_pool(std::move(pool));
}
void UcxReceiveFabric::remove_pool(RankIndex rank) {
  core_->remove_pool(rank);
}
Result<FabricOffer> UcxReceiveFabric::offer(PeerId peer) {
  return core_->offer(peer);
}
void UcxReceiveFabric::open(Grant grant) {
  core_->open(std::move(grant));
}
void UcxReceiveFabric::close(const GrantKey& key) {
  core_->close(key);
}
void UcxReceiveFabric::fence(PeerId peer) {
  core_->fence(peer);
}
UcxReceiveStats UcxReceiveFabric::stats() const {
  return core_->stats();
}

Result<void> UcxReceiveFabric::Core::start() {
  ucx::Progress::Hooks hooks;
  hooks.on_message = [this](std::uint32_t id, const Message& message) { on_message(id, message); };
  hooks.pump = [this] { pump(); };
  hooks.on_stop = [this] { on_stop(); };
  KVF_TRY(progress_, ucx::Progress::start(options_, std::move(hooks)));
  progress_->begin();
  return {};
}

UcxReceiveFabric::Core::~Core() {
  // Not by resetting the pointer: on_stop still goes through it.
  if (progress_) {
    progress_->stop();
  }
}

UcxReceiveStats UcxReceiveFabric::Core::stats() const {
  // Counters only; nothing is ordered by them.
  return UcxReceiveStats{blocks_.load(std::memory_order_relaxed), discarded_.load(std::memory_order_relaxed),
                         strangers_.load(std::memory_order_relaxed), progress_->wakeups()};
}

void UcxReceiveFabric::Core::add_pool(std::shared_ptr<const Pool> pool) {
  progress_->submit([this, pool = std::move(pool)] { do_add_pool(pool); });
}
void UcxReceiveFabric::Core::remove_pool(RankIndex rank) {
  progress_->submit([this, rank] { do_remove_pool(rank); });
}
void UcxReceiveFabric::Core::open(Grant grant) {
  call([this, grant = std::move(grant)] { do_open(grant); });
}
void UcxReceiveFabric::Core::close(const GrantKey& key) {
  call([this, key] { do_close(key); });
}

void UcxReceiveFabric::Core::call(std::function<void()> change) {
  {
    const std::lock_guard lock(calls_mutex_);
    calls_.push_back(std::move(change));
  }
  progress_->submit([this] { run_calls(); });
}

void UcxReceiveFabric::Core::run_calls() {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(calls_mutex_);
    calls.swap(calls_);
  }
  for (const auto& change : calls) {
    change();
  }
}
void UcxReceiveFabric::Core::fence(PeerId id) {
  progress_->submit([this, id] { do_fence(id); });
}

Result<FabricOffer> UcxReceiveFabric::Core::offer(PeerId id) {
  const ucx::Token token = ucx::random_token();
  ucx::OfferText text;
  text.version = ucp_get_version_string();
  text.transports = options_.transports;
  text.puts = options_.put_mode();
  text.token = token;
  auto address = std::make_shared<std::promise<Result<std::vector<std::byte>>>>();
  auto made = address->get_future();
  if (!progress_->submit([this, id, token, address] { address->set_value(do_offer(id, token)); })) {
    return fail(Code::kUnavailable, "ucx: shutting down");
  }
  KVF_TRY(text.address, made.get());
  return FabricOffer{FabricKind::kUcx, ucx::encode_offer(text)};
}

Result<std::vector<std::byte>> UcxReceiveFabric::Core::do_offer(PeerId id, const ucx::Token& token) {
  KVF_TRY(auto worker, progress_->worker_for_peer());
  auto& peer = peers_[id];
  if (!peer) {
    peer = std::make_unique<Peer>();
    peer->id = id;
  }
  peer->token = token;
  peer->worker = std::move(worker);
  return peer->worker->address();
}

void UcxReceiveFabric::Core::do_open(Grant grant) {
  if (auto opened = table_.open(std::move(grant)); !opened) {
    reject(0, std::move(opened).error());
  }
}

void UcxReceiveFabric::Core::do_close(const GrantKey& key) {
  table_.close(key);
  std::erase_if(put_bytes_, [&key](const auto& entry) { return entry.first.grant == key; });
  sink_(fabric_event::GrantClosed{key});
}

void UcxReceiveFabric::Core::do_add_pool(const std::shared_ptr<const Pool>& pool) {
  table_.add_pool(pool);
  if (!options_.put_mode()) {
    return;
  }
  auto registration = ucx::PoolRegistration::map(*progress_, pool);
  if (!registration) {
    table_.remove_pool(pool->rank());
    reject(0, std::move(registration).error());
    return;
  }
  const auto& slot = registrations_[pool->rank()] = *std::move(registration);
  const auto text = describe_pool(*slot);
  if (!text) {
    reject(0, text.error());
    return;
  }
  for (const auto& [id, peer] : peers_) {
    if (peer->link && !peer->link->farewell.begun()) {
      peer->link->outbox.push_session(ucx::kPoolKeys, peer->link->session, *text);
    }
  }
}

void UcxReceiveFabric::Core::do_remove_pool(RankIndex rank) {
  table_.remove_pool(rank);
  if (registrations_.erase(rank) == 0) {
    return;
  }
  for (const auto& [id, peer] : peers_) {
    if (peer->link && !peer->link->farewell.begun()) {
      std::array<std::byte, 2 * ucx::kSessionBytes> header{};
      ucx::put_u64(header.data(), peer->link->session);
      ucx::put_u64(header.data() + ucx::kSessionBytes, rank);
      peer->link->outbox.push(ucx::kNoPool, header);
    }
  }
}

Result<std::string> UcxReceiveFabric::Core::describe_pool(const ucx::PoolRegistration& registration) const {
  ucx::RemotePool out;
  out.rank = registration.pool->rank();
  for (const auto& region : registration.regions) {
    KVF_TRY(auto key, region->key());
    out.regions.push_back(ucx::RemotePool::Region{reinterpret_cast<std::uintptr_t>(region->memory().data()),
                                                  region->memory().size(), std::move(key)});
  }
  for (std::uint32_t i = 0; i < registration.pool->buffer_count(); ++i) {
    const auto buffer = registration.pool->buffer(i);
    const std::uint32_t row_bytes = registration.pool->layout().buffers[i].shape.row_bytes;
    out.buffers.push_back(ucx::RemotePool::Buffer{registration.region_of(buffer.data()),
                                                  reinterpret_cast<std::uintptr_t>(buffer.data()),
                                                  buffer.size() / row_bytes, row_bytes});
  }
  return ucx::encode_pool(out);
}

void UcxReceiveFabric::Core::reject(PeerId peer, Error error) {
  sink_(fabric_event::Rejected{peer, std::move(error)});
}

UcxReceiveFabric::Core::Peer* UcxReceiveFabric::Core::find_session(std::span<const std::byte> header) {
  if (header.size() < ucx::kSessionBytes) {
    return nullptr;
  }
  const auto it = sessions_.find(ucx::get_u64(header.data()));
  return it == sessions_.end() ? nullptr : it->second;
}

void UcxReceiveFabric::Core::on_message(std::uint32_t id, const Message& message) {
  if (id == ucx::kHello) {
    on_hello(message);
    return;
  }
  if (id == ucx::kBlock) {
    on_block(message);
    return;
  }
  Peer* peer = find_session(message.header);
  if (peer == nullptr) {
    strangers_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (id == ucx::kBye) {
    break_link(*peer->link, Error{Code::kPeerLost, "ucx: the prefill daemon closed the connection"});
  } else {
    break_link(*peer->link,
               Error{Code::kProtocol, fmt::format("ucx: the prefill daemon sent message {}", id)});
  }
}

void UcxReceiveFabric::Core::on_hello(const Message& message) {
  const auto hello = ucx::decode_hello(message.header);
  Peer* found = nullptr;
  for (const auto& [id, peer] : peers_) {
    if (hello && peer->token && ucx::same_token(*peer->token, hello->token)) {
      found = peer.get();
    }
  }
  if (found == nullptr || message.payload.empty() || sessions_.contains(hello->session)) {
    strangers_.fetch_add(1, std::memory_order_relaxed);
    reject(0, hello ? Error{Code::kUnauthorized, "ucx: a hello with a token that is not valid (any more)"}
                    : hello.error());
    return;
  }
  found->token.reset();
  found->hello = Hello{hello->session,
                       {message.payload.begin(), message.payload.end()},
                       std::exchange(found->worker, nullptr)};
}

// The endpoint is made here and not in the callback: UCX does not like to be called from its own callbacks.
void UcxReceiveFabric::Core::open_link(Peer& peer) {
  Hello hello = std::move(*peer.hello);
  peer.hello.reset();
  auto endpoint = ucx::Endpoint::open(std::move(hello.worker), hello.address, kBackWindow);
  if (!endpoint) {
    reject(peer.id, std::move(endpoint).error());
    return;
  }
  auto link = std::make_unique<Link>();
  link->session = hello.session;
  link->endpoint = *std::move(endpoint);
  // Keys first: when the peer is up it knows all pools that exist by now.
  for (const auto& [rank, registration] : registrations_) {
    if (const auto text = describe_pool(*registration); text) {
      link->outbox.push_session(ucx::kPoolKeys, link->session, *text);
    }
  }
  link->outbox.push_session(ucx::kWelcome, link->session);
  sessions_.emplace(link->session, &peer);
  peer.link = std::move(link);
}

void UcxReceiveFabric::Core::break_link(Link& link, Error error) {
  if (!link.broken) {
    link.broken = true;
    link.down = std::move(error);
  }
}

void UcxReceiveFabric::Core::begin_close(Link& link, bool say_bye) {
  if (link.farewell.begun()) {
    return;
  }
  sessions_.erase(link.session);  // from here on nothing of it is placed
  link.farewell.begin(*link.endpoint, link.outbox, link.session, say_bye);
}

void UcxReceiveFabric::Core::do_fence(PeerId id) {
  const auto it = peers_.find(id);
  if (it == peers_.end()) {
    return;
  }
  Peer& peer = *it->second;
  peer.token.reset();
  peer.worker.reset();
  peer.hello.reset();
  if (peer.link) {
    break_link(*peer.link, Error{Code::kAborted, "ucx: fenced"});
    begin_close(*peer.link, true);
  }
}

void UcxReceiveFabric::Core::pump() {
  for (auto it = peers_.begin(); it != peers_.end();) {
    Peer& peer = *it->second;
    pump_peer(peer);
    const bool useless = !peer.link && !peer.token && !peer.hello;
    it = useless ? peers_.erase(it) : std::next(it);
  }
}

void UcxReceiveFabric::Core::pump_peer(Peer& peer) {
  if (peer.link) {
    Link& link = *peer.link;
    if (link.endpoint->failed()) {
      Error error = link.endpoint->error();
      error.code = Code::kPeerLost;
      break_link(link, std::move(error));
    }
    if (peer.hello) {
      break_link(link, Error{Code::kPeerLost, "ucx: the prefill daemon connected anew"});
    }
    if (link.outbox.overflowed()) {
      break_link(link, Error{Code::kProtocol, "ucx: the prefill daemon asks for more answers than it takes"});
    }
    if (link.broken) {
      begin_close(link, !link.endpoint->failed());
    } else {
      link.outbox.flush(*link.endpoint);
    }
    if (!link.farewell.begun() || !link.farewell.step(*link.endpoint, link.outbox)) {
      return;
    }
    const Error down = link.down;
    peer.link.reset();
    sink_(fabric_event::PeerDown{peer.id, down});
  }
  if (peer.hello) {
    open_link(peer);
  }
}

void UcxReceiveFabric::Core::on_stop() {
  for (const auto& [id, peer] : peers_) {
    if (peer->link) {
      begin_close(*peer->link, true);
    }
  }
  const bool closed = progress_->run_until(
      [this] {
        bool all = true;
        for (const auto& [id, peer] : peers_) {
          if (peer->link && !peer->link->farewell.step(*peer->link->endpoint, peer->link->outbox)) {
            all = false;
          }
        }
        return all;
      },
      kCloseNs);
  if (!closed) {
    KVF_LOG_WARN("ucx endpoints did not close in time", log::kv("peers", peers_.size()));
  }
  registrations_.clear();
}

}  // namespace kvferry
