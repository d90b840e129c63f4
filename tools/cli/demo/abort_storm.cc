#include "tools/cli/demo/abort_storm.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "tools/cli/demo/demo_cluster.h"
#include "tools/cli/demo/demo_results.h"
#include "tools/cli/demo/storm_side.h"

namespace kvferry {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr std::uint32_t kPages = 8;
constexpr std::uint32_t kChunks = 4;
constexpr seconds kAttachLimit{60};
// Far above any drain: a room that takes longer hangs.
constexpr seconds kEndLimit{60};
// Rounds whose abort came too early or too late do not count; more than so many for each that does is a
// fault.
constexpr std::uint64_t kTriesPerRound = 10;

struct StormResults {
  std::uint64_t tries = 0;
  std::uint64_t moving = 0;       // bytes had landed, and others never did
  std::uint64_t by_side[2] = {};  // of them, who aborted
  std::uint64_t landed_first = 0;
  std::uint64_t all_written = 0;  // the abort came after the last byte and before the landing
  std::uint64_t verified = 0;
  std::uint64_t wrong = 0;
  std::uint64_t watched = 0;
  std::uint64_t changed = 0;         // rounds whose watched pages changed after the final event
  std::vector<double> acknowledged;  // seconds from the abort to the final event of who aborted
  std::vector<double> other_side;    // and of the other engine
  std::vector<std::string> problems;
};

/// Both ends of a room, and who gets the pages of it.
struct StormEnds {
  std::optional<StormEnd> end[2];

  std::optional<StormEnd>& of(Side side) { return end[static_cast<int>(side)]; }
  bool both() const { return end[0] && end[1]; }
};

/// The start of a row of the destination, and what it is before the room has moved it. Eight bytes, because
/// one of a row is like the guard's by chance now and then.
class Place {
 public:
  explicit Place(const volatile std::byte* bytes) : bytes_(bytes) {
    std::copy(bytes, bytes + kBytes, before_);
  }
  bool moved() const { return !std::equal(before_, before_ + kBytes, bytes_); }

 private:
  static constexpr int kBytes = 8;
  const volatile std::byte* bytes_;
  std::byte before_[kBytes];
};

double seconds_between(Instant begin, Instant end) {
  return std::chrono::duration<double>(std::max(end, begin) - begin).count();
}

class AbortStorm {
 public:
  AbortStorm(const DemoOptions& options, DemoCluster& cluster, StormSide prefill, StormSide decode)
      : options_(options),
        cluster_(cluster),
        sides_{std::move(prefill), std::move(decode)},
        random_(options.seed),
        next_room_(options.seed << 20) {}

  Result<void> run();
  const StormResults& results() const { return results_; }

 private:
  StormSide& side(Side which) { return sides_[static_cast<int>(which)]; }
  Result<void> attach();
  Result<void> round();
  Result<void> start(Room room, std::uint32_t withheld);
  Result<bool> await_movement(Room room, const Place& place, StormEnds& ends);
  Result<void> poll(Room room, StormEnds& ends);
  Result<void> check_time(Instant since, Room room, const char* what);
  void judge_abort(StormEnds& ends, Side aborter, Instant aborted_at, std::uint32_t withheld);
  void judge_bytes(Room room, std::uint64_t hash_then);

