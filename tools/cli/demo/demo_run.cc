#include "tools/cli/demo/demo_run.h"

#include <algorithm>
#include <utility>

namespace kvferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

// How long the other side of a failed room has to end by itself before the router aborts it there.
constexpr seconds kAbortAfter{10};
// The same where the two daemons cannot know of each other: one died before it had told the other of the
// room.
constexpr seconds kAbortAfterKill{1};
constexpr seconds kAttachLimit{180};
constexpr seconds kBalanceLimit{20};
// Failures are rarely alone; after this many the rest of the trace would only repeat them.
constexpr std::uint64_t kFailuresMax = 5;
constexpr int kAloneRooms = 3;
constexpr std::uint64_t kAloneTokens = 16384;

}  // namespace

DemoRun::DemoRun(const DemoOptions& options, DemoLayout layout, std::vector<TraceRequest> trace,
                 PoolSizes pools, DemoResults& results)
    : options_(options),
      layout_(std::move(layout)),
      trace_(std::move(trace)),
      pools_(pools),
      results_(results),
      rooms_(layout_, pools, options.seed << 32) {
  results_.requests_wanted = trace_.size();
}

Result<void> DemoRun::run(DemoCluster& cluster) {
  KVF_TRY_VOID(cluster.start());
  progress_.note(
      fmt::format("daemons are up: bootstrap http://{}, metrics http://{}/metrics (prefill) and "
                  "http://{}/metrics (decode); engines fill their pools",
                  cluster.bootstrap(), cluster.metrics(Side::kPrefill), cluster.metrics(Side::kDecode)));
  KVF_TRY_VOID(await_attached(cluster));
  KVF_TRY_VOID(replay(cluster));
  if (results_.good() && !options_.corrupt) {
    KVF_TRY_VOID(measure_alone(cluster));
  }
  progress_.finish();
  KVF_TRY_VOID(await_balance(cluster));
  results_.balanced = true;
  return {};
}

Result<void> DemoRun::await_attached(DemoCluster& cluster) {
  const Instant deadline = steady_clock::now() + kAttachLimit;
  while (!attached_[0] || !attached_[1]) {
    if (steady_clock::now() > deadline) {
      return fail(Code::kDeadline, "the engines have not attached within {} s", kAttachLimit.count());
    }
    KVF_TRY(const auto events, cluster.poll(milliseconds(100)));
    for (const ClusterEvent& event : events) {
      on_event(cluster, event);
    }
  }
  last_event_ = steady_clock::now();
  return {};
}

Result<void> DemoRun::replay(DemoCluster& cluster) {
  while (rooms_.size() > 0 || (next_ < trace_.size() && !stopped())) {
    while (next_ < trace_.size() && !stopped() && rooms_.size() < options_.concurrency &&
           admit_next(cluster)) {
    }
    KVF_TRY_VOID(step(cluster));
    if (kill_is_due()) {
      KVF_TRY_VOID(kill_and_recover(cluster));
    }
  }
  if (!options_.kill.empty() && !kill_done_) {
    results_.problems.push_back(fmt::format(
        "the trace ended before the {} daemon could be killed in the middle of a transfer", options_.kill));
  }
  if (next_ < trace_.size()) {
    progress_.note(fmt::format("stopped after {} of {} requests", next_, trace_.size()));
  }
  return {};
}

// A corrupt run ends with its first finding, any other with its fifth failure.
bool DemoRun::stopped() const {
  return results_.mismatches > 0 || results_.failed >= kFailuresMax;
}

Result<void> DemoRun::step(DemoCluster& cluster) {
  KVF_TRY(const auto events, cluster.poll(milliseconds(100)));
  for (const ClusterEvent& event : events) {
    on_event(cluster, event);
    last_event_ = steady_clock::now();
  }
  if (misfit_) {
    return fail(Code::kMismatch, "the two sides do not fit: {}", *misfit_);
  }
  abort_survivors(cluster);
  progress_.show(results_, rooms_.size());
  return check_progress();
}

