// A run: rooms are used, faults strike, and then everything has to end.
#include "tests/sim/world.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "tests/support/fabric_fixture.h"

namespace kvferry::sim {

namespace {
constexpr Room kProbe = 63;
constexpr Nanos kSettle = 300 * kMilli;     // what is broken has been noticed by then
constexpr Nanos kEndWithin = 20 * kSecond;  // of the last fault; more than all deadlines one after the other
constexpr std::size_t kViolationsMax = 5;
}  // namespace

Spec random_spec(std::uint64_t seed) {
  test::Rng rng(seed * 2 + 1);
  Spec spec;
  spec.seed = seed;
  spec.reach = static_cast<Reach>(rng.below(3));
  spec.page_size = rng.between32(1, 3);
  const auto layers = rng.between32(1, 3);
  const std::uint32_t decode_tp = 1u << rng.below(3);
  if (rng.chance(1, 2)) {
    spec.model = test::small_gqa(4, layers);
    spec.decode = test::tp(decode_tp, rng.chance(1, 4) ? decode_tp : 1);
  } else {
    spec.model = test::small_mla(layers);
    spec.decode = test::tp(decode_tp, rng.chance(1, 2) ? decode_tp : 1);
  }
  spec.prefill = test::tp(1u << rng.below(3));
  if (layers == 2 && rng.chance(1, 3)) {
    spec.prefill.pp = 2;
  }
  spec.prefill_daemons = spec.prefill.rank_count() > 1 ? rng.between32(1, 2) : 1;
  spec.decode_daemons = spec.decode.rank_count() > 1 ? rng.between32(1, 2) : 1;
  spec.jobs_per_peer_max = rng.chance(1, 2) ? 2 : 16;
  spec.hurry = rng.chance(1, 3);
  spec.uses = spec.hurry ? 80 : spec.uses;
  spec.verify = rng.chance(1, 2) ? kVerifyFull : rng.chance(1, 2) ? 3 : kVerifyOff;
  return spec;
}

std::string describe(const Spec& spec) {
  const char* reach[] = {"placed", "hardware", "shared"};
  return fmt::format("seed {}: {} {} ({} daemons) -> {} ({} daemons), page {}, fabric {}", spec.seed,
                     to_string(spec.model.attention), to_string(spec.prefill), spec.prefill_daemons,
                     to_string(spec.decode), spec.decode_daemons, spec.page_size,
                     reach[static_cast<int>(spec.reach)]);
}

std::vector<Fault> faults_of(const Spec& spec) {
  test::Rng rng(spec.seed * 2);
  return random_faults(rng, kSecond, kSecond + spec.busy);
}

Outcome run_seed(std::uint64_t seed) {
  const Spec spec = random_spec(seed);
  return World(spec, faults_of(spec)).run();
}

World::World(Spec spec, std::vector<Fault> faults)
    : spec_(std::move(spec)), faults_(std::move(faults)), rng_(spec_.seed), uses_left_(spec_.uses) {
  disturbed_ = std::any_of(faults_.begin(), faults_.end(),
                           [](const Fault& fault) { return disturbs_others(fault.kind); });
  for (std::uint32_t i = 0; i < spec_.prefill_daemons; ++i) {
    prefills_.push_back(std::make_unique<PrefillDaemon>());
    prefills_.back()->prefill = true;
    prefills_.back()->index = i;
  }
  for (std::uint32_t i = 0; i < spec_.decode_daemons; ++i) {
    decodes_.push_back(std::make_unique<DecodeDaemon>());
    decodes_.back()->index = i;
  }
  for (const bool prefill : {true, false}) {
    const std::uint32_t ranks = (prefill ? spec_.prefill : spec_.decode).rank_count();
    for (RankIndex rank = 0; rank < ranks; ++rank) {
      Engine& engine = (prefill ? prefill_engines_ : decode_engines_)[rank];
      engine.prefill = prefill;
      engine.rank = rank;
      daemon_of(engine).ranks.push_back(rank);
    }
  }
}

World::Daemon& World::daemon_of(const Engine& engine) {
  const std::uint64_t ranks = (engine.prefill ? spec_.prefill : spec_.decode).rank_count();
  if (engine.prefill) {
    return *prefills_[engine.rank * prefills_.size() / ranks];
  }
  return *decodes_[engine.rank * decodes_.size() / ranks];
}

bool World::any(const std::map<RankIndex, Fate>& fates, Fate fate) {
  return std::any_of(fates.begin(), fates.end(), [fate](const auto& item) { return item.second == fate; });
}

bool World::all(const std::map<RankIndex, Fate>& fates, Fate fate) {
  return std::all_of(fates.begin(), fates.end(), [fate](const auto& item) { return item.second == fate; });
}

bool World::ended(const Use& use) {
  return !any(use.prefill, Fate::kNone) && !any(use.decode, Fate::kNone);
}

std::shared_ptr<World::Use> World::new_use(Room room, std::uint64_t tokens, bool aux) {
  auto use = std::make_shared<Use>();
  use->number = next_use_++;
  use->room = room;
  use->aux = aux;
  const std::uint64_t virtual_page =
      std::uint64_t{spec_.page_size} * std::lcm(spec_.decode.dcp, spec_.prefill.dcp);
  use->prefix = rng_.chance(1, 3) ? virtual_page * rng_.below(3) : 0;
  use->tokens = use->prefix + tokens;
  const std::uint64_t chunk_page = std::uint64_t{spec_.page_size} * spec_.prefill.dcp;
  for (std::uint64_t at = use->prefix; at < use->tokens;) {
    at = std::min(use->tokens, at + chunk_page * rng_.between(1, 4));
    use->cuts.push_back(at);
  }
  if (use->cuts.empty()) {
    use->cuts.push_back(use->tokens);
  }
  use->layer_group = rng_.chance(1, 3) ? rng_.between32(1, 2) : 0;
  for (const auto& [rank, engine] : prefill_engines_) {
    use->prefill[rank] = Fate::kNone;
  }
  for (const auto& [rank, engine] : decode_engines_) {
    use->decode[rank] = Fate::kNone;
  }
  return use;
}

void World::start_use(Room room) {
  const auto before = uses_.find(room);
  const auto use = new_use(room, rng_.chance(1, 12) ? 0 : rng_.between(1, 14), rng_.chance(3, 4));
  // A rank that took no part in the use before may be answered for that one now, and so on, until a use of
  // the room has landed everywhere.
  if (before != uses_.end()) {
    const Use& last = *before->second;
    const bool landed = all(last.prefill, Fate::kLanded) && all(last.decode, Fate::kLanded);
    use->haunted = any(last.prefill, Fate::kSkipped) || any(last.decode, Fate::kSkipped) ||
                   last.granted.size() < last.decode.size() ||
                   ((last.haunted || (last.tokens == last.prefix && !last.aux)) && !landed);
    use->touched = use->haunted;
  }
  uses_[room] = use;
  trace_.add(1, room, use->tokens, use->prefix);
  const Nanos spread = spec_.hurry ? 20 * kMicro : rng_.chance(1, 2) ? kMilli : 20 * kMilli;
  for (auto& [rank, engine] : decode_engines_) {
    time_.after(random_delay(spread), [this, &at = engine, use] { expect(at, use, 0); });
  }
  for (auto& [rank, engine] : prefill_engines_) {
    time_.after(random_delay(spread), [this, &at = engine, use] { send_next(at, use, 0, 0); });
  }
}

// Every free room id is used again at once, or after a while.
void World::next_uses() {
  if (quiet_ || uses_left_ == 0) {
    return;
  }
  for (Room room = 1; room <= spec_.room_ids && uses_left_ > 0; ++room) {
    const auto at = uses_.find(room);
    // Its aux slot is the room's own, so a room that rests anywhere is not used again yet.
    const bool rests = std::any_of(decode_engines_.begin(), decode_engines_.end(),
                                   [room](const auto& item) { return item.second.limbo.contains(room); });
    if (!rests && (at == uses_.end() || ended(*at->second)) && rng_.chance(1, 2)) {
      --uses_left_;
      start_use(room);
    }
  }
  time_.after(random_delay(spec_.hurry ? 200 * kMicro : 20 * kMilli), [this] { next_uses(); });
}

void World::inject(const Fault& fault) {
  trace_.add(2, static_cast<std::uint64_t>(fault.kind), fault.a, fault.b);
  Daemon& prefill = *prefills_[fault.a % prefills_.size()];
  Daemon& decode = *decodes_[fault.a % decodes_.size()];
  Daemon& from = fault.to_decode ? prefill : decode;
  const auto session = [&]() -> std::shared_ptr<Session> {
    return from.sessions.empty()
               ? nullptr
               : std::next(from.sessions.begin(), static_cast<std::ptrdiff_t>(fault.b % from.sessions.size()))
                     ->second;
  }();
  const auto engine = [&](std::map<RankIndex, Engine>& engines) -> Engine& {
    return engines.at(static_cast<RankIndex>(fault.a % engines.size()));
  };
  switch (fault.kind) {
    case FaultKind::kAbortPrefill:
    case FaultKind::kAbortDecode: {
      Engine& chosen = engine(fault.kind == FaultKind::kAbortPrefill ? prefill_engines_ : decode_engines_);
      if (!chosen.held.empty()) {
        abort_room(
            chosen,
            std::next(chosen.held.begin(), static_cast<std::ptrdiff_t>(fault.b % chosen.held.size()))->first);
      }
      return;
    }
    case FaultKind::kLoseMessage:
    case FaultKind::kRepeatMessage:
    case FaultKind::kReorderMessage:
    case FaultKind::kCutMessage:
      if (session) {
        (fault.to_decode ? session->at_prefill : session->at_decode).spoil = fault.kind;
      }
      return;
    case FaultKind::kStallControl:
      if (session) {
        (fault.to_decode ? session->at_prefill : session->at_decode).stalled_until =
            time_.now() + fault.length;
      }
      return;
    case FaultKind::kStallFabric:
      for (const auto& [peer, each] : prefill.sessions) {
        each->wire->stall(time_.now() + fault.length);
      }
      return;
    case FaultKind::kReset:
      if (session) {
        const Error why{Code::kPeerLost, "connection reset"};
        session->wire->reset(why);
        lose(session, fault.to_decode, why);
      }
      return;
    case FaultKind::kCrashPrefill:
      crash(prefill, fault.length);
      return;
    case FaultKind::kCrashDecode:
      crash(decode, fault.length);
      return;
    case FaultKind::kEngineDiesPrefill:
      engine_dies(engine(prefill_engines_), fault.length);
      return;
    case FaultKind::kEngineDiesDecode:
      engine_dies(engine(decode_engines_), fault.length);
      return;
    case FaultKind::kFlipByte:
      flips_ += spec_.verify == kVerifyFull ? 1 : 0;  // nobody else could know
      return;
    case FaultKind::kClockJump:
      (fault.to_decode ? decode : prefill).jumped += fault.length;
      return;
    case FaultKind::kPoolDrought:
      engine(decode_engines_).drought_until = time_.now() + fault.length;
      return;
  }
}

Outcome World::run() {
  for (const auto& daemon : prefills_) {
    boot(*daemon);
  }
  for (const auto& daemon : decodes_) {
    boot(*daemon);
  }
  for (auto* engines : {&prefill_engines_, &decode_engines_}) {
    for (auto& [rank, engine] : *engines) {
      new_engine(engine);
    }
  }
  for (const Fault& fault : faults_) {
    time_.at(fault.when, [this, &fault] { inject(fault); });
  }
  next_uses();
  const auto go_on = [this](Nanos end) {
    while (outcome_.violations.empty() && time_.step(end)) {
      check_pages();
    }
  };
  go_on(kSecond + spec_.busy);
  quiet_ = true;
  flips_ = 0;
  Nanos last = time_.now();  // of what the faults do
  for (const Fault& fault : faults_) {
    last = std::max(last, fault.when + fault.length);
  }
  go_on(last + kSettle);
  const Nanos end = time_.now() + kEndWithin;
  while (outcome_.violations.empty() && time_.now() < end && !unfinished().empty()) {
    go_on(time_.now() + 50 * kMilli);
  }
  if (outcome_.violations.empty() && !unfinished().empty()) {
    violation("did not end: " + unfinished());
  }
  if (outcome_.violations.empty()) {
    // All is over, and a new room must land on every rank, on both sides.
    uses_.clear();
    disturbed_ = false;
    const auto probe = new_use(kProbe, 5, true);
    uses_[kProbe] = probe;
    for (auto& [rank, engine] : decode_engines_) {
      expect(engine, probe, 0);
    }
    for (auto& [rank, engine] : prefill_engines_) {
      send_next(engine, probe, 0, 0);
    }
    go_on(time_.now() + 300 * kMilli);
    for (const auto* fates : {&probe->prefill, &probe->decode}) {
      for (const auto& [rank, fate] : *fates) {
        if (fate != Fate::kLanded && outcome_.violations.empty()) {
          violation(fmt::format("after all faults a new room does not land on {} rank {}",
                                fates == &probe->prefill ? "prefill" : "decode", rank));
        }
      }
    }
  }
  for (const auto& daemon : prefills_) {
    outcome_.stale += daemon->rooms ? daemon->rooms->stats().stale_messages : 0;
  }
  for (const auto& daemon : decodes_) {
    outcome_.stale += daemon->rooms ? daemon->rooms->stats().stale_messages : 0;
  }
  outcome_.events = time_.events();
  outcome_.hash = trace_.hash();
  return outcome_;
}

void World::violation(std::string text) {
  if (outcome_.violations.size() < kViolationsMax) {
    outcome_.violations.push_back(
        fmt::format("{:.3f} ms: {}", static_cast<double>(time_.now() - kSecond) / 1e6, text));
  }
}

std::vector<Fault> shortest(const Spec& spec, std::vector<Fault> faults) {
  const auto fails = [&spec](const std::vector<Fault>& some) {
    return !World(spec, some).run().violations.empty();
  };
  for (std::size_t part = std::max<std::size_t>(faults.size() / 2, 1); !faults.empty();) {
    bool left_out = false;
    for (std::size_t begin = 0; begin < faults.size();) {
      std::vector<Fault> fewer = faults;
      const auto first = fewer.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto last = fewer.begin() + static_cast<std::ptrdiff_t>(std::min(begin + part, fewer.size()));
      fewer.erase(first, last);
      if (fails(fewer)) {
        faults = std::move(fewer);
        left_out = true;
      } else {
        begin += part;
      }
    }
    if (part == 1 && !left_out) {
      break;
    }
    part = std::max<std::size_t>(part / 2, 1);
  }
  return faults;
}

}  // namespace kvferry::sim
