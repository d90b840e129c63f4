#include "common/bootstrap/routes.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "common/handshake/json_reader.h"

namespace kvferry {
namespace {

using nlohmann::json;
// Keeps the documented order of the keys, so that answers compare as text.
using OrderedJson = nlohmann::ordered_json;

constexpr std::uint32_t kSizeMax = 65536;
constexpr std::size_t kTextMax = 255;

BootstrapResponse text_response(int status, std::string body) {
  return {
      .status = status, .content_type = "text/plain; charset=utf-8", .body = std::move(body), .allow = {}};
}

template <class Json>
BootstrapResponse json_response(const Json& body) {
  return {.status = 200,
          .content_type = "application/json; charset=utf-8",
          .body = body.dump(-1, ' ', false, Json::error_handler_t::replace),
          .allow = {}};
}

BootstrapResponse refused(const Error& error) {
  return text_response(http_status(error.code), error.message);
}

BootstrapResponse wrong_method(std::string_view method, std::string_view path, std::string_view allow) {
  BootstrapResponse out = text_response(
      405, fmt::format("Method not allowed: {} {}; use {}", brief(std::string(method)), path, allow));
  out.allow = std::string(allow);
  return out;
}

/// A number, null or absent.
std::optional<std::uint16_t> optional_port(JsonObject& object, std::string_view key) {
  const json* value = object.find(key, false);
  if (value == nullptr || value->is_null()) {
    return std::nullopt;
  }
  return static_cast<std::uint16_t>(object.number_or_text(key, 1, 65535));
}

Result<RouteRegistration> parse_registration(std::string_view body) {
  KVF_TRY(const json document,
          parse_outside_json(body, BootstrapRoutes::kBodyBytesMax, "body of PUT /route"));
  JsonErrors errors;
  JsonObject object(document, "", errors);
  RouteRegistration out;
  out.attn_tp_size = object.number32("attn_tp_size", 1, kSizeMax);
  out.attn_tp_rank = object.number32("attn_tp_rank", 0, kSizeMax);
  out.attn_cp_size = object.number32("attn_cp_size", 1, kSizeMax);
  out.attn_cp_rank = object.number32("attn_cp_rank", 0, kSizeMax);
  out.attn_dp_size = object.number32("attn_dp_size", 1, kSizeMax);
  out.attn_dp_rank = object.number32("attn_dp_rank", 0, kSizeMax);
  out.pp_size = object.number32("pp_size", 1, kSizeMax);
  out.pp_rank = object.number32("pp_rank", 0, kSizeMax);
  out.system_dp_size = object.number32("system_dp_size", 1, kSizeMax);
  out.system_dp_rank = object.number32("system_dp_rank", 0, kSizeMax);
  out.rank_ip = object.text("rank_ip", 1, kTextMax);
  out.rank_port = static_cast<std::uint16_t>(object.number_or_text("rank_port", 1, 65535));
  out.page_size = static_cast<std::uint32_t>(object.number_or_text("page_size", 1, 1U << 20));
  if (const json* dtype = object.find("kv_cache_dtype", true); dtype != nullptr && !dtype->is_null()) {
    out.kv_cache_dtype = object.text("kv_cache_dtype", 0, kTextMax);
  }
  out.load_balance_method = object.text_or("load_balance_method", kTextMax, out.load_balance_method);
  out.enable_dsa_cache_layer_split = object.boolean_or("enable_dsa_cache_layer_split", false);
  out.prefill_http_port = optional_port(object, "prefill_http_port");
  if (!errors.empty()) {
    return fail(errors.error("PUT /route"));
  }
  return out;
}

/// Parameters in the order of RankPlace.
constexpr const char* kPlaceParameters[] = {"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank",
                                            "target_pp_rank"};

Result<RankPlace> parse_place(const BootstrapRoutes::Query& query) {
  std::int64_t values[4] = {};
  std::string missing;
  for (const char* name : kPlaceParameters) {
    const auto found = query.find(name);
    if (found == query.end() || found->second.empty()) {
      missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
  }
  if (!missing.empty()) {
    return fail(Code::kInvalid, "Missing inputs for bootstrap server: {}", missing);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    const std::string& text = query.at(kPlaceParameters[i]);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), values[i]);
    if (error != std::errc{} || end != text.data() + text.size()) {
      return fail(Code::kInvalid, "{} is not an integer: {}", kPlaceParameters[i], brief(text));
    }
  }
  return RankPlace{.dp = values[0], .cp = values[1], .tp = values[2], .pp = values[3]};
}

// Exactly the documented keys: SGLang's decode side builds its record from them, and one more makes it fail.
OrderedJson topology_json(const RouteTopology& topology) {
  OrderedJson out;
  out["attn_tp_size"] = topology.attn_tp_size;
  out["attn_cp_size"] = topology.attn_cp_size;
  out["dp_size"] = topology.dp_size;
  out["pp_size"] = topology.pp_size;
  out["page_size"] = topology.page_size;
  out["kv_cache_dtype"] = nullptr;
  if (topology.kv_cache_dtype) {
    out["kv_cache_dtype"] = *topology.kv_cache_dtype;
  }
  out["follow_bootstrap_room"] = topology.follow_bootstrap_room;
  out["enable_dsa_cache_layer_split"] = topology.enable_dsa_cache_layer_split;
  out["prefill_http_port"] = nullptr;
  if (topology.prefill_http_port) {
    out["prefill_http_port"] = *topology.prefill_http_port;
  }
  return out;
}

}  // namespace

