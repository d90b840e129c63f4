#include "tools/cli/bench/bench_side.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>

#include "common/base/narrow.h"
#include "tools/cli/bench/parallel.h"

namespace kvferry {

std::vector<BenchRoom> place_rooms(const DemoLayout& layout, const BenchCell& cell, std::uint32_t waves) {
  std::vector<BenchRoom> rooms;
  std::array<std::uint32_t, 2> next{};
  const auto place = [&](std::uint64_t tokens) {
    rooms.push_back({narrow<std::uint32_t>(rooms.size()), tokens, next});
    for (const Side side : {Side::kPrefill, Side::kDecode}) {
      next[static_cast<std::size_t>(side)] += narrow<std::uint32_t>(layout.pages_for(side, tokens));
    }
  };
  for (std::uint32_t wave = 0; wave < waves; ++wave) {
    if (cell.beside > 0) {
      place(cell.beside);
    }
    for (std::uint32_t room = 0; room < cell.rooms; ++room) {
      place(cell.tokens);
    }
  }
  return rooms;
}

Result<BenchSide> BenchSide::create(const DemoLayout& layout, Side side, std::uint32_t pages,
                                    std::uint32_t slots, std::uint64_t seed) {
  BenchSide out(side, layout.page_size(side));
  const Topology& topology = layout.topology(side);
  std::mt19937_64 random(seed + static_cast<std::uint64_t>(side));
  for (RankIndex index = 0; index < topology.rank_count(); ++index) {
    KVF_TRY(RankRows rows, RankRows::create(layout.model, topology, index, out.page_size_, pages));
    KVF_TRY(RankMemory memory, RankMemory::create(rows, slots));
    std::vector<std::uint32_t> order(pages);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random);
    out.ranks_.push_back({std::move(rows), std::move(memory), topology.coord(index), std::move(order)});
  }
  return out;
}

std::span<const std::uint32_t> BenchSide::pages(const BenchRank& rank, const BenchRoom& room) const {
  return std::span(rank.order)
      .subspan(room.first_page[static_cast<std::size_t>(side_)], rank.rows.pages_for(0, room.tokens));
}

RoomRows BenchSide::rows(const BenchRank& rank, const BenchRoom& room) const {
  return {.room = Room{room.slot} + 1, .first = 0, .end = room.tokens, .pages = pages(rank, room)};
}

template <class Work>
void BenchSide::for_each_buffer(const Work& work) const {
  std::vector<std::pair<const BenchRank*, std::uint32_t>> buffers;
  for (const BenchRank& rank : ranks_) {
    for (std::uint32_t buffer = 0; buffer < rank.rows.buffers().size(); ++buffer) {
      buffers.emplace_back(&rank, buffer);
    }
  }
  for_each_index(buffers.size(), std::max(1u, std::thread::hardware_concurrency()),
                 [&](std::size_t i) { work(*buffers[i].first, buffers[i].second); });
}

void BenchSide::fill(std::span<const BenchRoom> rooms) {
  for_each_buffer([&](const BenchRank& rank, std::uint32_t buffer) {
    for (const BenchRoom& room : rooms) {
      rank.rows.fill(rank.memory.buffer(buffer), buffer, rows(rank, room), {0, room.tokens});
    }
  });
}

void BenchSide::poison(std::span<const BenchRoom> rooms) {
  for_each_buffer([&](const BenchRank& rank, std::uint32_t buffer) {
    for (const BenchRoom& room : rooms) {
      rank.rows.fill_guard(rank.memory.buffer(buffer), buffer, rows(rank, room));
    }
  });
  for (const BenchRank& rank : ranks_) {
    for (const BenchRoom& room : rooms) {
      clear_aux(rank.memory, room.slot);
    }
  }
}

BenchCheck BenchSide::check(std::span<const BenchRoom> rooms) const {
  BenchCheck all;
  std::mutex mutex;  // of `all`
  for_each_buffer([&](const BenchRank& rank, std::uint32_t buffer) {
    BenchCheck mine;
    for (const BenchRoom& room : rooms) {
      const RowReport report = rank.rows.check(rank.memory.buffer(buffer), buffer, rows(rank, room));
      mine.compared += report.compared;
      mine.differing += report.differing;
      if (!report.first.empty() && mine.first.empty()) {
        const Mismatch& at = report.first.front();
        mine.first = fmt::format("rank {} layer {} {}{} page {} slot {} byte {}: must be {:#04x}, is {:#04x}",
                                 at.rank, at.layer, to_string(at.kind),
                                 at.guard ? std::string(", a row that nobody may write,")
                                          : fmt::format(" position {} head {}", at.position, at.head),
                                 at.page, at.slot, at.byte, static_cast<unsigned>(at.expected),
                                 static_cast<unsigned>(at.found));
      }
    }
    const std::lock_guard lock(mutex);
    all.compared += mine.compared;
    all.differing += mine.differing;
    if (all.first.empty()) {
      all.first = mine.first;
    }
  });
  return all;
}

}  // namespace kvferry
