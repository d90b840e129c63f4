#include "tools/engine/prefill_role.h"

#include <algorithm>
#include <random>
#include <utility>

#include "common/base/narrow.h"
#include "tools/engine/pattern.h"
#include "tools/engine/protocol.h"

namespace kvferry {
namespace {

constexpr std::uint64_t kTokensMax = 100'000'000;
constexpr std::uint64_t kLayersMax = 1u << 20;
constexpr std::chrono::milliseconds kRetry{2};

std::uint64_t nanoseconds(Instant instant) {
  return narrow<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(instant.time_since_epoch()).count());
}

}  // namespace

Result<void> PrefillRole::on_command(const std::string& op, const nlohmann::json& command) {
  if (op == "request") {
    return start(command);
  }
  if (op != "abort") {
    return fail(Code::kInvalid, "field op: {} is not request, abort, stats or quit", op);
  }
  KVF_TRY(const Room room, read_number(command, "room", 1, kRoomMax));
  KVF_TRY(std::string reason, read_text(command, "reason"));
  const auto found = requests_.find(room);
  if (found != requests_.end()) {
    fail_room(found->second.state, Error{Code::kAborted, std::move(reason)});
    finish(room, Instant{});
  }
  return {};
}

Result<void> PrefillRole::start(const nlohmann::json& command) {
  Request request;
  KVF_TRY(request.state.room, read_number(command, "room", 1, kRoomMax));
  KVF_TRY(request.state.tokens, read_number(command, "tokens", 1, kTokensMax));
  KVF_TRY(request.state.prefix, read_number(command, "prefix", 0, request.state.tokens));
  KVF_TRY(request.chunk_tokens, read_number(command, "chunk_tokens", 1, kTokensMax));
  if (command.contains("layer_group")) {
    KVF_TRY(const std::uint64_t group, read_number(command, "layer_group", 0, kLayersMax));
    request.layer_group = narrow<std::uint32_t>(group);
  }
  request.stream = read_flag(command, "stream");
  const Room room = request.state.room;
  if (requests_.contains(room)) {
    return fail(Code::kConflict, "room {} is alive already", room);
  }
  for (const Rank& rank : ranks_) {
    if (request.state.prefix % rank.rows.virtual_page() != 0 ||
        request.chunk_tokens % rank.rows.virtual_page() != 0) {
      return fail(Code::kInvalid, "prefix {} and chunk_tokens {} must be multiples of the virtual page {}",
                  request.state.prefix, request.chunk_tokens, rank.rows.virtual_page());
    }
  }
  KVF_TRY_VOID(allocate_parts(request.state, ranks_, options_.dp_size));
  for (const RoomPart& part : request.state.parts) {
    const auto& buffers = part.rank->rows.buffers();
    request.layers.push_back({layer_groups(buffers, request.layer_group), buffers_by_layer(buffers)});
  }
  const std::uint64_t fresh = request.state.tokens - request.state.prefix;
  request.chunks = std::max<std::uint64_t>(1, (fresh + request.chunk_tokens - 1) / request.chunk_tokens);
  if (read_flag(command, "corrupt") && fresh > 0) {
    choose_corruption(request);
  }
  requests_.emplace(room, std::move(request));
  turns_.push_back(room);
  return {};
}

void PrefillRole::choose_corruption(Request& request) {
  std::mt19937_64 random(options_.seed ^ request.state.room);
  const auto kinds = options_.model.buffer_kinds();
  PieceCoordinate piece{.room = request.state.room};
  piece.layer = options_.model.kv_layers[random() % options_.model.kv_layers.size()];
  piece.kind = kinds[random() % kinds.size()];
  piece.head = static_cast<std::uint32_t>(random() % options_.model.kv_heads);
  piece.position = request.state.prefix + random() % (request.state.tokens - request.state.prefix);
  request.corrupt = piece;
  request.corrupt_byte = static_cast<std::uint32_t>(random() % options_.model.head_bytes(piece.kind));
  sink_.emit({{"event", "corrupted"},
              {"room", piece.room},
              {"layer", piece.layer},
              {"kind", to_string(piece.kind)},
              {"head", piece.head},
              {"position", piece.position},
              {"byte", request.corrupt_byte}});
}

Interval PrefillRole::chunk_tokens(const Request& request, std::uint64_t chunk) const {
  const std::uint64_t begin = request.state.prefix + chunk * request.chunk_tokens;
  return {begin, std::min(begin + request.chunk_tokens, request.state.tokens)};
}

bool PrefillRole::waits_for_retry() const {
  return std::any_of(requests_.begin(), requests_.end(),
                     [](const auto& entry) { return !entry.second.sends.empty(); });
}

