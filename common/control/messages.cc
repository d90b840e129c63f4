#include "common/control/messages.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>

#include "common/base/clean_text.h"
#include "common/base/msgpack_scan.h"

namespace kvferry {
namespace {

using nlohmann::json;

constexpr std::size_t kTextMax = 4096;
constexpr std::size_t kRanksMax = 65536;
constexpr std::size_t kBuffersMax = 4096;
constexpr std::size_t kAuxMax = 64;
constexpr std::size_t kColumnsMax = 2048;  // of a digest
// Map > list of buffers > list of one buffer, plus one to spare. The most values has a rank_up: each of its
// buffers is a list of four, each of its aux fields a list of three, and ten more for the outer map.
constexpr MsgpackLimits kLimits{.depth_max = 4, .values_max = 10 + kBuffersMax * 7 + kAuxMax * 4};

// Page lists are by far the largest part of a message: packed little-endian words instead of one item each.
json::binary_t pack_words(const std::vector<std::uint32_t>& words) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(words.size() * 4);
  for (const std::uint32_t word : words) {
    for (int shift = 0; shift < 32; shift += 8) {
      bytes.push_back(static_cast<std::uint8_t>(word >> shift));
    }
  }
  return json::binary_t(std::move(bytes));
}

json key_json(const GrantKey& key) {
  return json{{"room", key.room}, {"generation", key.generation}, {"decode_rank", key.decode_rank}};
}

struct Encoder {
  json operator()(const message::RankUp& m) const {
    json buffers = json::array();
    for (const BufferShape& buffer : m.buffers) {
      buffers.push_back({buffer.layer, static_cast<int>(buffer.kind), buffer.row_bytes, buffer.pages,
                         buffer.rows_of_page(m.page_size), buffer.pitch_of(m.page_size)});
    }
    json aux = json::array();
    for (const AuxShape& field : m.aux) {
      aux.push_back({field.name, field.width, field.slots});
    }
    return {
        {"op", "rank_up"}, {"rank", m.rank}, {"page_size", m.page_size}, {"buffers", buffers}, {"aux", aux}};
  }
  json operator()(const message::RankGone& m) const { return {{"op", "rank_gone"}, {"rank", m.rank}}; }
  json operator()(const message::Grant& m) const {
    json out = key_json(m.key);
    out["op"] = "grant";
    out["targets"] = pack_words(m.targets);
    out["prefill_dp"] = m.prefill_dp;
    out["pages"] = pack_words(m.pages);
    out["prefix"] = m.prefix;
    out["tokens"] = m.tokens;
    out["has_aux"] = m.has_aux;
    out["aux_slot"] = m.aux_slot;
    out["window_pages"] = pack_words(m.hybrid.window_pages);
    out["window_first"] = m.hybrid.window_first;
    out["has_state"] = m.hybrid.state_slot.has_value();
    out["state_slot"] = m.hybrid.state_slot.value_or(0);
    out["verify"] = m.verify;
    return out;
  }
  json operator()(const message::Stop& m) const {
    json out = key_json(m.key);
    out["op"] = "stop";
    out["targets"] = pack_words(m.targets);
    out["code"] = static_cast<int>(m.code);
    out["reason"] = cut_text(m.reason, kTextMax);
    return out;
  }
  json operator()(const message::Landed& m) const {
    json out = key_json(m.key);
    out["op"] = "landed";
    return out;
  }
  json operator()(const message::FabricStatus& m) const {
    return {{"op", "fabric"}, {"kind", m.kind}, {"carries", cut_text(m.carries, kTextMax)}};
  }
  json operator()(const message::TransferFailed& m) const {
    json out = key_json(m.key.grant);
    out["op"] = "failed";
    out["prefill_rank"] = m.key.prefill_rank;
    out["code"] = static_cast<int>(m.code);
    out["reason"] = cut_text(m.reason, kTextMax);
    return out;
  }
  json operator()(const message::TransferDrained& m) const {
    json out = key_json(m.key.grant);
    out["op"] = "drained";
    out["prefill_rank"] = m.key.prefill_rank;
    return out;
  }
  json operator()(const message::TransferDigest& m) const {
    json out = key_json(m.key.grant);
    out["op"] = "digest";
    out["prefill_rank"] = m.key.prefill_rank;
    out["tokens_end"] = m.tokens_end;
    out["layers"] = pack_words(m.digest.layers);
    out["columns"] = m.digest.columns;
    std::vector<std::uint32_t> halves;
    halves.reserve(m.digest.sums.size() * 2);
    for (const std::uint64_t sum : m.digest.sums) {
      halves.push_back(static_cast<std::uint32_t>(sum));
      halves.push_back(static_cast<std::uint32_t>(sum >> 32));
    }
    out["sums"] = pack_words(halves);
    return out;
  }
  json operator()(const message::Heartbeat& m) const {
    return {{"op", "heartbeat"}, {"sequence", m.sequence}};
  }
};

// Reads fields of one message; the first problem sticks and every later read is harmless.
class Fields {
 public:
  Fields(const json& object, std::string op) : object_(object), op_(std::move(op)) {}