// False: no pages for the next request yet.
bool DemoRun::admit_next(DemoCluster& cluster) {
  const TraceRequest& request = trace_[next_];
  const Admission admission =
      admit(request, prefixes_.hit_tokens(request), layout_.unit_tokens(), pools_.tokens);
  const auto id = rooms_.open(admission.tokens, admission.prefix);
  if (!id) {
    return false;
  }
  if (admission.clipped) {
    ++results_.clipped;
    progress_.note(
        fmt::format("request {} of {} tokens is clipped to {} ({} of them a prefix hit): the pools hold {} "
                    "tokens",
                    next_ + 1, request.input_tokens, admission.tokens, admission.prefix, pools_.tokens));
  }
  // Seen from here on and not from the landing on, so that the same seed moves the same bytes.
  prefixes_.add(request, admission.tokens);
  ++next_;
  begin(cluster, rooms_.at(*id));
  return true;
}

void DemoRun::begin(DemoCluster& cluster, DemoRoom& room) {
  const nlohmann::json expect{{"op", "expect"},
                              {"room", room.room},
                              {"tokens", room.tokens},
                              {"prefix", room.prefix},
                              {"bootstrap", cluster.bootstrap()}};
  if (room.alone) {
    // Prefill is asked once decode expects the room: then nothing but the transfer runs.
    cluster.send(Side::kDecode, expect);
    return;
  }
  // Either side may be first in real life; here they take turns.
  if (next_ % 2 == 0) {
    send_request(cluster, room);
    cluster.send(Side::kDecode, expect);
  } else {
    cluster.send(Side::kDecode, expect);
    send_request(cluster, room);
  }
}

void DemoRun::send_request(DemoCluster& cluster, const DemoRoom& room) {
  const std::uint64_t unit = layout_.unit_tokens();
  const bool corrupt = options_.corrupt && !corrupted_ && room.tokens > room.prefix;
  corrupted_ = corrupted_ || corrupt;
  cluster.send(Side::kPrefill, {{"op", "request"},
                                {"room", room.room},
                                {"tokens", room.tokens},
                                {"prefix", room.prefix},
                                {"chunk_tokens", (options_.chunk_tokens + unit - 1) / unit * unit},
                                {"layer_group", options_.layer_group},
                                {"stream", !room.alone},
                                {"corrupt", corrupt}});
}

void DemoRun::on_event(DemoCluster& cluster, const ClusterEvent& event) {
  const std::string kind = event.body.value("event", "");
  const auto side = static_cast<std::size_t>(event.side);
  if (kind == "attached" || kind == "lost") {
    attached_[side] = kind == "attached";
  } else if (kind == "stats") {
    stats_[side] = event.body;
  } else if (kind == "stray") {
    results_.problems.push_back(fmt::format("{}: {}", side_name(event.side), event.body.value("reason", "")));
  } else if (kind == "corrupted") {
    corruption_ = event.body;
    progress_.note(fmt::format("corrupting one byte on purpose: {}", event.body.dump()));
  }
  if (kind == "failed" && event.body.value("code", "") == "mismatch") {
    misfit_ = event.body.value("reason", "");
  }
  const auto ended = rooms_.on_event(event.side, event.body, steady_clock::now());
  if (ended) {
    on_ended(*ended);
    return;
  }
  const Room id = event.body.value("room", Room{0});
  if (kind == "expected" && rooms_.all().contains(id) && rooms_.at(id).alone) {
    send_request(cluster, rooms_.at(id));
  }
}

void DemoRun::on_ended(Room id) {
  DemoRoom& room = rooms_.at(id);
  const bool both = room.ending(Side::kPrefill)->landed && room.ending(Side::kDecode)->landed;
  if (room.ending(Side::kDecode)->landed) {
    judge_bytes(id, room.ending(Side::kDecode)->event);
  }
  if (both) {
    rooms_.account(room, results_);
  } else if (room.hit_by_kill) {
    ++results_.killed;
  } else {
    on_failed(room);
  }
  if (room.hit_by_kill) {
    killed_.push_back(room);
  }
  rooms_.close(id);
}

void DemoRun::judge_bytes(Room id, const nlohmann::json& landed) {
  const auto mismatches = landed.value("mismatches", std::uint64_t{0});
  results_.verified += landed.value("verified", std::uint64_t{0});
  results_.mismatches += mismatches;
  if (mismatches == 0) {
    return;
  }
  progress_.note(describe_mismatch(id, landed));
  if (corruption_ && landed.contains("first")) {
    for (const char* field : {"layer", "kind", "head", "position", "byte"}) {
      if (corruption_->at(field) != landed["first"].value(field, nlohmann::json())) {
        results_.problems.push_back(
            fmt::format("field {} of what was found is not that of the byte that was "
                        "corrupted on purpose",
                        field));
      }
    }
  }
}