bool PrefillRole::work(Instant now) {
  for (std::size_t tried = 0; tried < turns_.size(); ++tried) {
    const Room room = turns_.front();
    turns_.pop_front();
    turns_.push_back(room);
    Request& request = requests_.at(room);
    if (!request.sends.empty() && now >= request.retry_at && send_step(request, now)) {
      return true;
    }
    if (request.fills()) {
      fill_step(request);
      return true;
    }
  }
  return false;
}

/// How a chunk of one rank is sent; an empty one always as a whole.
std::vector<LayerGroup> PrefillRole::groups(const Request& request, std::uint64_t chunk,
                                            std::size_t part) const {
  return chunk_tokens(request, chunk).size() == 0 ? std::vector{LayerGroup{}} : request.layers[part].groups;
}

/// Hands over the groups of the chunk that is filled next, each behind its fence. False when there are no
/// fences to be had: the room has failed.
bool PrefillRole::begin_groups(Request& request) const {
  for (const LayerGroup& group : groups(request, request.chunk, request.part)) {
    auto fence = ReadyFence::create();
    if (!fence) {
      fail_room(request.state, fence.error());
      return false;
    }
    request.closed.push_back(
        {request.chunk, request.part, group, std::make_shared<ReadyFence>(*std::move(fence))});
    request.sends.push_back(request.closed.back());
  }
  return true;
}

/// Opens the fences of the groups whose buffers are all filled.
void PrefillRole::open_fences(Request& request) {
  const auto& order = request.layers[request.part].buffers;
  const auto& buffers = request.state.parts[request.part].rank->rows.buffers();
  const auto filled = [&](const LayerGroup& group) {
    return request.buffer == order.size() ||
           (group.end != 0 && buffers[order[request.buffer]].layer >= group.end);
  };
  while (!request.closed.empty() && filled(request.closed.front().layers)) {
    request.closed.front().fence->open();
    request.closed.pop_front();
  }
}

void PrefillRole::fill_step(Request& request) {
  RoomPart& part = request.state.parts[request.part];
  const Interval tokens = chunk_tokens(request, request.chunk);
  const bool by_layers = request.stream && request.layer_group > 0;
  if (by_layers && request.buffer == 0 && !begin_groups(request)) {
    finish(request.state.room, Instant{});
    return;
  }
  const auto& order = request.layers[request.part].buffers;
  const std::uint32_t buffer = order[request.buffer];
  if (tokens.size() > 0 ||
      request.chunk + 1 == request.chunks) {  // the state goes with the last chunk, even an empty one
    part.rank->rows.fill(part.rank->memory.buffer(buffer), buffer, request.state.rows(part), tokens);
  }
  corrupt(request, part, buffer, tokens);
  ++request.buffer;
  open_fences(request);
  if (request.buffer < order.size()) {
    return;
  }
  if (request.stream && !by_layers) {
    request.sends.push_back({request.chunk, request.part});
  }
  request.buffer = 0;
  if (++request.part < request.state.parts.size()) {
    return;
  }
  request.part = 0;
  if (++request.chunk == request.chunks && !request.stream) {
    for (std::uint64_t chunk = 0; chunk < request.chunks; ++chunk) {
      for (std::size_t each = 0; each < request.state.parts.size(); ++each) {
        for (const LayerGroup& group : groups(request, chunk, each)) {
          request.sends.push_back({chunk, each, group});
        }
      }
    }
  }
}

// Every rank that holds the coordinate gets the same wrong byte: which of several equal copies is sent is the
// daemon's choice.
void PrefillRole::corrupt(const Request& request, RoomPart& part, std::uint32_t buffer,
                          const Interval& tokens) {
  if (!request.corrupt || !tokens.contains(request.corrupt->position)) {
    return;
  }
  const PieceCoordinate& piece = *request.corrupt;
  const BufferShape& shape = part.rank->rows.buffers()[buffer];
  if (shape.layer == piece.layer && shape.kind == piece.kind) {
    part.rank->rows.corrupt(part.rank->memory.buffer(buffer), buffer, request.state.rows(part),
                            piece.position, piece.head, request.corrupt_byte);
  }
}