  std::uint64_t number(const char* name, std::uint64_t max) {
    const json* value = find(name);
    if (value == nullptr || !value->is_number_integer() ||
        (value->is_number_integer() && !value->is_number_unsigned()) || value->get<std::uint64_t>() > max) {
      return problem(name, fmt::format("a whole number up to {}", max)), 0;
    }
    return value->get<std::uint64_t>();
  }
  std::uint32_t u32(const char* name) { return static_cast<std::uint32_t>(number(name, UINT32_MAX)); }
  bool flag(const char* name) {
    const json* value = find(name);
    if (value == nullptr || !value->is_boolean()) {
      return problem(name, "true or false"), false;
    }
    return value->get<bool>();
  }
  std::string text(const char* name) {
    const json* value = find(name);
    if (value == nullptr || !value->is_string() || value->get_ref<const std::string&>().size() > kTextMax) {
      return problem(name, fmt::format("a text of at most {} bytes", kTextMax)), "";
    }
    return clean_text(value->get_ref<const std::string&>());
  }
  std::vector<std::uint32_t> words(const char* name, std::size_t max) {
    std::vector<std::uint32_t> out;
    const json* value = find(name);
    if (value == nullptr || !value->is_binary() || value->get_binary().size() % 4 != 0 ||
        value->get_binary().size() / 4 > max) {
      problem(name, fmt::format("packed words, at most {}", max));
      return out;
    }
    const auto& bytes = value->get_binary();
    out.resize(bytes.size() / 4);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::uint32_t>(bytes[4 * i]) | static_cast<std::uint32_t>(bytes[4 * i + 1]) << 8 |
               static_cast<std::uint32_t>(bytes[4 * i + 2]) << 16 |
               static_cast<std::uint32_t>(bytes[4 * i + 3]) << 24;
    }
    return out;
  }
  RankIndex rank(const char* name) { return static_cast<RankIndex>(number(name, kRanksMax - 1)); }
  std::vector<RankIndex> ranks(const char* name) { return words(name, kRanksMax); }
  const json& list(const char* name, std::size_t max) {
    static const json kEmpty = json::array();
    const json* value = find(name);
    if (value == nullptr || !value->is_array() || value->size() > max) {
      problem(name, fmt::format("a list of at most {} items", max));
      return kEmpty;
    }
    return *value;
  }
  GrantKey key() {
    GrantKey out;
    out.room = number("room", kRoomMax);
    if (out.room == 0) {
      problem("room", "from 1 to 2^63-1");
    }
    out.generation = number("generation", UINT64_MAX);
    out.decode_rank = rank("decode_rank");
    return out;
  }
  Code code() { return code_from_number(static_cast<std::uint8_t>(number("code", 255))); }
  void problem(const char* name, const std::string& expected) {
    if (error_.empty()) {
      error_ = fmt::format("control message '{}': field '{}' must be {}", op_, name, expected);
    }
  }
  const std::string& error() const { return error_; }

 private:
  const json* find(const char* name) {
    const auto found = object_.find(name);
    return found == object_.end() ? nullptr : &*found;
  }
  const json& object_;
  std::string op_;
  std::string error_;
};

bool is_u64(const json& value, std::uint64_t max) {
  return value.is_number_unsigned() && value.get<std::uint64_t>() <= max;
}

message::RankUp read_rank_up(Fields& in) {
  message::RankUp out;
  out.rank = in.rank("rank");
  out.page_size = static_cast<std::uint32_t>(in.number("page_size", 65536));
  for (const json& item : in.list("buffers", kBuffersMax)) {
    if (!item.is_array() || item.size() != 6 || !is_u64(item[0], UINT32_MAX) ||
        !is_u64(item[1], kBufferKinds - 1) || !is_u64(item[2], UINT32_MAX) ||
        !is_u64(item[3], std::uint64_t{1} << 40) || !is_u64(item[4], UINT32_MAX) ||
        !is_u64(item[5], UINT32_MAX)) {
      in.problem("buffers", "a list of [layer, kind, row_bytes, pages, page_rows, pitch]");
      break;
    }
    out.buffers.push_back({item[0].get<std::uint32_t>(),
                           static_cast<BufferKind>(item[1].get<std::uint32_t>()),
                           item[2].get<std::uint32_t>(), item[3].get<std::uint64_t>(),
                           item[4].get<std::uint32_t>(), item[5].get<std::uint32_t>()});
  }
  for (const json& item : in.list("aux", kAuxMax)) {
    if (!item.is_array() || item.size() != 3 || !item[0].is_string() ||
        item[0].get_ref<const std::string&>().size() > 128 ||
        !is_clean_text(item[0].get_ref<const std::string&>()) || !is_u64(item[1], 1u << 24) ||
        !is_u64(item[2], 1u << 24)) {
      in.problem("aux", "a list of [name, width, slots]");
      break;
    }
    out.aux.push_back(
        {item[0].get<std::string>(), item[1].get<std::uint32_t>(), item[2].get<std::uint32_t>()});
  }
  return out;
}