void DemoRun::on_failed(const DemoRoom& room) {
  ++results_.failed;
  const auto text = [](const RoomEnding& ending) {
    return ending.landed ? std::string("landed")
                         : fmt::format("{} ({}): {}", ending.event.value("event", ""),
                                       ending.event.value("code", ""), ending.reason);
  };
  progress_.note(fmt::format("FAILED room {} ({} tokens, prefix {}): prefill {}; decode {}", room.room,
                             room.tokens, room.prefix, text(*room.endings[0]), text(*room.endings[1])));
}

void DemoRun::abort_survivors(DemoCluster& cluster) {
  const Instant now = steady_clock::now();
  for (auto& [id, room] : rooms_.all()) {
    const bool one_ended = room.endings[0].has_value() != room.endings[1].has_value();
    const seconds wait = room.hit_by_kill && !room.cut_by_kill ? kAbortAfterKill : kAbortAfter;
    if (!one_ended || room.aborted_by_us || now < room.first_ending + wait) {
      continue;
    }
    const Side side = room.endings[0] ? Side::kDecode : Side::kPrefill;
    const RoomEnding& first = *room.ending(other(side));
    if (!first.landed) {
      room.aborted_by_us = true;
      cluster.send(side, {{"op", "abort"},
                          {"room", id},
                          {"reason", fmt::format("the {} side ended it {} s ago: {}", side_name(other(side)),
                                                 wait.count(), first.reason)}});
    }
  }
}

Result<void> DemoRun::check_progress() const {
  if (rooms_.size() == 0 || steady_clock::now() < last_event_ + seconds(options_.timeout_s)) {
    return {};
  }
  std::string stuck;
  for (const auto& [id, entry] : rooms_.all()) {
    const auto& room = entry;  // older compilers let no lambda capture a binding
    const auto state = [&](int side, bool begun) {
      return room.endings[side] ? room.endings[side]->event.value("event", "")
             : begun            ? "under way"
                                : "not begun";
    };
    stuck += fmt::format("\n  room {} of {} tokens: prefill {}, decode {}", id, room.tokens,
                         state(0, room.started), state(1, room.expected));
  }
  return fail(Code::kDeadline, "nothing has happened for {} s (--timeout); these rooms hang:{}",
              options_.timeout_s, stuck);
}

Result<void> DemoRun::measure_alone(DemoCluster& cluster) {
  const std::uint64_t unit = layout_.unit_tokens();
  const std::uint64_t tokens = std::min(kAloneTokens / unit * unit, pools_.tokens);
  for (int i = 0; i < kAloneRooms && results_.good() && tokens > 0; ++i) {
    const auto id = rooms_.open(tokens, 0);
    if (!id) {
      return {};
    }
    rooms_.at(*id).alone = true;
    begin(cluster, rooms_.at(*id));
    while (rooms_.size() > 0) {
      KVF_TRY_VOID(step(cluster));
    }
  }
  return {};
}

// Every page and slot must come back, at the latest when quarantine has ended.
Result<void> DemoRun::await_balance(DemoCluster& cluster) {
  const Instant deadline = steady_clock::now() + kBalanceLimit;
  std::uint64_t pages = 0;
  std::uint64_t slots = 0;
  do {
    pages = slots = 0;
    stats_[0] = stats_[1] = std::nullopt;
    for (const Side side : {Side::kPrefill, Side::kDecode}) {
      cluster.send(side, {{"op", "stats"}});
    }
    while ((!stats_[0] || !stats_[1]) && steady_clock::now() < deadline) {
      KVF_TRY(const auto events, cluster.poll(milliseconds(100)));
      for (const ClusterEvent& event : events) {
        on_event(cluster, event);
      }
    }
    for (const auto& stats : stats_) {
      if (!stats || !stats->contains("ranks")) {
        return fail(Code::kDeadline, "an engine does not answer how many pages it holds");
      }
      for (const nlohmann::json& rank : stats->at("ranks")) {
        pages += rank.value("pages", std::uint64_t{0}) - rank.value("free", std::uint64_t{0});
        slots += rank.value("slots", std::uint64_t{0}) - rank.value("slots_free", std::uint64_t{0});
      }
    }
  } while (pages + slots > 0 && steady_clock::now() < deadline);
  results_.leaked_pages = pages;
  results_.leaked_slots = slots;
  return {};
}

}  // namespace kvferry
