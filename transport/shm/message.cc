#include "transport/shm/message.h"

#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>

namespace kvferry::shm {
namespace {

using Json = nlohmann::json;
constexpr std::size_t kNameMax = 256;
constexpr std::size_t kPathMax = 4096;
constexpr std::uint64_t kU32Max = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t kU64Max = std::numeric_limits<std::uint64_t>::max();

Result<Json> parse_object(std::string_view text) {
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) {
    return fail(Code::kProtocol, "shm message of {} bytes is not a JSON object; do both daemons run KVFerry?",
                text.size());
  }
  return json;
}

Result<std::uint64_t> number(const Json& json, std::string_view field, std::uint64_t max) {
  if (!json.is_number_unsigned()) {
    return fail(Code::kProtocol, "shm message field {}: a whole number from 0 to {} is needed, found {}",
                field, max, json.type_name());
  }
  const auto value = json.get<std::uint64_t>();
  if (value > max) {
    return fail(Code::kProtocol, "shm message field {}: {} is above the limit of {}", field, value, max);
  }
  return value;
}

Result<std::uint64_t> number_in(const Json& object, const char* field, std::uint64_t max) {
  const auto found = object.find(field);
  if (found == object.end()) {
    return fail(Code::kProtocol, "shm message lacks the field {}", field);
  }
  return number(*found, field, max);
}

Result<std::string> text_value(const Json& json, std::string_view field, std::size_t bytes_max) {
  if (!json.is_string()) {
    return fail(Code::kProtocol, "shm message field {}: a text is needed, found {}", field, json.type_name());
  }
  auto value = json.get<std::string>();
  if (value.size() > bytes_max) {
    return fail(Code::kProtocol, "shm message field {}: {} bytes are above the limit of {}", field,
                value.size(), bytes_max);
  }
  return value;
}

Result<std::string> text_in(const Json& object, const char* field, std::size_t bytes_max) {
  const auto found = object.find(field);
  if (found == object.end()) {
    return fail(Code::kProtocol, "shm message lacks the field {}", field);
  }
  return text_value(*found, field, bytes_max);
}

Result<const Json*> array_in(const Json& object, const char* field, std::size_t count_max) {
  const auto found = object.find(field);
  if (found == object.end() || !found->is_array()) {
    return fail(Code::kProtocol, "shm message needs an array {}", field);
  }
  if (found->size() > count_max) {
    return fail(Code::kProtocol, "shm message array {}: {} entries are above the limit of {}", field,
                found->size(), count_max);
  }
  return &*found;
}

bool is_hex(std::string_view text, std::size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Result<std::string> token_in(const Json& object) {
  KVF_TRY(std::string token, text_in(object, "token", 32));
  if (!is_hex(token, 32)) {
    return fail(Code::kProtocol, "shm message field token: 32 lower-case hex digits are needed");
  }
  return token;
}

// Epochs are texts because JSON readers elsewhere keep only 53 bits of a number.
Result<Epoch> epoch_in(const Json& object) {
  KVF_TRY(const std::string text, text_in(object, "epoch", 16));
  Epoch epoch = 0;
  if (!is_hex(text, 16)) {
    return fail(Code::kProtocol, "shm message field epoch: 16 lower-case hex digits are needed");
  }
  std::from_chars(text.data(), text.data() + text.size(), epoch, 16);
  return epoch;
}

Json buffers_json(const PoolLayout& layout) {
  Json list = Json::array();
  for (const BufferPlace& place : layout.buffers) {
    list.push_back(Json::array(
        {place.shape.layer, to_string(place.shape.kind), place.shape.row_bytes, place.shape.pages, place.fd,
         place.offset, place.shape.rows_of_page(layout.page_size), place.shape.pitch_of(layout.page_size)}));
  }
  return list;
}

Json aux_json(const PoolLayout& layout) {
  Json list = Json::array();
  for (const AuxField& field : layout.aux) {
    list.push_back(Json::array({field.name, field.width, field.slots, field.fd, field.offset}));
  }
  return list;
}

Result<BufferPlace> parse_buffer(const Json& entry) {
  if (!entry.is_array() || entry.size() != 8) {
    return fail(Code::kProtocol,
                "shm pool buffer: [layer, kind, row_bytes, pages, fd, offset, page_rows, pitch] is needed");
  }
  BufferPlace place;
  KVF_TRY(const std::uint64_t layer, number(entry[0], "layer", kU32Max));
  KVF_TRY(const std::string kind, text_value(entry[1], "kind", 16));
  KVF_TRY(const std::uint64_t row_bytes, number(entry[2], "row_bytes", kU32Max));
  KVF_TRY(place.shape.pages, number(entry[3], "pages", kU64Max));
  KVF_TRY(const std::uint64_t fd, number(entry[4], "fd", kDescriptorsMax - 1));
  KVF_TRY(place.offset, number(entry[5], "offset", kU64Max));
  KVF_TRY(const std::uint64_t page_rows, number(entry[6], "page_rows", kU32Max));
  KVF_TRY(const std::uint64_t pitch, number(entry[7], "pitch", kU32Max));
  place.shape.page_rows = static_cast<std::uint32_t>(page_rows);
  place.shape.pitch = static_cast<std::uint32_t>(pitch);
  place.shape.layer = static_cast<std::uint32_t>(layer);
  place.shape.row_bytes = static_cast<std::uint32_t>(row_bytes);
  place.fd = static_cast<std::uint32_t>(fd);
  if (auto known = parse_buffer_kind(kind); known) {
    place.shape.kind = *known;
    return place;
  }
  return fail(Code::kProtocol, "shm pool buffer: kind '{}' is unknown", kind);
}

Result<AuxField> parse_aux(const Json& entry) {
  if (!entry.is_array() || entry.size() != 5) {
    return fail(Code::kProtocol, "shm pool aux field: [name, width, slots, fd, offset] is needed");
  }
  AuxField field;
  KVF_TRY(field.name, text_value(entry[0], "name", kNameMax));
  KVF_TRY(const std::uint64_t width, number(entry[1], "width", kU32Max));
  KVF_TRY(const std::uint64_t slots, number(entry[2], "slots", kU32Max));
  KVF_TRY(const std::uint64_t fd, number(entry[3], "fd", kDescriptorsMax - 1));
  KVF_TRY(field.offset, number(entry[4], "offset", kU64Max));
  field.width = static_cast<std::uint32_t>(width);
  field.slots = static_cast<std::uint32_t>(slots);
  field.fd = static_cast<std::uint32_t>(fd);
  return field;
}

Result<PoolAdded> parse_pool(const Json& json) {
  PoolAdded pool;
  KVF_TRY(pool.serial, number_in(json, "serial", kU64Max));
  KVF_TRY(const std::uint64_t fds, number_in(json, "fds", kDescriptorsMax));
  KVF_TRY(const std::uint64_t rank, number_in(json, "rank", kRankMax));
  KVF_TRY(const std::uint64_t page_size, number_in(json, "page_size", kU32Max));
  KVF_TRY(const Json* buffers, array_in(json, "buffers", kBuffersMax));
  KVF_TRY(const Json* aux, array_in(json, "aux", kAuxFieldsMax));
  pool.fds = static_cast<std::uint32_t>(fds);
  pool.layout.rank = static_cast<RankIndex>(rank);
  pool.layout.page_size = static_cast<std::uint32_t>(page_size);
  for (const Json& entry : *buffers) {
    KVF_TRY(BufferPlace place, parse_buffer(entry));
    pool.layout.buffers.push_back(place);
  }
  for (const Json& entry : *aux) {
    KVF_TRY(AuxField field, parse_aux(entry));
    pool.layout.aux.push_back(std::move(field));
  }
  return pool;
}

Result<Notice> parse_notice(const Json& json) {
  Notice notice;
  KVF_TRY(notice.key.grant.room, number_in(json, "room", kRoomMax));
  KVF_TRY(notice.key.grant.generation, number_in(json, "generation", kU64Max));
  KVF_TRY(const std::uint64_t decode_rank, number_in(json, "decode_rank", kRankMax));
  KVF_TRY(const std::uint64_t prefill_rank, number_in(json, "prefill_rank", kRankMax));
  KVF_TRY(notice.serial, number_in(json, "serial", kU64Max));
  KVF_TRY(notice.bytes, number_in(json, "bytes", kU64Max));
  KVF_TRY(notice.blocks, number_in(json, "blocks", kU64Max));
  notice.key.grant.decode_rank = static_cast<RankIndex>(decode_rank);
  notice.key.prefill_rank = static_cast<RankIndex>(prefill_rank);
  return notice;
}

Result<void> check_version(const Json& json) {
  KVF_TRY(const std::uint64_t version, number_in(json, "version", kU32Max));
  if (version != kProtocolVersion) {
    return fail(Code::kProtocol, "shm protocol version {} on the other side, {} here; install equal versions",
                version, kProtocolVersion);
  }
  return {};
}

Result<Refused> parse_refused(const Json& json) {
  KVF_TRY(const std::uint64_t code, number_in(json, "code", 255));
  KVF_TRY(std::string message, text_in(json, "message", kPathMax));
  return Refused{Error{code_from_number(static_cast<std::uint8_t>(code)), std::move(message)}};
}

std::string dump(const Json& json) {
  // Messages may quote bytes of a peer; replacing what is not UTF-8 keeps dump() from throwing.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string hex_epoch(Epoch epoch) {
  return fmt::format("{:016x}", epoch);
}

}  // namespace

std::string to_text(const Hello& message) {
  return dump({{"type", "hello"}, {"version", kProtocolVersion}, {"token", message.token}});
}

std::string to_text(const Notice& message) {
  return dump({{"type", "notice"},
               {"room", message.key.grant.room},
               {"generation", message.key.grant.generation},
               {"decode_rank", message.key.grant.decode_rank},
               {"prefill_rank", message.key.prefill_rank},
               {"serial", message.serial},
               {"bytes", message.bytes},
               {"blocks", message.blocks}});
}

std::string to_text(const Welcome& message) {
  return dump({{"type", "welcome"},
               {"version", kProtocolVersion},
               {"epoch", hex_epoch(message.epoch)},
               {"pools", message.pools}});
}

std::string to_text(const PoolAdded& message) {
  return dump({{"type", "pool"},
               {"serial", message.serial},
               {"fds", message.fds},
               {"rank", message.layout.rank},
               {"page_size", message.layout.page_size},
               {"buffers", buffers_json(message.layout)},
               {"aux", aux_json(message.layout)}});
}

std::string to_text(const PoolGone& message) {
  return dump({{"type", "pool_gone"}, {"rank", message.rank}, {"serial", message.serial}});
}

std::string to_text(const Refused& message) {
  return dump({{"type", "refused"},
               {"code", static_cast<unsigned>(message.error.code)},
               {"message", message.error.message.substr(0, kPathMax)}});
}

Result<FromSender> parse_from_sender(std::string_view text) {
  KVF_TRY(const Json json, parse_object(text));
  KVF_TRY(const std::string type, text_in(json, "type", 16));
  if (type == "hello") {
    KVF_TRY_VOID(check_version(json));
    KVF_TRY(std::string token, token_in(json));
    return FromSender{Hello{std::move(token)}};
  }
  if (type == "notice") {
    KVF_TRY(Notice notice, parse_notice(json));
    return FromSender{notice};
  }
  return fail(Code::kProtocol, "shm message type '{}' is none of hello, notice", type);
}

Result<FromReceiver> parse_from_receiver(std::string_view text) {
  KVF_TRY(const Json json, parse_object(text));
  KVF_TRY(const std::string type, text_in(json, "type", 16));
  if (type == "welcome") {
    KVF_TRY_VOID(check_version(json));
    KVF_TRY(const Epoch epoch, epoch_in(json));
    KVF_TRY(const std::uint64_t pools, number_in(json, "pools", kPoolsMax));
    return FromReceiver{Welcome{epoch, static_cast<std::uint32_t>(pools)}};
  }
  if (type == "pool") {
    KVF_TRY(PoolAdded pool, parse_pool(json));
    return FromReceiver{std::move(pool)};
  }
  if (type == "pool_gone") {
    KVF_TRY(const std::uint64_t rank, number_in(json, "rank", kRankMax));
    KVF_TRY(const std::uint64_t serial, number_in(json, "serial", kU64Max));
    return FromReceiver{PoolGone{static_cast<RankIndex>(rank), serial}};
  }
  if (type == "refused") {
    KVF_TRY(Refused refused, parse_refused(json));
    return FromReceiver{std::move(refused)};
  }
  return fail(Code::kProtocol, "shm message type '{}' is none of welcome, pool, pool_gone, refused", type);
}

std::string to_text(const Offer& offer) {
  return dump({{"host_id", offer.host_id},
               {"path", offer.path},
               {"token", offer.token},
               {"epoch", hex_epoch(offer.epoch)}});
}

Result<Offer> parse_offer(std::string_view text) {
  KVF_TRY(const Json json, parse_object(text));
  Offer offer;
  KVF_TRY(offer.host_id, text_in(json, "host_id", kNameMax));
  KVF_TRY(offer.path, text_in(json, "path", kPathMax));
  KVF_TRY(offer.token, token_in(json));
  KVF_TRY(offer.epoch, epoch_in(json));
  return offer;
}

}  // namespace kvferry::shm