std::optional<BootstrapResponse> BootstrapRoutes::handle(std::string_view method, std::string_view path,
                                                         const Query& query, std::string_view body,
                                                         std::int64_t now) {
  if (path == "/route") {
    if (method == "PUT") {
      return put_route(body, now);
    }
    return method == "GET" ? get_route(query) : wrong_method(method, path, "GET, PUT");
  }
  if (path == "/health") {
    return method == "GET" ? text_response(200, "OK") : wrong_method(method, path, "GET");
  }
  if (path == "/register_dp_rank") {
    return method == "POST" ? register_dp_rank(body, now) : wrong_method(method, path, "POST");
  }
  if (path == "/query_dp_ranks") {
    return method == "POST" ? query_dp_ranks(body, now) : wrong_method(method, path, "POST");
  }
  return std::nullopt;
}

BootstrapResponse BootstrapRoutes::put_route(std::string_view body, std::int64_t now) {
  const auto registration = parse_registration(body);
  if (!registration) {
    return refused(registration.error());
  }
  const auto accepted = registry_.put_route(*registration, now);
  if (!accepted) {
    return refused(accepted.error());
  }
  values_kept_ += accepted->kept_first.size();
  return text_response(200, "OK");
}

BootstrapResponse BootstrapRoutes::get_route(const Query& query) {
  const auto place = parse_place(query);
  if (!place) {
    return refused(place.error());
  }
  if (!registry_.ready()) {
    return text_response(503,
                         fmt::format("Prefill server not fully registered yet: {} of {} workers registered",
                                     registry_.registered(), registry_.expected()));
  }
  if (*place == RankPlace{.dp = -1, .cp = -1, .tp = -1, .pp = -1}) {
    return json_response(topology_json(*registry_.topology()));
  }
  const auto address = registry_.rank(*place);
  if (!address) {
    return refused(address.error());
  }
  OrderedJson out;
  out["rank_ip"] = address->ip;
  out["rank_port"] = address->port;
  return json_response(out);
}

BootstrapResponse BootstrapRoutes::register_dp_rank(std::string_view body, std::int64_t now) {
  const auto document = parse_outside_json(body, kBodyBytesMax, "body of POST /register_dp_rank");
  if (!document) {
    return refused(document.error());
  }
  JsonErrors errors;
  JsonObject object(*document, "", errors);
  // Rooms are 63-bit numbers and come from peers that keep them exactly, so 2^53 is not their bound.
  const Room room = object.number("bootstrap_room", 0, kRoomMax);
  const std::uint32_t dp_rank = object.number32("dp_rank", 0, kSizeMax - 1);
  if (!errors.empty()) {
    return refused(errors.error("POST /register_dp_rank"));
  }
  const auto stored = registry_.register_dp_rank(room, dp_rank, now);
  return stored ? text_response(200, "OK") : refused(stored.error());
}

BootstrapResponse BootstrapRoutes::query_dp_ranks(std::string_view body, std::int64_t now) {
  const auto document = parse_outside_json(body, kBodyBytesMax, "body of POST /query_dp_ranks");
  if (!document) {
    return refused(document.error());
  }
  JsonErrors errors;
  JsonObject object(*document, "", errors);
  const json& values = object.array("bootstrap_rooms", kRoomsPerQuery);
  std::vector<Room> rooms;
  rooms.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto room = json_number(values[i], 0, kRoomMax);
    if (!room) {
      errors.add(element_path("bootstrap_rooms", i), room.error().message);
      continue;
    }
    rooms.push_back(*room);
  }
  if (!errors.empty()) {
    return refused(errors.error("POST /query_dp_ranks"));
  }
  json out = json::object();  // keys in text order: an ordered object would search all for each
  for (const auto& [room, dp_rank] : registry_.query_dp_ranks(rooms, now)) {
    out[std::to_string(room)] = dp_rank;
  }
  return json_response(out);
}

}  // namespace kvferry
