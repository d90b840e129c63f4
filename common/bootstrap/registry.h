#pragma once
// SGLang's bootstrap table as a value: which prefill rank listens where, and which DP rank has which room.
// Meaning and answers follow SGLang's bootstrap server, except that a rank is counted once however often it
// registers, and that a live rank's place cannot be taken from another address. Pure: no socket, no clock
// (`now` is monotonic nanoseconds, and must not go backwards to have an effect). One thread.
//
// A place is live from its PUT until mark_gone(). SGLang's ranks register once and never refresh, so an old
// place still counts and still answers; the lease only says when another address may take it over.

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/ids.h"
#include "common/base/result.h"

namespace kvferry {

struct RegistryOptions {
  std::int64_t lease_ns = 30'000'000'000;           // a place not refreshed for longer may be taken over
  std::int64_t room_interval_ns = 120'000'000'000;  // room entries live one to two intervals
  std::size_t rooms_max = 1U << 20;                 // room entries; more are refused (kExhausted)
  std::size_t ranks_max = 65536;                    // dp*cp*tp*pp of the table
};

/// Body of PUT /route.
struct RouteRegistration {
  std::uint32_t attn_tp_size = 1;
  std::uint32_t attn_tp_rank = 0;
  std::uint32_t attn_cp_size = 1;
  std::uint32_t attn_cp_rank = 0;
  std::uint32_t attn_dp_size = 1;
  std::uint32_t attn_dp_rank = 0;
  std::uint32_t pp_size = 1;
  std::uint32_t pp_rank = 0;
  std::uint32_t system_dp_size = 1;
  std::uint32_t system_dp_rank = 0;
  std::string rank_ip;  // IPv4, IPv6 (bare or in brackets) or a name; given back as it came
  std::uint16_t rank_port = 0;
  std::uint32_t page_size = 1;
  std::optional<std::string> kv_cache_dtype;
  std::string load_balance_method = "follow_bootstrap_room";
  bool enable_dsa_cache_layer_split = false;
  std::optional<std::uint16_t> prefill_http_port;
};

/// Where a rank listens.
struct RankAddress {
  std::string ip;
  std::uint16_t port = 0;
  friend auto operator<=>(const RankAddress&, const RankAddress&) = default;
};

/// A place in the table.
struct RankPlace {
  std::int64_t dp = 0;
  std::int64_t cp = 0;
  std::int64_t tp = 0;
  std::int64_t pp = 0;
  friend auto operator<=>(const RankPlace&, const RankPlace&) = default;
};

/// What GET /route with four times -1 answers. Every value is that of the first rank that registered.
struct RouteTopology {
  std::uint32_t attn_tp_size = 0;
  std::uint32_t attn_cp_size = 0;
  std::uint32_t dp_size = 0;
  std::uint32_t pp_size = 0;
  std::uint32_t page_size = 0;
  std::optional<std::string> kv_cache_dtype;
  bool follow_bootstrap_room = true;
  bool enable_dsa_cache_layer_split = false;
  std::optional<std::uint16_t> prefill_http_port;
  friend bool operator==(const RouteTopology&, const RouteTopology&) = default;
};

class Registry {
 public:
  explicit Registry(RegistryOptions options) : options_(options) {}

  struct Accepted {
    bool replaced = false;                // took over the place of another address
    std::vector<std::string> kept_first;  // fields whose first value stays although this rank says another
  };
  /// kInvalid: a rank outside its size, a bad address, too many ranks. kConflict: another address holds the
  /// place and is live, or the rank lies outside the table that the first rank opened.
  Result<Accepted> put_route(const RouteRegistration& registration, std::int64_t now);

  /// All ranks of the table are present.
  bool ready() const;
  std::size_t registered() const { return places_.size(); }
  /// The size of the table; 0 before the first rank.
  std::size_t expected() const;

  /// nullopt before the first rank.
  const std::optional<RouteTopology>& topology() const { return topology_; }
  /// kNotFound names the place and the sizes of the table.
  Result<RankAddress> rank(const RankPlace& place) const;

  /// The rank at `address` showed life: its places cannot be taken over for another lease.
  void refresh(const RankAddress& address, std::int64_t now);
  /// The rank at `address` is gone: its places are free. Returns how many. The last one to go takes the
  /// table's sizes along, so that a restarted fleet may have another layout.
  std::size_t mark_gone(const RankAddress& address);

  /// Room -> DP rank. kInvalid: room above 2^63-1, or a DP rank outside the table. kExhausted: table full.
  Result<void> register_dp_rank(Room room, std::uint32_t dp_rank, std::int64_t now);
  /// Pairs for those of `rooms` that are known, in their order, each room once.
  std::vector<std::pair<Room, std::uint32_t>> query_dp_ranks(const std::vector<Room>& rooms,
                                                             std::int64_t now);
  std::size_t rooms() const { return room_order_.size(); }

 private:
  struct Place {
    RankAddress address;
    std::int64_t refreshed_ns = 0;
  };
  struct RoomEntry {
    Room room = 0;
    std::uint32_t dp_rank = 0;
    std::int64_t stored_ns = 0;
  };

  bool all_replaceable(const RankAddress& by, std::int64_t now) const;
  void drop_old_rooms(std::int64_t now);

  RegistryOptions options_;
  std::optional<RouteTopology> topology_;
  std::map<RankPlace, Place> places_;
  std::list<RoomEntry> room_order_;  // oldest first
  std::unordered_map<Room, std::list<RoomEntry>::iterator> room_index_;
  std::int64_t swept_ns_ = 0;
};

}  // namespace kvferry
