#include "common/engine/server_requests.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace kvferry {

namespace {

constexpr std::uint32_t kPageSizeMax = 1u << 16;              // tokens; real ones are 1 to 256
constexpr std::uint32_t kPageRowsMax = 1u << 28;              // page_size times the largest DCP
constexpr std::uint64_t kPagesMax = std::uint64_t{1} << 32;   // pages are named by uint32
constexpr std::uint64_t kTokensMax = std::uint64_t{1} << 40;  // keeps every later sum far from 2^64

Result<void> check_range(std::string_view name, std::uint64_t value, std::uint64_t min, std::uint64_t max) {
  if (value < min || value > max) {
    return fail(Code::kInvalid, "{} is {}, legal are {} to {}", name, value, min, max);
  }
  return {};
}

Result<void> check_fd(std::string_view name, std::uint32_t fd, std::vector<bool>& used) {
  if (fd >= used.size()) {
    return fail(Code::kInvalid, "{}.fd is {}, but {} descriptors came with the attach", name, fd,
                used.size());
  }
  used[fd] = true;
  return {};
}

Result<void> check_layout(const PoolLayout& layout, std::size_t fd_count) {
  KVF_TRY_VOID(check_range("page_size", layout.page_size, 1, kPageSizeMax));
  if (layout.buffers.empty()) {
    return fail(Code::kInvalid, "buffers is empty: a pool has at least one buffer");
  }
  std::vector<bool> used(fd_count, false);
  for (std::size_t i = 0; i < layout.buffers.size(); ++i) {
    const BufferPlace& place = layout.buffers[i];
    const std::string name = fmt::format("buffers[{}]", i);
    KVF_TRY_VOID(check_range(name + ".row_bytes", place.shape.row_bytes, 1, UINT32_MAX));
    KVF_TRY_VOID(check_range(name + ".pages", place.shape.pages, 1, kPagesMax));
    const std::uint32_t rows = place.shape.rows_of_page(layout.page_size);
    KVF_TRY_VOID(check_range(name + ".page_rows", rows, 1, kPageRowsMax));
    KVF_TRY_VOID(check_range(name + ".pitch", place.shape.pitch_of(layout.page_size), rows, UINT32_MAX));
    KVF_TRY_VOID(check_fd(name, place.fd, used));
  }
  std::unordered_set<std::string_view> names;
  for (std::size_t i = 0; i < layout.aux.size(); ++i) {
    const AuxField& field = layout.aux[i];
    const std::string name = fmt::format("aux[{}]", i);
    if (field.name.empty() || !names.insert(field.name).second) {
      return fail(Code::kInvalid, "{}.name is \"{}\": aux fields need different, non-empty names", name,
                  field.name);
    }
    KVF_TRY_VOID(check_range(name + ".width", field.width, 1, UINT32_MAX));
    KVF_TRY_VOID(check_range(name + ".slots", field.slots, 1, INT32_MAX));
    KVF_TRY_VOID(check_fd(name, field.fd, used));
  }
  const auto unused = std::find(used.begin(), used.end(), false);
  if (unused != used.end()) {
    return fail(Code::kInvalid, "descriptor {} of {} is used by no buffer and no aux field",
                unused - used.begin(), used.size());
  }
  return {};
}

Result<void> check_pages(const std::vector<std::uint32_t>& pages, const EngineLimits& limits) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] >= limits.pages) {
      return fail(Code::kInvalid, "pages[{}] is {}, but the pool has {} pages", i, pages[i], limits.pages);
    }
  }
  return {};
}

Result<void> check_slot(int slot, const EngineLimits& limits) {
  if (slot >= 0 && static_cast<std::uint32_t>(slot) >= limits.aux_slots) {
    return fail(Code::kInvalid, "aux_slot is {}, but the pool has {} aux slots", slot, limits.aux_slots);
  }
  return {};
}

}  // namespace

EngineLimits limits_of(const PoolLayout& layout) {
  EngineLimits limits;
  // Which buffers share their page ids is the daemon's knowledge (it knows the model); this is the outer
  // bound.
  for (const BufferPlace& place : layout.buffers) {
    limits.pages = std::max(limits.pages, is_state(place.shape.kind) ? 0 : place.shape.pages);
  }
  limits.aux_slots = layout.aux.empty() ? 0 : std::numeric_limits<std::uint32_t>::max();
  for (const AuxField& field : layout.aux) {
    limits.aux_slots = std::min(limits.aux_slots, field.slots);
  }
  return limits;
}

Result<EngineAttach> checked_attach(wire::Attach attach, std::vector<UniqueFd> fds, int pid) {
  EngineAttach checked;
  KVF_TRY(checked.dtype, parse_dtype(attach.dtype));
  KVF_TRY_VOID(check_layout(attach.layout, fds.size()));
  checked.coord = attach.coord;
  checked.layout = std::move(attach.layout);
  checked.fds = std::move(fds);
  checked.pid = pid;
  return checked;
}

Result<EngineChunk> checked_chunk(wire::Send send, std::vector<UniqueFd> fds, const EngineLimits& limits) {
  if (fds.size() > 1) {
    return fail(Code::kInvalid, "send came with {} descriptors, legal is at most 1 (ready_fd)", fds.size());
  }
  KVF_TRY_VOID(check_range("first_token", send.first_token, 0, kTokensMax));
  KVF_TRY_VOID(check_range("token_count", send.token_count, 0, kTokensMax));
  KVF_TRY_VOID(check_pages(send.pages, limits));
  KVF_TRY_VOID(check_slot(send.aux_slot, limits));
  if (!send.last && send.hybrid != HybridRows{}) {
    return fail(Code::kInvalid,
                "window_pages or state_slot on a chunk that is not the last: send them with last");
  }
  if (send.aux_slot >= 0 && !send.last) {
    return fail(Code::kInvalid, "aux_slot is {} on a chunk that is not the last: set last, or aux_slot to -1",
                send.aux_slot);
  }
  EngineChunk chunk;
  chunk.room = send.room;
  chunk.pages = std::move(send.pages);
  chunk.first_token = send.first_token;
  chunk.token_count = send.token_count;
  chunk.last = send.last;
  chunk.begun = send.begun;
  chunk.aux_slot = send.aux_slot;
  chunk.hybrid = std::move(send.hybrid);
  chunk.layer_begin = send.layer_begin;
  chunk.layer_end = send.layer_end;
  if (!fds.empty()) {
    chunk.ready = std::move(fds[0]);
  }
  return chunk;
}

Result<EngineExpectation> checked_expectation(wire::Expect expect, const EngineLimits& limits) {
  KVF_TRY_VOID(check_range("token_count", expect.token_count, 0, kTokensMax));
  KVF_TRY_VOID(check_range("prefix", expect.prefix, 0, expect.token_count));
  KVF_TRY_VOID(check_pages(expect.pages, limits));
  KVF_TRY_VOID(check_slot(expect.aux_slot, limits));
  if (expect.bootstrap.empty()) {
    return fail(Code::kInvalid,
                "bootstrap is empty, wanted \"host:port\" of the prefill side's bootstrap server");
  }
  EngineExpectation checked;
  checked.room = expect.room;
  checked.bootstrap = std::move(expect.bootstrap);
  checked.pages = std::move(expect.pages);
  checked.prefix = expect.prefix;
  checked.token_count = expect.token_count;
  checked.aux_slot = expect.aux_slot;
  checked.prefill_dp_rank = expect.prefill_dp_rank;
  checked.hybrid = std::move(expect.hybrid);
  return checked;
}

}  // namespace kvferry
