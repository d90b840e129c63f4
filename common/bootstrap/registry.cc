#include "common/bootstrap/registry.h"

#include <algorithm>
#include <unordered_set>

#include "common/base/host_port.h"

namespace kvferry {
namespace {

struct SizedRank {
  std::string_view name;
  std::uint32_t rank;
  std::uint32_t size;
};

Result<void> check_ranks(const RouteRegistration& r) {
  const SizedRank pairs[] = {{"attn_tp", r.attn_tp_rank, r.attn_tp_size},
                             {"attn_cp", r.attn_cp_rank, r.attn_cp_size},
                             {"attn_dp", r.attn_dp_rank, r.attn_dp_size},
                             {"pp", r.pp_rank, r.pp_size},
                             {"system_dp", r.system_dp_rank, r.system_dp_size}};
  for (const SizedRank& pair : pairs) {
    if (pair.rank >= pair.size) {
      return fail(Code::kInvalid, "{}_rank {} is not below {}_size {}", pair.name, pair.rank, pair.name,
                  pair.size);
    }
  }
  return {};
}

Result<void> check_address(const RouteRegistration& r) {
  // With a port of its own the text would be taken for a host by nobody: the caller's rank_port is the port.
  const auto parsed = parse_host_port(r.rank_ip, 1);
  if (!parsed) {
    return fail(Code::kInvalid, "rank_ip: {}", parsed.error().message);
  }
  if (r.rank_ip != parsed->host && r.rank_ip != "[" + parsed->host + "]") {
    return fail(Code::kInvalid, "rank_ip '{}' carries a port; put the port into rank_port", r.rank_ip);
  }
  if (r.rank_port == 0) {
    return fail(Code::kInvalid, "rank_port 0 is not a port; expected 1 to 65535");
  }
  return {};
}

RouteTopology topology_of(const RouteRegistration& r) {
  return {.attn_tp_size = r.attn_tp_size,
          .attn_cp_size = r.attn_cp_size,
          .dp_size = r.system_dp_size == 1 ? r.attn_dp_size : r.system_dp_size,
          .pp_size = r.pp_size,
          .page_size = r.page_size,
          .kv_cache_dtype = r.kv_cache_dtype,
          .follow_bootstrap_room = r.load_balance_method == "follow_bootstrap_room",
          .enable_dsa_cache_layer_split = r.enable_dsa_cache_layer_split,
          .prefill_http_port = r.prefill_http_port};
}

RankPlace place_of(const RouteRegistration& r) {
  return {.dp = r.system_dp_size == 1 ? r.attn_dp_rank : r.system_dp_rank,
          .cp = r.attn_cp_rank,
          .tp = r.attn_tp_rank,
          .pp = r.pp_rank};
}

/// dp*cp*tp*pp, or anything above `maximum` when it is larger; cannot overflow for maximum < 2^32.
std::uint64_t table_size(const RouteTopology& t, std::uint64_t maximum) {
  std::uint64_t product = 1;
  for (const std::uint32_t size : {t.dp_size, t.attn_cp_size, t.attn_tp_size, t.pp_size}) {
    product *= size;
    if (product > maximum) {
      break;
    }
  }
  return product;
}

bool inside(const RankPlace& place, const RouteTopology& t) {
  return place.dp < t.dp_size && place.cp < t.attn_cp_size && place.tp < t.attn_tp_size &&
         place.pp < t.pp_size;
}

std::vector<std::string> differing(const RouteTopology& first, const RouteTopology& own) {
  std::vector<std::string> out;
  const auto note = [&out](bool differs, const char* name) {
    if (differs) {
      out.emplace_back(name);
    }
  };
  note(first.attn_tp_size != own.attn_tp_size, "attn_tp_size");
  note(first.attn_cp_size != own.attn_cp_size, "attn_cp_size");
  note(first.dp_size != own.dp_size, "dp_size");
  note(first.pp_size != own.pp_size, "pp_size");
  note(first.page_size != own.page_size, "page_size");
  note(first.kv_cache_dtype != own.kv_cache_dtype, "kv_cache_dtype");
  note(first.follow_bootstrap_room != own.follow_bootstrap_room, "load_balance_method");
  note(first.enable_dsa_cache_layer_split != own.enable_dsa_cache_layer_split,
       "enable_dsa_cache_layer_split");
  note(first.prefill_http_port != own.prefill_http_port, "prefill_http_port");
  return out;
}

std::string sizes_text(const RouteTopology& t) {
  return fmt::format("dp {} cp {} tp {} pp {}", t.dp_size, t.attn_cp_size, t.attn_tp_size, t.pp_size);
}

std::string place_text(const RankPlace& place) {
  return fmt::format("dp {} cp {} tp {} pp {}", place.dp, place.cp, place.tp, place.pp);
}

/// Whether more than `span` passed, without overflow for any two instants.
bool older_than(std::int64_t since, std::int64_t now, std::int64_t span) {
  return now > since && static_cast<std::uint64_t>(now) - static_cast<std::uint64_t>(since) >
                            static_cast<std::uint64_t>(std::max<std::int64_t>(span, 0));
}

}  // namespace

Result<Registry::Accepted> Registry::put_route(const RouteRegistration& registration, std::int64_t now) {
  KVF_TRY_VOID(check_ranks(registration));
  KVF_TRY_VOID(check_address(registration));
  const RouteTopology own = topology_of(registration);
  if (const std::uint64_t size = table_size(own, options_.ranks_max); size > options_.ranks_max) {
    return fail(Code::kInvalid, "the sizes {} give more than the {} ranks allowed", sizes_text(own),
                options_.ranks_max);
  }
  const RankPlace place = place_of(registration);
  const RankAddress address{registration.rank_ip, registration.rank_port};

  // A new fleet with another layout: whatever is left of the old one is silent for a lease, or is this rank.
  if (topology_ && !differing(*topology_, own).empty() && all_replaceable(address, now)) {
    places_.clear();
    topology_.reset();
  }
  if (topology_ && !inside(place, *topology_)) {
    return fail(Code::kConflict, "rank {} of {}:{} lies outside the table of {} that the first rank opened",
                place_text(place), address.ip, address.port, sizes_text(*topology_));
  }
  Accepted accepted;
  if (const auto held = places_.find(place); held != places_.end() && held->second.address != address) {
    if (!older_than(held->second.refreshed_ns, now, options_.lease_ns)) {
      return fail(
          Code::kConflict,
          "rank {} is held by {}:{} and cannot be taken by {}:{}; give the new process its own DP rank, "
          "or stop the old one and register again after {} s",
          place_text(place), held->second.address.ip, held->second.address.port, address.ip, address.port,
          options_.lease_ns / 1'000'000'000);
    }
    accepted.replaced = true;
  }
  if (topology_) {
    accepted.kept_first = differing(*topology_, own);
  } else {
    topology_ = own;
  }
  places_[place] = Place{address, now};
  return accepted;
}

bool Registry::all_replaceable(const RankAddress& by, std::int64_t now) const {
  return std::all_of(places_.begin(), places_.end(), [&](const auto& entry) {
    return entry.second.address == by || older_than(entry.second.refreshed_ns, now, options_.lease_ns);
  });
}

std::size_t Registry::expected() const {
  return topology_ ? table_size(*topology_, options_.ranks_max) : 0;
}

bool Registry::ready() const {
  return topology_.has_value() && places_.size() >= expected();
}

Result<RankAddress> Registry::rank(const RankPlace& place) const {
  const auto found = places_.find(place);
  if (found == places_.end()) {
    return fail(Code::kNotFound, "rank {} is not registered; the table has {}", place_text(place),
                topology_ ? sizes_text(*topology_) : "no ranks yet");
  }
  return found->second.address;
}

void Registry::refresh(const RankAddress& address, std::int64_t now) {
  for (auto& [place, entry] : places_) {
    if (entry.address == address) {
      entry.refreshed_ns = std::max(entry.refreshed_ns, now);
    }
  }
}

std::size_t Registry::mark_gone(const RankAddress& address) {
  const std::size_t removed =
      std::erase_if(places_, [&](const auto& entry) { return entry.second.address == address; });
  if (places_.empty()) {
    topology_.reset();
  }
  return removed;
}

void Registry::drop_old_rooms(std::int64_t now) {
  while (!room_order_.empty() && older_than(room_order_.front().stored_ns, now, options_.room_interval_ns)) {
    room_index_.erase(room_order_.front().room);
    room_order_.pop_front();
  }
  swept_ns_ = now;
}

Result<void> Registry::register_dp_rank(Room room, std::uint32_t dp_rank, std::int64_t now) {
  if (room > kRoomMax) {
    return fail(Code::kInvalid, "bootstrap_room {} is above {}", room, kRoomMax);
  }
  if (topology_ && dp_rank >= topology_->dp_size) {
    return fail(Code::kInvalid, "dp_rank {} is not below dp_size {}", dp_rank, topology_->dp_size);
  }
  const auto known = room_index_.find(room);
  if (older_than(swept_ns_, now, options_.room_interval_ns) ||
      (known == room_index_.end() && room_order_.size() >= options_.rooms_max)) {
    drop_old_rooms(now);
  }
  if (const auto entry = room_index_.find(room); entry != room_index_.end()) {
    room_order_.erase(entry->second);
    room_index_.erase(entry);
  }
  if (room_order_.size() >= options_.rooms_max) {
    return fail(Code::kExhausted, "the room table holds {} of {} rooms; entries live {} s or longer",
                room_order_.size(), options_.rooms_max, options_.room_interval_ns / 1'000'000'000);
  }
  room_order_.push_back(RoomEntry{room, dp_rank, now});
  room_index_[room] = std::prev(room_order_.end());
  return {};
}

std::vector<std::pair<Room, std::uint32_t>> Registry::query_dp_ranks(const std::vector<Room>& rooms,
                                                                     std::int64_t now) {
  if (older_than(swept_ns_, now, options_.room_interval_ns)) {
    drop_old_rooms(now);
  }
  std::vector<std::pair<Room, std::uint32_t>> out;
  std::unordered_set<Room> asked;
  for (const Room room : rooms) {
    const auto entry = room_index_.find(room);
    if (entry != room_index_.end() && asked.insert(room).second) {
      out.emplace_back(room, entry->second->dp_rank);
    }
  }
  return out;
}

}  // namespace kvferry
