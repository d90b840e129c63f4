#include "tools/cli/plan/plan_json.h"

#include <nlohmann/json.hpp>

namespace kvferry {
namespace {

using nlohmann::json;

json interval_json(const Interval& interval) {
  return {interval.begin, interval.end};
}

json side_json(const PlannedSide& side) {
  return {{"topology", to_string(side.topology)}, {"page_size", side.page_size},
          {"virtual_page", side.virtual_page()},  {"dp_rank", side.dp_rank},
          {"first_token", side.first_token},      {"pages", side.pages.size()}};
}

json figures_json(const PlanFigures& figures) {
  return {{"bytes", figures.bytes},
          {"rows", figures.rows},
          {"runs", figures.runs},
          {"naive_writes", figures.naive_writes},
          {"copies", figures.writes.copies},
          {"blocks", figures.writes.blocks},
          {"puts", figures.writes.puts},
          {"packed_bytes", figures.writes.packed_bytes},
          {"posted", figures.posted},
          {"staging_bytes", figures.staging_bytes},
          {"seconds", figures.seconds}};
}

json cost_json(const CostOptions& cost) {
  return {{"fabric", cost.fabric},
          {"gbps", cost.gigabytes_per_second},
          {"write_us", cost.write_us},
          {"block_bytes", cost.blocks.payload_bytes_max},
          {"block_spans", cost.blocks.spans_max},
          {"staging_bytes", cost.staging_bytes}};
}

json runs_json(const PairRuns& pair) {
  json runs = json::array();
  for (const RunReport& line : pair.shown) {
    runs.push_back({{"first_token", line.first_token},
                    {"last_token", line.last_token},
                    {"rows", line.run.rows},
                    {"count", line.run.count},
                    {"src_row", line.run.src_row},
                    {"src_step", line.run.src_step},
                    {"dst_row", line.run.dst_row},
                    {"dst_step", line.run.dst_step},
                    {"dst_index", line.run.dst_index}});
  }
  return {{"prefill", pair.prefill},
          {"decode", pair.decode},
          {"part", to_string(pair.part)},
          {"total", pair.total},
          {"runs", std::move(runs)}};
}

json holders_json(const std::vector<TokenHolder>& holders) {
  json out = json::array();
  for (const TokenHolder& holder : holders) {
    json parts = json::array();
    for (const RowPart& part : holder.parts) {
      parts.push_back({{"kind", to_string(part.kind)},
                       {"offset", part.offset},
                       {"bytes", part.bytes},
                       {"row_bytes", part.row_bytes}});
    }
    out.push_back({{"rank", holder.rank},
                   {"layers", interval_json(holder.layers)},
                   {"heads", interval_json(holder.heads)},
                   {"page_index", holder.place.page_index},
                   {"page", holder.place.page},
                   {"slot", holder.place.slot},
                   {"row", holder.place.row},
                   {"parts", std::move(parts)}});
  }
  return out;
}

json explanation_json(const Explanation& explanation) {
  json elections = json::array();
  for (const TokenElection& election : explanation.elections) {
    elections.push_back({{"decode", election.decode},
                         {"layers", interval_json(election.layers)},
                         {"heads", interval_json(election.heads)},
                         {"prefill", election.prefill},
                         {"candidates", election.candidates}});
  }
  return {{"token", explanation.token},
          {"moves", explanation.moves},
          {"prefill", holders_json(explanation.prefill)},
          {"decode", holders_json(explanation.decode)},
          {"prefill_owners", explanation.prefill_owners},
          {"decode_owners", explanation.decode_owners},
          {"elections", std::move(elections)}};
}

void add_plan(const PlanReport& report, json& out) {
  out["decode_tokens"] = json::array();
  for (const OwnedTokens& owned : report.decode_tokens) {
    out["decode_tokens"].push_back({{"rank", owned.rank}, {"tokens", owned.tokens}});
  }
  out["cost"] = cost_json(report.request.cost);
  out["pairs"] = json::array();
  for (const PairReport& pair : report.pairs) {
    json one = figures_json(pair.figures);
    one.update({{"prefill", pair.prefill}, {"decode", pair.decode}, {"buffers", pair.buffers}});
    out["pairs"].push_back(std::move(one));
  }
  out["sources"] = json::array();
  for (const SourceReport& source : report.sources) {
    json one = figures_json(source.figures);
    one.update({{"rank", source.rank}, {"destinations", source.destinations}});
    out["sources"].push_back(std::move(one));
  }
  out["total"] = figures_json(report.total);
  out["total"].update({{"sources", report.sources.size()},
                       {"idle_sources", report.request.prefill.rank_count() - report.sources.size()},
                       {"balance", report.balance},
                       {"predicted_seconds", report.seconds}});
  out["plan_hash"] = fmt::format("{:016x}", report.hash);
  for (const PairRuns& pair : report.runs) {
    out["runs"].push_back(runs_json(pair));
  }
  if (report.explanation) {
    out["explain"] = explanation_json(*report.explanation);
  }
}

}  // namespace

json plan_json(const PlanReport& report) {
  const PlanRequest& request = report.request;
  json out{{"supported", report.supported()},
           {"findings", json::array()},
           {"model",
            {{"name", request.model.name},
             {"attention", to_string(request.model.attention)},
             {"dtype", to_string(request.model.dtype)},
             {"kv_layers", request.model.cached_layers().size()},
             {"bytes_per_token", request.model.bytes_per_token()}}},
           {"request",
            {{"tokens", request.tokens},
             {"prefix", request.prefix},
             {"room", request.room},
             {"pages", request.dense ? "dense" : "scattered"}}},
           {"prefill", side_json(request.prefill)},
           {"decode", side_json(request.decode)}};
  for (const Violation& finding : report.findings) {
    out["findings"].push_back(violation_to_json(finding));
  }
  if (report.supported()) {
    add_plan(report, out);
  }
  return out;
}

}  // namespace kvferry