  const DemoOptions& options_;
  DemoCluster& cluster_;
  StormSide sides_[2];
  std::mt19937_64 random_;
  Room next_room_;
  StormResults results_;
};

Result<void> AbortStorm::run() {
  KVF_TRY_VOID(attach());
  while (results_.moving < options_.abort_storm && results_.problems.empty()) {
    if (results_.tries == options_.abort_storm * kTriesPerRound) {
      results_.problems.push_back(
          "the aborts do not come while bytes move: too many rounds for too few hits");
      break;
    }
    KVF_TRY_VOID(round());
    KVF_TRY_VOID(cluster_.check_daemons());
  }
  return {};
}

Result<void> AbortStorm::attach() {
  const Instant deadline = steady_clock::now() + kAttachLimit;
  for (const Side which : {Side::kPrefill, Side::kDecode}) {
    for (bool attached = false; !attached;) {
      KVF_TRY(attached, side(which).attach());
      if (!attached && steady_clock::now() > deadline) {
        return fail(Code::kDeadline, "the {} engine cannot attach", side_name(which));
      }
    }
  }
  return {};
}

Result<void> AbortStorm::round() {
  ++results_.tries;
  StormSide& prefill = side(Side::kPrefill);
  StormSide& decode = side(Side::kDecode);
  const Side aborter = results_.tries % 2 == 0 ? Side::kPrefill : Side::kDecode;
  const Room first = ++next_room_;
  const Room second = ++next_room_;
  prefill.deal(random_);
  decode.deal(random_);
  prefill.fill(first, prefill.pages());
  decode.fill_guard();
  // Chosen and read before anything moves.
  const auto buffer = static_cast<std::uint32_t>(random_() % decode.buffers());
  const auto page = decode.pages()[random_() % (decode.pages().size() / 2)];
  const Place place(decode.first_row(buffer, page));
  // Every third room never gets its last chunk.
  const std::uint32_t withheld = results_.tries % 3 == 0 ? 1 : 0;
  KVF_TRY_VOID(start(first, withheld));
  StormEnds ends;
  KVF_TRY(const bool moves, await_movement(first, place, ends));
  const Instant aborted_at = steady_clock::now();
  if (moves) {
    side(aborter).abort(first);
  }
  // The very moment: nothing lies between reading the final event and the next use of the pages.
  std::uint64_t hash = 0;
  StormEnds given;
  while (!given.both()) {
    KVF_TRY_VOID(poll(first, ends));
    if (ends.of(Side::kDecode) && !given.of(Side::kDecode)) {
      KVF_TRY_VOID(decode.expect(second, decode.given(), cluster_.bootstrap()));
      hash = decode.hash_watched();
      given.of(Side::kDecode) = ends.of(Side::kDecode);
    }
    if (ends.of(Side::kPrefill) && !given.of(Side::kPrefill)) {
      prefill.fill(second, prefill.given());
      KVF_TRY_VOID(prefill.send(second, prefill.given(), 1, 0));
      given.of(Side::kPrefill) = ends.of(Side::kPrefill);
    }
    KVF_TRY_VOID(check_time(aborted_at, first, "has not ended on both sides"));
  }
  if (!moves && !ends.of(Side::kDecode)->landed()) {
    results_.problems.push_back(
        fmt::format("room {} ended by itself: {}", first, ends.of(Side::kDecode)->reason));
  }
  judge_abort(ends, aborter, aborted_at, withheld);
  StormEnds landings;
  for (const Instant since = steady_clock::now(); !landings.both();) {
    KVF_TRY_VOID(poll(second, landings));
    KVF_TRY_VOID(check_time(since, second, "has not landed"));
  }
  for (const Side which : {Side::kPrefill, Side::kDecode}) {
    if (!landings.of(which)->landed()) {
      results_.problems.push_back(fmt::format("room {} in reused pages failed on the {} side: {}", second,
                                              side_name(which), landings.of(which)->reason));
    }
  }
  judge_bytes(second, hash);
  return {};
}

// Either side may be first.
Result<void> AbortStorm::start(Room room, std::uint32_t withheld) {
  const auto send = [&] {
    return side(Side::kPrefill).send(room, side(Side::kPrefill).pages(), kChunks, withheld);
  };
  const auto expect = [&] {
    return side(Side::kDecode).expect(room, side(Side::kDecode).pages(), cluster_.bootstrap());
  };
  if (random_() % 2 == 0) {
    KVF_TRY_VOID(send());
    return expect();
  }
  KVF_TRY_VOID(expect());
  return send();
}

// True when the bytes at the place have arrived; false when the room has ended before.
Result<bool> AbortStorm::await_movement(Room room, const Place& place, StormEnds& ends) {
  const Instant since = steady_clock::now();
  while (!place.moved()) {
    KVF_TRY_VOID(poll(room, ends));
    if (ends.end[0] || ends.end[1]) {
      return false;
    }
    KVF_TRY_VOID(check_time(since, room, "does not move"));
  }
  return true;
}

Result<void> AbortStorm::poll(Room room, StormEnds& ends) {
  ::sched_yield();
  for (const Side which : {Side::kPrefill, Side::kDecode}) {
    if (!ends.of(which)) {
      KVF_TRY(ends.of(which), side(which).poll(room));
    }
  }
  return {};
}

Result<void> AbortStorm::check_time(Instant since, Room room, const char* what) {
  if (steady_clock::now() < since + kEndLimit) {
    return {};
  }
  KVF_TRY_VOID(cluster_.check_daemons());
  return fail(Code::kDeadline, "room {} {} within {} s", room, what, kEndLimit.count());
}

void AbortStorm::judge_abort(StormEnds& ends, Side aborter, Instant aborted_at, std::uint32_t withheld) {
  StormSide& decode = side(Side::kDecode);
  const StormEnd& decoded = *ends.of(Side::kDecode);
  if (decoded.landed()) {
    ++results_.landed_first;
    return;
  }
  // Of the pages that prefill had sent. A few bytes of what was written equal the guard by chance.
  const auto sent = std::span(decode.watched()).first((kChunks - withheld) * kPages / kChunks / 2);
  const std::uint64_t written = decode.written(sent);
  const std::uint64_t all = decode.tokens_of(sent) * decode.token_bytes();
  results_.watched += decode.tokens_of(decode.watched()) * decode.token_bytes();
  if (written == 0 || written > all / 100 * 99) {
    ++results_.all_written;
    return;
  }
  ++results_.moving;
  ++results_.by_side[static_cast<int>(aborter)];
  results_.acknowledged.push_back(seconds_between(aborted_at, ends.of(aborter)->at));
  results_.other_side.push_back(seconds_between(aborted_at, ends.of(other(aborter))->at));
}

void AbortStorm::judge_bytes(Room room, std::uint64_t hash_then) {
  StormSide& decode = side(Side::kDecode);
  const RowReport rows = decode.check(room, decode.given());
  const AuxReport aux = decode.check_aux_row(room);
  results_.verified += rows.compared + aux.compared;
  results_.wrong += rows.differing + aux.differing;
  if (rows.differing > 0) {
    const Mismatch& first = rows.first.front();
    results_.problems.push_back(fmt::format("room {}: {} wrong bytes, the first at layer {} {} position {}",
                                            room, rows.differing, first.layer, to_string(first.kind),
                                            first.position));
  }
  if (aux.differing > 0) {
    results_.problems.push_back(fmt::format("room {}: wrong aux row: {}", room, aux.first));
  }
  if (decode.hash_watched() != hash_then) {
    ++results_.changed;
    results_.problems.push_back(fmt::format("a byte of room {} landed after its final event", room - 1));
  }
}

std::string times(const char* who, const std::vector<double>& samples) {
  return fmt::format("  {:<12} p50 {:.3f} ms, p99 {:.3f} ms, max {:.3f} ms\n", who,
                     1e3 * percentile(samples, 0.5), 1e3 * percentile(samples, 0.99),
                     1e3 * percentile(samples, 1));
}

void print(const StormResults& results, const DemoOptions& options) {
  fmt::print("\n  {:<12} {} rooms aborted while bytes moved ({} by prefill, {} by decode), in {} rounds\n",
             "storm " + options.fabric, results.moving, results.by_side[0], results.by_side[1],
             results.tries);
  fmt::print("  {:<12} {} landed first, {} had all or none of their bytes\n", "not counted",
             results.landed_first, results.all_written);
  fmt::print("  from the abort to the final event\n{}{}", times("aborter", results.acknowledged),
             times("other side", results.other_side));
  fmt::print("  {:<12} {} in pages of aborted rooms, {} bytes wrong\n", "verified",
             format_bytes(results.verified), results.wrong);
  fmt::print("  {:<12} {} of pages not given on, changed after the final event in {} rounds\n", "watched",
             format_bytes(results.watched), results.changed);
  for (const std::string& problem : results.problems) {
    fmt::print("PROBLEM {}\n", problem);
  }
}

Result<bool> run_all(const DemoOptions& options, const std::filesystem::path& program_directory) {
  KVF_TRY(const DemoLayout layout, demo_layout(options));
  RankOptions rank;
  rank.model = layout.model;
  rank.page_size = layout.prefill_page_size;
  rank.pages = kPages;
  rank.rooms = 1;
  rank.aux_slots = 1;
  rank.seed = options.seed;
  if (layout.prefill.rank_count() != 1 || layout.decode.rank_count() != 1 ||
      layout.decode_page_size != layout.prefill_page_size) {
    return fail(Code::kInvalid, "--abort-storm has one rank and pages of one size on both sides");
  }
  const PoolSizes pools{.tokens = kPages * rank.page_size, .prefill_pages = kPages, .decode_pages = kPages};
  KVF_TRY(const auto cluster, DemoCluster::create(options, layout, pools, program_directory));
  KVF_TRY_VOID(cluster->start_daemons());
  rank.topology = layout.prefill;
  rank.socket = cluster->engine_socket(Side::kPrefill);
  KVF_TRY(StormSide prefill, StormSide::create(rank, Side::kPrefill));
  rank.topology = layout.decode;
  rank.socket = cluster->engine_socket(Side::kDecode);
  KVF_TRY(StormSide decode, StormSide::create(rank, Side::kDecode));
  bool good = false;
  {
    AbortStorm storm(options, *cluster, std::move(prefill), std::move(decode));
    const auto done = storm.run();
    print(storm.results(), options);
    KVF_TRY_VOID(done);
    good = storm.results().problems.empty();
  }
  KVF_TRY_VOID(cluster->stop());
  return good;
}

}  // namespace

int run_abort_storm(DemoOptions options, const std::filesystem::path& program_directory) {
  options.prefill = "tp=1";
  options.decode = "tp=1";
  const auto good = run_all(options, program_directory);
  if (!good) {
    fmt::print(stderr, "kvferry demo: {}\n", good.error().message);
    return 1;
  }
  fmt::print("\n{}\n", *good ? "OK" : "FAILED");
  return *good ? 0 : 1;
}

}  // namespace kvferry
