#pragma once
// The identities that travel between daemons and engines.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvferry {

/// The 63-bit id that a router gives to one request (`bootstrap_room`). 0 means "not written" in the aux row
/// and is not legal; values above 2^63-1 do not survive int64 peers.
using Room = std::uint64_t;
inline constexpr Room kRoomMax = (Room{1} << 63) - 1;
constexpr bool room_is_legal(Room room) {
  return room >= 1 && room <= kRoomMax;
}

/// Distinguishes two uses of the same room. Given by the decode daemon, never reused within its epoch.
using Generation = std::uint64_t;

/// Random id of one life of a daemon.
using Epoch = std::uint64_t;

/// A rank's position in its side's whole topology (see Topology::rank_index), not in its host.
using RankIndex = std::uint32_t;

/// One daemon's handle for one connected peer daemon. Local, never on the wire.
using PeerId = std::uint32_t;

/// What one decode rank granted for one room: the unit of opening and closing destination pages.
struct GrantKey {
  Room room = 0;
  Generation generation = 0;
  RankIndex decode_rank = 0;
  friend auto operator<=>(const GrantKey&, const GrantKey&) = default;
};

/// Everything for one room between one prefill rank and one decode rank.
struct TransferKey {
  GrantKey grant;
  RankIndex prefill_rank = 0;
  friend auto operator<=>(const TransferKey&, const TransferKey&) = default;
};

}  // namespace kvferry

template <>
struct std::hash<kvferry::GrantKey> {
  std::size_t operator()(const kvferry::GrantKey& key) const noexcept {
    // Generations are unique within an epoch, so they alone nearly are a perfect hash.
    return static_cast<std::size_t>(key.generation * 0x9E3779B97F4A7C15ull ^ key.room ^ key.decode_rank);
  }
};
template <>
struct std::hash<kvferry::TransferKey> {
  std::size_t operator()(const kvferry::TransferKey& key) const noexcept {
    return std::hash<kvferry::GrantKey>{}(key.grant) * 31 + key.prefill_rank;
  }
};
