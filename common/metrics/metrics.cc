#include "common/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "common/base/host_port.h"

namespace kvferry {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;

constexpr const char* kOther = "other";
constexpr std::size_t kLabelBytesMax = 128;

const Histogram::BucketBoundaries& seconds_buckets() {
  static const Histogram::BucketBoundaries buckets{1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2,
                                                   0.1,  0.25,   0.5,  1,    2.5,    5,    10,   30,     60};
  return buckets;
}

// 4 KiB to 64 GiB, a factor of 4 apart.
Histogram::BucketBoundaries size_buckets() {
  Histogram::BucketBoundaries buckets;
  for (double bytes = 4096; bytes <= 64.0 * (1ull << 30); bytes *= 4) {
    buckets.push_back(bytes);
  }
  return buckets;
}

std::vector<std::string> code_words() {
  // code_from_number() knows the list of codes; numbers that are none come back as the word "internal".
  std::set<std::string> words;
  for (unsigned number = 0; number < 256; ++number) {
    words.emplace(to_string(code_from_number(static_cast<std::uint8_t>(number))));
  }
  return {words.begin(), words.end()};
}

// When this process started, in seconds since 1970: boot time plus field 22 of /proc/self/stat.
double process_start_seconds() {
  std::ifstream system("/proc/stat");
  double boot = 0;
  for (std::string word; system >> word;) {
    if (word == "btime") {
      system >> boot;
      break;
    }
  }
  std::ifstream self("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(self)), std::istreambuf_iterator<char>());
  // The command name, field 2, may contain blanks and brackets; fields are counted from its last bracket.
  const std::size_t name_end = text.rfind(')');
  std::istringstream fields(name_end == std::string::npos ? "" : text.substr(name_end + 1));
  std::string field;
  for (int index = 3; index < 22; ++index) {
    fields >> field;
  }
  double ticks = 0;
  fields >> ticks;
  return boot + ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

std::string clean(std::string_view text, std::string_view allowed_marks) {
  std::string label(text.substr(0, kLabelBytesMax));
  for (char& letter : label) {
    const bool plain = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
                       (letter >= '0' && letter <= '9');
    if (!plain && allowed_marks.find(letter) == std::string_view::npos) {
      letter = '_';
    }
  }
  return label;
}

std::string peer_label(std::string_view peer) {
  // A port would make a new series with every restart of a peer that lets the system choose it.
  const auto parsed = parse_host_port(peer, std::uint16_t{1}, true);
  return clean(parsed ? std::string_view(parsed->host) : peer, ".:%-");
}

/// One series per word, and one for every word that is not in the list.
template <class Metric>
class ByWord {
 public:
  template <class... Args>
  ByWord(Family<Metric>& family, Labels labels, const char* label, std::vector<std::string> words,
         bool with_other, const Args&... args) {
    if (with_other) {
      words.emplace_back(kOther);
    }
    for (const std::string& word : words) {
      labels[label] = word;
      series_[word] = &family.Add(labels, args...);
    }
  }
  Metric& at(std::string_view word) const {
    const auto found = series_.find(word);
    return *(found == series_.end() ? series_.find(kOther) : found)->second;
  }

 private:
  std::map<std::string, Metric*, std::less<>> series_;  // owned by the family
};

}  // namespace

struct Metrics::Series {
  explicit Series(const MetricsOptions& options);

  Family<Counter>& counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  }
  Family<Gauge>& gauges(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }
  Family<Histogram>& histograms(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
  }

  prometheus::Registry registry;  // first: it owns all below

  ByWord<Counter> transfers;
  ByWord<Counter> failures;
  Family<Counter>& bytes_family;
  ByWord<Counter> bytes_sent;
  ByWord<Counter> bytes_received;
  ByWord<Counter> writes;
  ByWord<Histogram> stages;
  Histogram& transfer_seconds;
  Histogram& transfer_size;
  ByWord<Counter> handshakes;
  ByWord<Counter> refusals;
  ByWord<Counter> stale;
  Counter& rejected_blocks;
  Gauge& transfers_live;
  Gauge& rooms_waiting;
  ByWord<Gauge> pages;
  Gauge& engines;
  Gauge& peers;
  Family<Gauge>& peer_fabric;

  std::mutex peers_mutex;  // guards peer_labels and the series of peer_fabric
  std::map<PeerId, Labels> peer_labels;
  std::size_t peers_max;
};

Metrics::Series::Series(const MetricsOptions& options)
    : transfers(
          counters(
              "kvferry_transfers_total",
              "Transfers that have ended (one room between one prefill rank and one decode rank), by how."),
          {}, "state", {"landed", "failed", "aborted"}, false),
      failures(counters("kvferry_transfer_failures_total",
                        "Transfers that failed, by the reason that came first."),
               {}, "reason", code_words(), false),
      bytes_family(counters("kvferry_transfer_bytes_total",
                            "KV and aux bytes moved; each destination's copy counts on its own.")),
      bytes_sent(bytes_family, {{"direction", "sent"}}, "fabric", options.fabrics, true),
      bytes_received(bytes_family, {{"direction", "received"}}, "fabric", options.fabrics, true),
      writes(counters("kvferry_transfer_writes_total", "Blocks, puts or copies posted."), {}, "fabric",
             options.fabrics, true),
      stages(
          histograms(
              "kvferry_transfer_stage_seconds",
              "Time that landed transfers spent in each stage: queue (both sides known to first post), plan, "
              "pack, post (first post to source pages read), land (source pages read to landed)."),
          {}, "stage", {"queue", "plan", "pack", "post", "land"}, false, seconds_buckets()),
      transfer_seconds(
          histograms("kvferry_transfer_seconds", "Time of landed transfers from both sides known to landed.")
              .Add({}, seconds_buckets())),
      transfer_size(
          histograms("kvferry_transfer_size_bytes", "Size of landed transfers.").Add({}, size_buckets())),
      handshakes(counters("kvferry_handshakes_total", "Handshakes with peers, by verdict."), {}, "verdict",
                 {"accepted", "refused"}, false),
      refusals(
          counters("kvferry_handshake_refusals_total",
                   "Violated compatibility rules of refused handshakes; one handshake may violate several."),
          {}, "rule", options.rules, true),
      stale(
          counters("kvferry_stale_messages_total",
                   "Messages of an earlier epoch or generation, or of a closed grant; they change nothing."),
          {}, "kind", options.stale_kinds, true),
      rejected_blocks(
          counters("kvferry_rejected_blocks_total",
                   "Blocks and notices of peers that were refused because they did not fit the grant.")
              .Add({})),
      transfers_live(gauges("kvferry_transfers_live", "Transfers that have begun and not ended.").Add({})),
      rooms_waiting(
          gauges("kvferry_rooms_waiting", "Rooms of which only one side is known here so far.").Add({})),
      pages(gauges("kvferry_pages", "Pages of attached pools, by who owns them at this moment."), {}, "owner",
            {"engine", "live", "quarantine"}, false),
      engines(gauges("kvferry_engines", "Engines that are attached.").Add({})),
      peers(gauges("kvferry_peers", "Peer daemons that are connected.").Add({})),
      peer_fabric(gauges("kvferry_peer_fabric_info",
                         "What really carries the bytes of each connected peer; the value is always 1.")),
      peers_max(options.peers_max) {
  gauges("kvferry_build_info", "The version of this daemon; the value is always 1.")
      .Add({{"version", options.version}})
      .Set(1);
  gauges("process_start_time_seconds", "When this process started, in seconds since 1970.")
      .Add({})
      .Set(process_start_seconds());
}

Metrics::Metrics(const MetricsOptions& options) : series_(std::make_unique<Series>(options)) {}
Metrics::~Metrics() = default;

void Metrics::count_landed(std::uint64_t bytes, const TransferSeconds& seconds) {
  series_->transfers.at("landed").Increment();
  const std::array<std::pair<const char*, std::optional<double>>, 5> stages{{{"queue", seconds.queue},
                                                                             {"plan", seconds.plan},
                                                                             {"pack", seconds.pack},
                                                                             {"post", seconds.post},
                                                                             {"land", seconds.land}}};
  for (const auto& [stage, value] : stages) {
    if (value) {
      series_->stages.at(stage).Observe(*value);
    }
  }
  series_->transfer_seconds.Observe(seconds.total);
  series_->transfer_size.Observe(static_cast<double>(bytes));
}

void Metrics::count_failed(Code reason) {
  series_->transfers.at("failed").Increment();
  series_->failures.at(to_string(reason)).Increment();
}

void Metrics::count_aborted() {
  series_->transfers.at("aborted").Increment();
}

void Metrics::count_moved(MoveDirection direction, std::string_view fabric, std::uint64_t bytes,
                          std::uint64_t writes) {
  const auto& family = direction == MoveDirection::kSent ? series_->bytes_sent : series_->bytes_received;
  family.at(fabric).Increment(static_cast<double>(bytes));
  series_->writes.at(fabric).Increment(static_cast<double>(writes));
}

void Metrics::count_handshake_accepted() {
  series_->handshakes.at("accepted").Increment();
}

void Metrics::count_handshake_refused(const std::vector<std::string_view>& rules) {
  series_->handshakes.at("refused").Increment();
  for (const std::string_view rule : std::set<std::string_view>(rules.begin(), rules.end())) {
    series_->refusals.at(rule).Increment();
  }
}

void Metrics::count_stale(std::string_view kind, std::uint64_t messages) {
  series_->stale.at(kind).Increment(static_cast<double>(messages));
}

void Metrics::count_rejected_block() {
  series_->rejected_blocks.Increment();
}

void Metrics::set_transfers_live(std::uint64_t transfers) {
  series_->transfers_live.Set(static_cast<double>(transfers));
}

void Metrics::set_rooms_waiting(std::uint64_t rooms) {
  series_->rooms_waiting.Set(static_cast<double>(rooms));
}

void Metrics::set_pages(const PageCounts& pages) {
  series_->pages.at("engine").Set(static_cast<double>(pages.engine));
  series_->pages.at("live").Set(static_cast<double>(pages.live));
  series_->pages.at("quarantine").Set(static_cast<double>(pages.quarantine));
}

void Metrics::set_engines(std::uint64_t engines) {
  series_->engines.Set(static_cast<double>(engines));
}

void Metrics::set_peers(std::uint64_t peers) {
  series_->peers.Set(static_cast<double>(peers));
}

void Metrics::set_peer_fabric(PeerId id, std::string_view peer, std::string_view fabric,
                              std::string_view carries) {
  remove_peer(id);
  const std::lock_guard lock(series_->peers_mutex);
  if (series_->peer_labels.size() >= series_->peers_max) {
    return;
  }
  const Labels labels{
      {"peer", peer_label(peer)}, {"fabric", clean(fabric, "_-")}, {"carries", clean(carries, " .,+-_")}};
  series_->peer_labels[id] = labels;
  series_->peer_fabric.Add(labels).Set(1);
}

void Metrics::remove_peer(PeerId id) {
  const std::lock_guard lock(series_->peers_mutex);
  const auto found = series_->peer_labels.find(id);
  if (found == series_->peer_labels.end()) {
    return;
  }
  const Labels labels = std::move(found->second);
  series_->peer_labels.erase(found);
  // Two daemons on one host share a series; it goes with the last of them.
  const bool shared = std::any_of(series_->peer_labels.begin(), series_->peer_labels.end(),
                                  [&labels](const auto& other) { return other.second == labels; });
  if (!shared) {
    series_->peer_fabric.Remove(&series_->peer_fabric.Add(labels));
  }
}

std::string Metrics::text() const {
  return prometheus::TextSerializer().Serialize(series_->registry.Collect());
}

}  // namespace kvferry
