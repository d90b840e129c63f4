#include "common/engine/wire.h"

#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/base/clean_text.h"
#include "common/base/msgpack_scan.h"
#include "common/engine/wire_reader.h"

namespace kvferry::wire {

using nlohmann::json;

namespace {

static_assert(std::endian::native == std::endian::little, "page lists are copied as they lie in memory");

// Depth: map > list of buffers > map of one buffer, plus one to spare. Values: the largest legal frame is an
// attach with 4096 buffers of 12 keys and values each.
constexpr MsgpackLimits kFrameLimits{.depth_max = 4, .values_max = 96 * 1024};

constexpr std::pair<std::string_view, Op> kOps[] = {
    {"attach", Op::kAttach}, {"send", Op::kSend},   {"expect", Op::kExpect}, {"abort", Op::kAbort},
    {"detach", Op::kDetach}, {"reply", Op::kReply}, {"event", Op::kEvent},
};

json request(Op op, std::uint64_t seq, std::size_t fds) {
  return json{{"op", to_string(op)}, {"seq", seq}, {"fds", fds}};
}

std::string finish(const json& map) {
  return to_frame(json::to_msgpack(map));
}

json pages_value(const std::vector<std::uint32_t>& pages) {
  std::vector<std::uint8_t> bytes(pages.size() * sizeof(std::uint32_t));
  if (!pages.empty()) {
    std::memcpy(bytes.data(), pages.data(), bytes.size());
  }
  return json::binary(std::move(bytes));
}

void put_hybrid(json& map, const HybridRows& rows) {
  map["window_pages"] = pages_value(rows.window_pages);
  map["window_first"] = rows.window_first;
  map["state_slot"] = rows.state_slot ? static_cast<std::int64_t>(*rows.state_slot) : -1;
}

Result<HybridRows> read_hybrid(MapReader& reader) {
  HybridRows rows;
  KVF_TRY(rows.window_pages, reader.pages("window_pages"));
  KVF_TRY(rows.window_first, reader.number("window_first"));
  KVF_TRY(const int slot, reader.index_or_none("state_slot"));
  if (slot >= 0) {
    rows.state_slot = static_cast<std::uint32_t>(slot);
  }
  return rows;
}

Result<BufferPlace> read_buffer(const json& value, std::size_t index) {
  MapReader reader(value, fmt::format("buffers[{}].", index));
  BufferPlace place;
  KVF_TRY(place.shape.layer, reader.u32("layer"));
  KVF_TRY(const std::uint64_t kind, reader.number("kind", kBufferKinds - 1));
  place.shape.kind = static_cast<BufferKind>(kind);
  KVF_TRY(place.shape.row_bytes, reader.u32("row_bytes"));
  KVF_TRY(place.shape.pages, reader.number("pages"));
  KVF_TRY(place.shape.page_rows, reader.u32("page_rows"));
  KVF_TRY(place.shape.pitch, reader.u32("pitch"));
  KVF_TRY(place.fd, reader.u32("fd"));
  KVF_TRY(place.offset, reader.number("offset"));
  KVF_TRY_VOID(reader.done());
  return place;
}

Result<AuxField> read_aux(const json& value, std::size_t index) {
  MapReader reader(value, fmt::format("aux[{}].", index));
  AuxField field;
  KVF_TRY(field.name, reader.text("name", kNameBytesMax));
  KVF_TRY(field.width, reader.u32("width"));
  KVF_TRY(field.slots, reader.u32("slots"));
  KVF_TRY(field.fd, reader.u32("fd"));
  KVF_TRY(field.offset, reader.number("offset"));
  KVF_TRY_VOID(reader.done());
  return field;
}

Result<Room> read_room(MapReader& reader) {
  KVF_TRY(const std::uint64_t room, reader.number("room"));
  if (!room_is_legal(room)) {
    return fail(Code::kInvalid, "room is {}, legal are 1 to {} (2^63-1)", room, kRoomMax);
  }
  return room;
}

MapReader body_reader(const Envelope& envelope) {
  MapReader reader(envelope.map(), "");
  reader.skip("op");
  reader.skip("seq");
  reader.skip("fds");
  return reader;
}

}  // namespace

std::string_view to_string(Op op) {
  for (const auto& [name, value] : kOps) {
    if (value == op) {
      return name;
    }
  }
  return "unknown";
}

std::string encode(std::uint64_t seq, const Attach& message, std::size_t fds) {
  json buffers = json::array();
  for (const BufferPlace& place : message.layout.buffers) {
    buffers.push_back({{"layer", place.shape.layer},
                       {"kind", static_cast<unsigned>(place.shape.kind)},
                       {"row_bytes", place.shape.row_bytes},
                       {"pages", place.shape.pages},
                       {"page_rows", place.shape.page_rows},
                       {"pitch", place.shape.pitch},
                       {"fd", place.fd},
                       {"offset", place.offset}});
  }
  json aux = json::array();
  for (const AuxField& field : message.layout.aux) {
    aux.push_back({{"name", field.name},
                   {"width", field.width},
                   {"slots", field.slots},
                   {"fd", field.fd},
                   {"offset", field.offset}});
  }
  json map = request(Op::kAttach, seq, fds);
  map["protocol"] = message.protocol;
  map["tp"] = message.coord.tp;
  map["pp"] = message.coord.pp;
  map["cp"] = message.coord.cp;
  map["dp"] = message.coord.dp;
  map["dtype"] = message.dtype;
  map["page_size"] = message.layout.page_size;
  map["buffers"] = std::move(buffers);
  map["aux"] = std::move(aux);
  return finish(map);
}

std::string encode(std::uint64_t seq, const Send& message, std::size_t fds) {
  json map = request(Op::kSend, seq, fds);
  map["room"] = message.room;
  map["pages"] = pages_value(message.pages);
  map["first_token"] = message.first_token;
  map["token_count"] = message.token_count;
  map["last"] = message.last;
  map["begun"] = message.begun;
  map["aux_slot"] = message.aux_slot;
  put_hybrid(map, message.hybrid);
  map["layer_begin"] = message.layer_begin;
  map["layer_end"] = message.layer_end;
  return finish(map);
}

std::string encode(std::uint64_t seq, const Expect& message) {
  json map = request(Op::kExpect, seq, 0);
  map["room"] = message.room;
  map["bootstrap"] = message.bootstrap;
  map["pages"] = pages_value(message.pages);
  map["prefix"] = message.prefix;
  map["token_count"] = message.token_count;
  map["aux_slot"] = message.aux_slot;
  map["prefill_dp_rank"] = message.prefill_dp_rank;
  put_hybrid(map, message.hybrid);
  return finish(map);
}

std::string encode(std::uint64_t seq, const Abort& message) {
  json map = request(Op::kAbort, seq, 0);
  map["room"] = message.room;
  map["reason"] = cut_text(message.reason, kReasonBytesMax);
  map["begun"] = message.begun;
  return finish(map);
}

std::string encode_detach(std::uint64_t seq) {
  return finish(request(Op::kDetach, seq, 0));
}

std::string encode(const Reply& message) {
  return finish({{"op", to_string(Op::kReply)},
                 {"seq", message.seq},
                 {"code", message.code},
                 {"message", cut_text(message.message, kMessageBytesMax)}});
}

std::string encode(const Event& message) {
  return finish({{"op", to_string(Op::kEvent)},
                 {"type", message.type},
                 {"room", message.room},
                 {"tokens", message.tokens},
                 {"bytes", message.bytes},
                 {"transfer_ns", message.transfer_ns},
                 {"code", message.code},
                 {"reason", cut_text(message.reason, kReasonBytesMax)},
                 {"layer_end", message.layer_end}});
}

Envelope::Envelope() = default;
Envelope::~Envelope() = default;
Envelope::Envelope(Envelope&&) noexcept = default;
Envelope& Envelope::operator=(Envelope&&) noexcept = default;

Result<Envelope> open(std::span<const std::byte> body) {
  KVF_TRY(const std::uint32_t entries, check_msgpack_map(body, kFrameLimits, "frame"));
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(body.data());
  json map = json::from_msgpack(bytes, bytes + body.size(), /*strict=*/true, /*allow_exceptions=*/false);
  if (!map.is_object()) {
    return fail(Code::kProtocol, "frame of {} bytes is not a MessagePack map with text keys", body.size());
  }
  if (map.size() != entries) {
    return fail(Code::kProtocol, "frame repeats a key: {} entries, {} different keys", entries, map.size());
  }
  Envelope envelope;
  envelope.map_ = std::make_unique<json>(std::move(map));
  MapReader reader(envelope.map(), "");
  KVF_TRY(const std::string op, reader.text("op", kNameBytesMax));
  bool known = false;
  for (const auto& [name, value] : kOps) {
    if (name == op) {
      envelope.op = value;
      known = true;
    }
  }
  if (!known) {
    return fail(Code::kProtocol, "op is \"{}\", known are attach, send, expect, abort, detach, reply, event",
                op);
  }
  if (envelope.op != Op::kEvent) {
    KVF_TRY(envelope.seq, reader.number("seq"));
  }
  if (envelope.op != Op::kEvent && envelope.op != Op::kReply) {
    KVF_TRY(envelope.fds, reader.u32("fds"));
  }
  return envelope;
}

Result<Attach> decode_attach(const Envelope& envelope) {
  MapReader reader = body_reader(envelope);
  Attach attach;
  KVF_TRY(attach.protocol, reader.u32("protocol"));
  if (attach.protocol != kProtocol) {
    return fail(Code::kMismatch,
                "the engine speaks protocol {}, this daemon {}: install libkvferry and the daemon from one "
                "release",
                attach.protocol, kProtocol);
  }
  KVF_TRY(attach.coord.tp, reader.u32("tp"));
  KVF_TRY(attach.coord.pp, reader.u32("pp"));
  KVF_TRY(attach.coord.cp, reader.u32("cp"));
  KVF_TRY(attach.coord.dp, reader.u32("dp"));
  KVF_TRY(attach.dtype, reader.text("dtype", kNameBytesMax));
  KVF_TRY(attach.layout.page_size, reader.u32("page_size"));
  KVF_TRY(const json* buffers, reader.list("buffers", kBuffersMax));
  for (const json& value : *buffers) {
    KVF_TRY(BufferPlace place, read_buffer(value, attach.layout.buffers.size()));
    attach.layout.buffers.push_back(place);
  }
  KVF_TRY(const json* aux, reader.list("aux", kAuxFieldsMax));
  for (const json& value : *aux) {
    KVF_TRY(AuxField field, read_aux(value, attach.layout.aux.size()));
    attach.layout.aux.push_back(std::move(field));
  }
  KVF_TRY_VOID(reader.done());
  return attach;
}

Result<Send> decode_send(const Envelope& envelope) {
  MapReader reader = body_reader(envelope);
  Send send;
  KVF_TRY(send.room, read_room(reader));
  KVF_TRY(send.pages, reader.pages("pages"));
  KVF_TRY(send.first_token, reader.number("first_token"));
  KVF_TRY(send.token_count, reader.number("token_count"));
  KVF_TRY(send.last, reader.boolean("last"));
  KVF_TRY(send.begun, reader.boolean("begun"));
  KVF_TRY(send.aux_slot, reader.index_or_none("aux_slot"));
  KVF_TRY(send.hybrid, read_hybrid(reader));
  KVF_TRY(send.layer_begin, reader.u32("layer_begin"));
  KVF_TRY(send.layer_end, reader.u32("layer_end"));
  KVF_TRY_VOID(reader.done());
  return send;
}

Result<Expect> decode_expect(const Envelope& envelope) {
  MapReader reader = body_reader(envelope);
  Expect expect;
  KVF_TRY(expect.room, read_room(reader));
  KVF_TRY(expect.bootstrap, reader.text("bootstrap", kBootstrapBytesMax));
  KVF_TRY(expect.pages, reader.pages("pages"));
  KVF_TRY(expect.prefix, reader.number("prefix"));
  KVF_TRY(expect.token_count, reader.number("token_count"));
  KVF_TRY(expect.aux_slot, reader.index_or_none("aux_slot"));
  KVF_TRY(expect.prefill_dp_rank, reader.index_or_none("prefill_dp_rank"));
  KVF_TRY(expect.hybrid, read_hybrid(reader));
  KVF_TRY_VOID(reader.done());
  return expect;
}

Result<Abort> decode_abort(const Envelope& envelope) {
  MapReader reader = body_reader(envelope);
  Abort abort;
  KVF_TRY(abort.room, read_room(reader));
  KVF_TRY(abort.reason, reader.any_text("reason", kReasonBytesMax));
  KVF_TRY(abort.begun, reader.boolean("begun"));
  KVF_TRY_VOID(reader.done());
  return abort;
}

Result<void> decode_detach(const Envelope& envelope) {
  return body_reader(envelope).done();
}

Result<Reply> decode_reply(const Envelope& envelope) {
  MapReader reader(envelope.map(), "");
  reader.skip("op");
  reader.skip("seq");
  Reply reply;
  reply.seq = envelope.seq;
  KVF_TRY(const std::uint64_t code, reader.number("code", 255));
  reply.code = static_cast<std::uint8_t>(code);
  KVF_TRY(reply.message, reader.any_text("message", kMessageBytesMax));
  KVF_TRY_VOID(reader.done());
  return reply;
}

Result<Event> decode_event(const Envelope& envelope) {
  MapReader reader(envelope.map(), "");
  reader.skip("op");
  Event event;
  KVF_TRY(event.type, reader.u32("type"));
  KVF_TRY(event.room, reader.number("room"));
  KVF_TRY(event.tokens, reader.number("tokens"));
  KVF_TRY(event.bytes, reader.number("bytes"));
  KVF_TRY(event.transfer_ns, reader.number("transfer_ns"));
  KVF_TRY(const std::uint64_t code, reader.number("code", 255));
  event.code = static_cast<std::uint8_t>(code);
  KVF_TRY(event.reason, reader.any_text("reason", kReasonBytesMax));
  KVF_TRY(event.layer_end, reader.u32("layer_end"));
  KVF_TRY_VOID(reader.done());
  return event;
}

}  // namespace kvferry::wire
