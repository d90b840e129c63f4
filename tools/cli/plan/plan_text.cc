#include "tools/cli/plan/plan_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace kvferry {
namespace {

/// Text in lines of at most 110 columns, continued below where it began.
std::string wrapped(std::string_view name, std::string_view text) {
  constexpr std::size_t kIndent = 12;
  constexpr std::size_t kWidth = 110 - kIndent;
  std::string out;
  bool first = true;
  while (!text.empty()) {
    std::size_t length = text.size();
    if (length > kWidth) {
      const std::size_t space = text.rfind(' ', kWidth);
      length = space == std::string_view::npos || space == 0 ? kWidth : space;
    }
    out += fmt::format("{:<{}} {}\n", first ? name : "", kIndent - 1, text.substr(0, length));
    text.remove_prefix(length);
    text.remove_prefix(text.starts_with(' ') ? 1 : 0);
    first = false;
  }
  return out;
}

/// "0-60", or one number, of a half-open interval.
std::string span_text(const Interval& interval) {
  return interval.size() == 1 ? fmt::format("{}", interval.begin)
                              : fmt::format("{}-{}", interval.begin, interval.end - 1);
}

std::string left_out(std::size_t shown, std::size_t total, std::string_view what) {
  return shown >= total
             ? ""
             : fmt::format("  ... {} more {} not shown; --limit 0 shows all\n", total - shown, what);
}

std::size_t shown_of(std::size_t total, std::uint64_t limit) {
  return limit == 0 ? total : std::min<std::size_t>(total, limit);
}

std::string side_text(const PlannedSide& side, bool legal) {
  std::string text = to_string(side.topology);
  if (legal) {
    text += fmt::format(": {} rank{}", side.rank_count(), side.rank_count() == 1 ? "" : "s");
    text += side.topology.dp > 1 ? fmt::format(" of DP rank {}", side.dp_rank) : "";
  }
  text += fmt::format("; {} pages of {} tokens in the list of each rank", side.pages.size(), side.page_size);
  if (side.topology.dcp > 1) {
    text += fmt::format(", one page of all {} DCP ranks holds {}", side.topology.dcp, side.virtual_page());
  }
  return text + (side.first_token > 0 ? fmt::format("; from token {} on", side.first_token) : "");
}

std::string owned_text(const PlanReport& report) {
  std::map<std::uint64_t, std::vector<RankIndex>> by_tokens;
  for (const OwnedTokens& owned : report.decode_tokens) {
    by_tokens[owned.tokens].push_back(owned.rank);
  }
  std::string text;
  for (auto at = by_tokens.rbegin(); at != by_tokens.rend(); ++at) {
    const bool one = at->second.size() == 1;
    text += fmt::format("{}{} {} {}{}", text.empty() ? "" : "; ", ranks_text(at->second),
                        one ? "owns" : "own", at->first, one ? "" : " each");
  }
  return text + " (tokens that move)";
}

std::string header(const PlanReport& report) {
  const PlanRequest& request = report.request;
  const ModelGeometry& model = request.model;
  std::string out = wrapped("model", fmt::format("{} ({}, {} KV layers, {}), {} bytes a token", model.name,
                                                 to_string(model.attention), model.cached_layers().size(),
                                                 to_string(model.dtype), model.bytes_per_token()));
  const bool legal = !report.decode_tokens.empty();
  out += wrapped("prefill", side_text(request.prefill, legal));
  out += wrapped("decode", side_text(request.decode, legal));
  if (legal) {
    out += wrapped("", owned_text(report));
  }
  out += wrapped("request", fmt::format("{} tokens in one chunk, {} of them in decode's prefix; room {}",
                                        request.tokens, request.prefix, request.room));
  return out +
         wrapped("pages", request.dense
                              ? "assumed: consecutive on both sides (without --dense: scattered)"
                              : "assumed: scattered, no two of a list are physical neighbours (--dense: "
                                "consecutive ones)");
}

std::string findings_text(const PlanReport& report) {
  std::string out;
  for (const Violation& finding : report.findings) {
    out += wrapped(to_string(finding.severity),
                   fmt::format("[{}] {}; {}", finding.rule, finding.message, finding.fix));
  }
  return out;
}

std::string figures_row(std::string_view prefill, std::string_view decode, const PlanFigures& figures) {
  return fmt::format("{:>7}  {:>6}  {:>13}  {:>8}  {:>8}  {:>10}  {:>9}  {:>10}  {:>8}  {:>9.6f}\n", prefill,
                     decode, figures.bytes, figures.rows, figures.runs, figures.writes.copies,
                     figures.writes.blocks, figures.writes.puts, figures.staging_bytes, figures.seconds);
}

std::string pairs_table(const PlanReport& report, std::uint64_t limit) {
  std::string out = fmt::format("{:>7}  {:>6}  {:>13}  {:>8}  {:>8}  {:>10}  {:>9}  {:>10}  {:>8}  {:>9}\n",
                                "prefill", "decode", "bytes", "rows", "runs", "shm copies", "tcp blocks",
                                "ucx puts", "staging", "seconds");
  const std::size_t shown = shown_of(report.pairs.size(), limit);
  for (std::size_t i = 0; i < shown; ++i) {
    const PairReport& pair = report.pairs[i];
    out += figures_row(std::to_string(pair.prefill), std::to_string(pair.decode), pair.figures);
  }
  out += left_out(shown, report.pairs.size(), "pairs");
  return out + figures_row("all", "all", report.total);
}

std::string totals(const PlanReport& report) {
  const CostOptions& cost = report.request.cost;
  if (report.sources.empty()) {
    return wrapped("sources", "none: nothing moves");
  }
  const std::uint32_t ranks = report.request.prefill.rank_count();
  std::string out =
      wrapped("sources",
              fmt::format("{} of {} prefill ranks send; balance {:.3f} (bytes, the busiest against the mean)",
                          report.sources.size(), ranks, report.balance));
  out += wrapped("predicted",
                 fmt::format("{:.6f} s: the slowest source at {} GB/s and {} us for each write "
                             "of {}",
                             report.seconds, cost.gigabytes_per_second, cost.write_us, cost.fabric));
  return out + wrapped("writes", fmt::format("{} over {}; one write per token and buffer would be {}",
                                             report.total.posted, cost.fabric, report.total.naive_writes));
}

std::string runs_text(const PlanReport& report, std::uint64_t limit) {
  std::string out;
  const std::size_t shown = shown_of(report.runs.size(), limit);
  for (std::size_t i = 0; i < shown; ++i) {
    const PairRuns& pair = report.runs[i];
    out += fmt::format("\nprefill rank {} to decode rank {}, {}: {} runs, each for all buffers of the pair\n",
                       pair.prefill, pair.decode, to_string(pair.part), pair.total);
    out += fmt::format("  {:>17}  {:>8}  {:>6}  {:>12}  {:>6}  {:>12}  {:>6}  {:>11}\n", "tokens", "pieces",
                       "rows", "source row", "step", "dest. row", "step", "grant index");
    for (const RunReport& line : pair.shown) {
      const RowRun& run = line.run;
      out += fmt::format("  {:>17}  {:>8}  {:>6}  {:>12}  {:>6}  {:>12}  {:>6}  {:>11}\n",
                         fmt::format("{}-{}", line.first_token, line.last_token), run.count, run.rows,
                         run.src_row, run.src_step, run.dst_row, run.dst_step, run.dst_index);
    }
    out += left_out(pair.shown.size(), pair.total, "runs");
  }
  return out + left_out(shown, report.runs.size(), "pairs");
}

/// "key,value 256+128/1024": kinds whose parts are alike share a text.
std::string parts_text(const std::vector<RowPart>& parts) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const RowPart& part = parts[i];
    const bool same = i + 1 < parts.size() && parts[i + 1].offset == part.offset &&
                      parts[i + 1].bytes == part.bytes && parts[i + 1].row_bytes == part.row_bytes;
    out += to_string(part.kind);
    out += same ? "," : fmt::format(" {}+{}/{}", part.offset, part.bytes, part.row_bytes);
    out += !same && i + 1 < parts.size() ? ", " : "";
  }
  return out;
}