// True when a chunk was handed over (or the room has just failed): there may be more to do at once.
bool PrefillRole::send_step(Request& request, Instant now) {
  const Send send = request.sends.front();
  RoomPart& part = request.state.parts[send.part];
  if (request.state.failure || part.ended) {
    request.sends.pop_front();
    return true;
  }
  const Interval tokens = chunk_tokens(request, send.chunk);
  const std::uint64_t page = part.rank->rows.virtual_page();
  const std::uint64_t page_count = part.rank->rows.pages_for(tokens.begin, tokens.end);
  const std::uint64_t first_page = page_count == 0 ? 0 : (tokens.begin - request.state.prefix) / page;
  const bool last =
      send.chunk + 1 == request.chunks && send.layers == groups(request, send.chunk, send.part).back();
  kvf_chunk chunk{};
  chunk.struct_size = sizeof(chunk);
  chunk.room = request.state.room;
  chunk.pages = part.held.pages.data() + first_page;
  chunk.page_count = page_count;
  chunk.first_token = tokens.begin;
  chunk.token_count = tokens.size();
  chunk.last = last ? 1 : 0;
  chunk.aux_slot = last ? part.held.slot : -1;
  chunk.ready_fd = send.fence != nullptr ? send.fence->fd() : -1;
  chunk.layer_begin = send.layers.begin;
  chunk.layer_end = send.layers.end;
  if (last) {
    chunk.hybrid = request.state.hybrid(part);
  }
  if (last) {
    fill_aux(part.rank->memory, narrow<std::uint32_t>(part.held.slot), request.state.room);
  }
  const int code = part.rank->attached() ? kvf_send(part.rank->engine(), &chunk) : -KVF_UNAVAILABLE;
  if (try_again_later(code)) {
    request.retry_at = now + kRetry;
    return false;
  }
  request.sends.pop_front();
  if (code != 0) {
    on_refused(request, part, refusal(*part.rank, "kvf_send", code));
    return true;
  }
  part.accepted = true;
  part.complete = last;
  if (!std::exchange(request.started, true)) {
    sink_.emit({{"event", "started"}, {"room", request.state.room}});
  }
  return true;
}

void PrefillRole::on_refused(Request& request, RoomPart& part, const Error& error) {
  if (!part.accepted) {
    fail_room(request.state, error);
    finish(request.state.room, Instant{});
    return;
  }
  // The daemon may have ended the room while its event is still on the way; that event has the true reason,
  // and where it has not, the abort's own event carries this one.
  std::erase_if(request.sends, [&](const Send& send) { return &request.state.parts[send.part] == &part; });
  kvf_abort(part.rank->engine(), request.state.room, error.message.c_str());
}

void PrefillRole::on_event(Rank& rank, const kvf_event& event, Instant now) {
  const auto found = requests_.find(event.room);
  RoomPart* part = found == requests_.end() ? nullptr : found->second.state.part_of(rank);
  if (part == nullptr || part->ended || !part->accepted) {
    report_stray(sink_, rank, event);
    return;
  }
  RoomState& state = found->second.state;
  if (event.type == KVF_EVENT_LANDED) {
    part->bytes = event.bytes;
    part->transfer_ns = event.transfer_ns;
    end_part(*part);
    if (!part->complete) {
      fail_room(state, Error{Code::kProtocol,
                             fmt::format("rank {} reported the room landed before its last chunk was "
                                         "sent",
                                         rank.index())});
    }
  } else if (event.type == KVF_EVENT_FAILED || event.type == KVF_EVENT_ABORTED) {
    end_part(*part);
    fail_room(state, event_error(event));
  } else if (event.type == KVF_EVENT_GRANTED) {
    on_granted(found->second, rank, event);
  }
  finish(event.room, now);
}

void PrefillRole::on_granted(Request& request, const Rank& rank, const kvf_event& event) {
  if (event.tokens != request.state.prefix) {
    fail_room(request.state,
              Error{Code::kProtocol, fmt::format("rank {} was told a decode prefix of {} tokens where "
                                                 "decode has {}",
                                                 rank.index(), event.tokens, request.state.prefix)});
  } else if (!std::exchange(request.granted, true)) {
    sink_.emit({{"event", "granted"}, {"room", request.state.room}});
  }
}

void PrefillRole::on_lost(Rank& rank, const std::string& reason) {
  std::vector<Room> rooms;
  for (auto& [room, request] : requests_) {
    if (RoomPart* part = request.state.part_of(rank); part != nullptr) {
      lose_part(request.state, *part, reason);
      rooms.push_back(room);
    }
  }
  for (const Room room : rooms) {
    finish(room, Instant{});
  }
}

void PrefillRole::finish(Room room, Instant now) {
  const auto found = requests_.find(room);
  if (found == requests_.end() || !found->second.state.ended()) {
    return;
  }
  const RoomState& state = found->second.state;
  if (state.failure) {
    sink_.emit(failure_event(room, *state.failure));
  } else {
    std::uint64_t bytes = 0;
    std::uint64_t transfer_ns = 0;
    for (const RoomPart& part : state.parts) {
      bytes += part.bytes;
      transfer_ns = std::max(transfer_ns, part.transfer_ns);
    }
    sink_.emit({{"event", "landed"},
                {"room", room},
                {"bytes", bytes},
                {"transfer_ns", transfer_ns},
                {"at_ns", nanoseconds(now)}});
  }
  turns_.erase(std::remove(turns_.begin(), turns_.end(), room), turns_.end());
  requests_.erase(found);
}

}  // namespace kvferry
