#pragma once
// The report for machines: one JSON document. Intervals are [begin, end), half open; bytes, tokens, rows and
// counts are whole numbers; seconds are not. Fields are only ever added.
//
//   supported   true or false
//   findings    [{rule, severity ("error", "warning"), field, prefill, decode, message, fix}]
//   model       {name, attention, dtype, kv_layers, bytes_per_token}
//   request     {tokens, prefix, room, pages ("scattered", "dense")}
//   prefill     {topology, page_size, virtual_page, dp_rank, first_token, pages}: pages in every rank's list
//   decode      the same
//
// and, when supported:
//
//   decode_tokens  [{rank, tokens}]: how many of the moved tokens each decode rank owns
//   cost        {fabric, gbps, write_us, block_bytes, block_spans, staging_bytes}: what is assumed
//   pairs       [{prefill, decode, buffers, FIGURES}]: by prefill and decode rank, those that send
//   sources     [{rank, destinations, FIGURES}]
//   total       {FIGURES, sources, idle_sources, balance, predicted_seconds}
//   plan_hash   16 hexadecimal digits
//   runs        [{prefill, decode, total, runs: [{first_token, last_token, rows, count, src_row, src_step,
//               dst_row, dst_step, dst_index}]}]: with --pages; `total` counts those that --limit leaves out
//   explain     {token, moves, prefill: [HOLDER], decode: [HOLDER], prefill_owners: [rank],
//               decode_owners: [rank], elections: [{decode, layers, heads, prefill, candidates: [rank]}]}:
//               with --explain
//
// FIGURES are bytes, rows, runs, naive_writes, copies (shm), blocks (tcp), puts (ucx), packed_bytes,
// staging_bytes, posted (those of cost.fabric) and seconds. HOLDER is {rank, layers, heads, page_index, page,
// slot, row, parts: [{kind, offset, bytes, row_bytes}]}.

#include <nlohmann/json_fwd.hpp>

#include "tools/cli/plan/plan_report.h"

namespace kvferry {

nlohmann::json plan_json(const PlanReport& report);

}  // namespace kvferry