message::Grant read_grant(Fields& in) {
  message::Grant out;
  out.key = in.key();
  out.targets = in.ranks("targets");
  out.prefill_dp = in.u32("prefill_dp");
  out.pages = in.words("pages", std::size_t{1} << 22);
  out.prefix = in.number("prefix", kRoomMax);
  out.tokens = in.number("tokens", std::uint64_t{1} << 40);
  out.has_aux = in.flag("has_aux");
  out.aux_slot = in.u32("aux_slot");
  out.hybrid.window_pages = in.words("window_pages", std::size_t{1} << 22);
  out.hybrid.window_first = in.number("window_first", std::uint64_t{1} << 40);
  const std::uint32_t slot = in.u32("state_slot");
  if (in.flag("has_state")) {
    out.hybrid.state_slot = slot;
  }
  out.verify = in.u32("verify");
  if (out.prefix > out.tokens) {
    in.problem("prefix", fmt::format("at most tokens={}, is {}", out.tokens, out.prefix));
  }
  return out;
}

message::TransferDigest read_digest(Fields& in) {
  message::TransferDigest out;
  out.key.grant = in.key();
  out.key.prefill_rank = in.rank("prefill_rank");
  out.tokens_end = in.number("tokens_end", std::uint64_t{1} << 40);
  out.digest.layers = in.words("layers", kBuffersMax);
  out.digest.columns = static_cast<std::size_t>(in.number("columns", kColumnsMax));
  const std::vector<std::uint32_t> halves = in.words("sums", 2 * kBuffersMax * kColumnsMax);
  if (!std::is_sorted(out.digest.layers.begin(), out.digest.layers.end(), std::less_equal<>())) {
    in.problem("layers", "ascending");
  }
  if (halves.size() != 2 * out.digest.layers.size() * out.digest.columns) {
    in.problem("sums", fmt::format("{} sums of 8 bytes, one for each layer and column",
                                   out.digest.layers.size() * out.digest.columns));
    return out;
  }
  for (std::size_t i = 0; i < halves.size(); i += 2) {
    out.digest.sums.push_back(halves[i] | std::uint64_t{halves[i + 1]} << 32);
  }
  return out;
}

}  // namespace

std::string encode(const ControlMessage& message) {
  const json document = std::visit(Encoder{}, message);
  std::string out;
  json::to_msgpack(document, out);
  return out;
}

Result<ControlMessage> decode_control(std::string_view bytes) {
  KVF_TRY(const std::uint32_t entries,
          check_msgpack_map(std::as_bytes(std::span(bytes)), kLimits, "control message"));
  const json document = json::from_msgpack(bytes, /*strict=*/true, /*allow_exceptions=*/false);
  if (!document.is_object()) {
    return fail(Code::kProtocol, "control message of {} bytes is not a MessagePack map with text keys",
                bytes.size());
  }
  if (document.size() != entries) {
    return fail(Code::kProtocol, "control message repeats a key: {} entries, {} different keys", entries,
                document.size());
  }
  const auto op_field = document.find("op");
  if (op_field == document.end() || !op_field->is_string()) {
    return fail(Code::kProtocol, "control message has no text field 'op'");
  }
  const std::string op = op_field->get<std::string>();
  const std::string shown = clean_text(cut_text(op, 32));
  Fields in(document, shown);
  ControlMessage out;
  if (op == "rank_up") {
    out = read_rank_up(in);
  } else if (op == "rank_gone") {
    out = message::RankGone{in.rank("rank")};
  } else if (op == "grant") {
    out = read_grant(in);
  } else if (op == "stop") {
    out = message::Stop{in.key(), in.ranks("targets"), in.code(), in.text("reason")};
  } else if (op == "landed") {
    out = message::Landed{in.key()};
  } else if (op == "fabric") {
    out = message::FabricStatus{in.text("kind"), in.text("carries")};
  } else if (op == "failed") {
    const GrantKey key = in.key();
    out = message::TransferFailed{{key, in.rank("prefill_rank")}, in.code(), in.text("reason")};
  } else if (op == "drained") {
    const GrantKey key = in.key();
    out = message::TransferDrained{{key, in.rank("prefill_rank")}};
  } else if (op == "digest") {
    out = read_digest(in);
  } else if (op == "heartbeat") {
    out = message::Heartbeat{in.number("sequence", UINT64_MAX)};
  } else {
    return fail(Code::kProtocol, "control message '{}' is unknown to this version", shown);
  }
  if (!in.error().empty()) {
    return fail(Code::kProtocol, "{}", in.error());
  }
  return out;
}

}  // namespace kvferry