std::string holders_text(std::string_view side, const std::vector<TokenHolder>& holders,
                         std::uint64_t limit) {
  std::string out =
      fmt::format("  {:<12}  {:>7}  {:>5}  {:>7}  {:>8}  {:>5}  {:>10}  {}\n", fmt::format("{} rank", side),
                  "layers", "heads", "in list", "page", "slot", "row", "offset+bytes/row");
  const std::size_t shown = shown_of(holders.size(), limit);
  for (std::size_t i = 0; i < shown; ++i) {
    const TokenHolder& holder = holders[i];
    out += fmt::format("  {:>12}  {:>7}  {:>5}  {:>7}  {:>8}  {:>5}  {:>10}  {}\n", holder.rank,
                       span_text(holder.layers), span_text(holder.heads), holder.place.page_index,
                       holder.place.page, holder.place.slot, holder.place.row, parts_text(holder.parts));
  }
  return out + left_out(shown, holders.size(), "lines");
}

/// Prefill owners that are in no line above. On decode there are none: every owner receives.
std::string idle_owners(const Explanation& explanation) {
  std::vector<RankIndex> idle;
  for (const RankIndex rank : explanation.prefill_owners) {
    if (std::none_of(explanation.prefill.begin(), explanation.prefill.end(),
                     [rank](const TokenHolder& holder) { return holder.rank == rank; })) {
      idle.push_back(rank);
    }
  }
  return idle.empty()
             ? ""
             : wrapped("  also held", fmt::format("by prefill {}, and sent to nobody", ranks_text(idle)));
}

