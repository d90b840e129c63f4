#include "tools/cli/demo/storm_side.h"

#include <algorithm>

#include "common/base/narrow.h"
#include "tools/cli/demo/insist.h"
#include "tools/engine/pattern.h"
#include "tools/engine/role.h"

namespace kvferry {

Result<StormSide> StormSide::create(const RankOptions& options, Side side) {
  KVF_TRY(Rank rank, Rank::create(options, 0));
  StormSide out(std::move(rank), side);
  KVF_TRY(out.held_, out.rank_.allocate(1, 0, std::uint64_t{options.pages} * options.page_size));
  return out;
}

void StormSide::deal(std::mt19937_64& random) {
  std::shuffle(held_.pages.begin(), held_.pages.end(), random);
  given_.clear();
  watched_.clear();
  for (std::size_t i = 0; i < held_.pages.size(); ++i) {
    (i % 2 == 0 ? given_ : watched_).push_back(held_.pages[i]);
  }
}

std::uint64_t StormSide::token_bytes() const {
  std::uint64_t bytes = 0;
  for (const BufferShape& shape : rank_.rows.buffers()) {
    bytes += shape.row_bytes;
  }
  return bytes;
}

const volatile std::byte* StormSide::first_row(std::uint32_t buffer, std::uint32_t page) const {
  const BufferShape& shape = rank_.rows.buffers()[buffer];
  const std::uint64_t pitch = shape.pitch_of(rank_.rows.page_size());
  return &rank_.memory.buffer(buffer)[page * pitch * shape.row_bytes];
}

RoomRows StormSide::rows(Room room, std::span<const std::uint32_t> pages) const {
  return {.room = room, .first = 0, .end = tokens_of(pages), .pages = pages};
}

void StormSide::fill(Room room, std::span<const std::uint32_t> pages) {
  for (std::uint32_t buffer = 0; buffer < buffers(); ++buffer) {
    rank_.rows.fill(rank_.memory.buffer(buffer), buffer, rows(room, pages), {0, tokens_of(pages)});
  }
}

void StormSide::fill_guard() {
  for (std::uint32_t buffer = 0; buffer < buffers(); ++buffer) {
    rank_.rows.fill_guard(rank_.memory.buffer(buffer), buffer, rows(1, held_.pages));
  }
  clear_aux(rank_.memory, narrow<std::uint32_t>(held_.slot));
}

RowReport StormSide::check(Room room, std::span<const std::uint32_t> pages) const {
  RowReport all;
  for (std::uint32_t buffer = 0; buffer < buffers(); ++buffer) {
    const RowReport found = rank_.rows.check(rank_.memory.buffer(buffer), buffer, rows(room, pages));
    all.compared += found.compared;
    all.differing += found.differing;
    if (all.first.empty()) {
      all.first = found.first;
    }
  }
  return all;
}

AuxReport StormSide::check_aux_row(Room room) const {
  return check_aux(rank_.memory, narrow<std::uint32_t>(held_.slot), room);
}

std::uint64_t StormSide::written(std::span<const std::uint32_t> pages) const {
  std::uint64_t bytes = 0;
  for (std::uint32_t buffer = 0; buffer < buffers(); ++buffer) {
    const RoomRows nothing{.room = 1, .first = 0, .end = 0, .pages = pages};
    bytes += rank_.rows.check(rank_.memory.buffer(buffer), buffer, nothing).differing;
  }
  return bytes;
}

std::uint64_t StormSide::hash_watched() const {
  Hash64 hash;
  for (std::uint32_t buffer = 0; buffer < buffers(); ++buffer) {
    const BufferShape& shape = rank_.rows.buffers()[buffer];
    const std::uint64_t page_bytes = std::uint64_t{shape.pitch_of(rank_.rows.page_size())} * shape.row_bytes;
    const auto memory = rank_.memory.buffer(buffer);
    for (const std::uint32_t page : watched_) {
      const auto bytes = memory.subspan(page * page_bytes, page_bytes);
      hash.add(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    }
  }
  return hash.value();
}

template <class Call>
Result<void> StormSide::insist_on(const char* name, Call call) {
  const int code = insist(call);
  return code == 0 ? Result<void>{} : fail(refusal(rank_, name, code));
}

Result<void> StormSide::send(Room room, std::span<const std::uint32_t> pages, std::uint32_t chunks,
                             std::uint32_t withheld) {
  fill_aux(rank_.memory, narrow<std::uint32_t>(held_.slot), room);
  const std::size_t pages_each = (pages.size() + chunks - 1) / chunks;
  std::size_t done = 0;
  for (std::uint32_t number = 0; number + withheld < chunks; ++number) {
    const auto part = pages.subspan(done, std::min(pages_each, pages.size() - done));
    kvf_chunk chunk{};
    chunk.struct_size = sizeof(chunk);
    chunk.room = room;
    chunk.pages = part.data();
    chunk.page_count = part.size();
    chunk.first_token = tokens_of(pages.first(done));
    chunk.token_count = tokens_of(part);
    chunk.last = number + 1 == chunks ? 1 : 0;
    chunk.aux_slot = chunk.last != 0 ? held_.slot : -1;
    chunk.ready_fd = -1;
    KVF_TRY_VOID(insist_on("kvf_send", [&] { return kvf_send(rank_.engine(), &chunk); }));
    done += part.size();
  }
  return {};
}

Result<void> StormSide::expect(Room room, std::span<const std::uint32_t> pages,
                               const std::string& bootstrap) {
  kvf_expectation expectation{};
  expectation.struct_size = sizeof(expectation);
  expectation.room = room;
  expectation.bootstrap = bootstrap.c_str();
  expectation.pages = pages.data();
  expectation.page_count = pages.size();
  expectation.token_count = tokens_of(pages);
  expectation.aux_slot = held_.slot;
  expectation.prefill_dp_rank = -1;
  return insist_on("kvf_expect", [&] { return kvf_expect(rank_.engine(), &expectation); });
}

void StormSide::abort(Room room) {
  // Refused where the room has ended already: its final event is on the way.
  kvf_abort(rank_.engine(), room, "abort storm");
}

Result<std::optional<StormEnd>> StormSide::poll(Room room) {
  std::optional<StormEnd> end;
  kvf_event event{};
  event.struct_size = sizeof(event);
  int result = 0;
  while ((result = kvf_next_event(rank_.engine(), &event, 0)) > 0) {
    const bool is_final =
        event.type == KVF_EVENT_LANDED || event.type == KVF_EVENT_FAILED || event.type == KVF_EVENT_ABORTED;
    if (!is_final) {
      continue;
    }
    if (event.room != room || end) {
      return fail(Code::kProtocol, "{}: final event {} of room {}, while room {} is alive: {}",
                  side_name(side_), event.type, event.room, room, event_error(event).message);
    }
    end = StormEnd{event.type, std::chrono::steady_clock::now(), event_error(event).message};
  }
  if (result < 0) {
    return fail(Code::kUnavailable, "{}: the daemon went away: {}", side_name(side_),
                kvf_last_error(rank_.engine()));
  }
  return end;
}

}  // namespace kvferry