std::string explanation_text(const Explanation& explanation, std::uint64_t limit) {
  if (!explanation.moves) {
    return "\n" + wrapped(fmt::format("token {}", explanation.token),
                          fmt::format(
                              "lies in the prefix and does not move: it is held by decode {} already, "
                              "and by prefill {}",
                              ranks_text(explanation.decode_owners), ranks_text(explanation.prefill_owners)));
  }
  std::string out = fmt::format("\ntoken {}\n", explanation.token);
  out += holders_text("prefill", explanation.prefill, limit);
  out += idle_owners(explanation);
  out += holders_text("decode", explanation.decode, limit);
  const std::size_t shown = shown_of(explanation.elections.size(), limit);
  for (std::size_t i = 0; i < shown; ++i) {
    const TokenElection& election = explanation.elections[i];
    out += fmt::format("  decode rank {}, layers {}, heads {}: from prefill rank {}", election.decode,
                       span_text(election.layers), span_text(election.heads), election.prefill);
    out += election.candidates.size() == 1
               ? ", the only source\n"
               : fmt::format(", elected of {} for this room\n", ranks_text(election.candidates));
  }
  return out + left_out(shown, explanation.elections.size(), "elections");
}

}  // namespace

std::string plan_text(const PlanReport& report, std::uint64_t limit) {
  std::string out = header(report);
  out += wrapped("supported", report.supported() ? "yes" : "no");
  out += findings_text(report);
  if (!report.supported()) {
    return out;
  }
  if (!report.pairs.empty()) {
    out += "\n" + pairs_table(report, limit) + "\n";
  }
  out += totals(report);
  out += wrapped("plan hash", fmt::format("{:016x}", report.hash));
  out += runs_text(report, limit);
  if (report.explanation) {
    out += explanation_text(*report.explanation, limit);
  }
  return out;
}

}  // namespace kvferry
