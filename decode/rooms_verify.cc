// Comparing what lies in the pool with what the sources meant to send, before anybody is told that a room has
// landed.

#include <algorithm>

#include "decode/rooms.h"

namespace kvferry::decode {
namespace {

DigestGrid grid_of(std::uint64_t prefix, std::uint64_t tokens) {
  DigestGrid grid;
  grid.tokens = {prefix, tokens};
  grid.range = digest_range(grid.tokens);
  return grid;
}

}  // namespace

// Called when all bytes have landed: reads the pool once every source's digest is there.
void Rooms::verify(const RoomKey& key, Entry& entry, Actions& out) {
  if (entry.verify != Entry::Verify::kWaiting ||
      !std::all_of(entry.sources.begin(), entry.sources.end(),
                   [](const Source& source) { return source.digest.has_value(); })) {
    return;
  }
  entry.verify = Entry::Verify::kReading;
  auto task = std::make_shared<DigestTask>();
  task->room = key.room;
  task->rate = options_.verify;
  task->grid = grid_of(entry.prefix, entry.tokens);
  task->model = model_;
  task->pool = ranks_.at(key.rank).pool;
  task->topology = options_.topology;
  task->coord = options_.topology.coord(key.rank);
  task->pages = entry.pages;
  task->window_pages = std::make_shared<const std::vector<std::uint32_t>>(entry.hybrid.window_pages);
  task->rows = {*task->pages, entry.prefix, *task->window_pages, entry.hybrid.window_first,
                entry.hybrid.state_slot};
  const std::uint64_t end = std::clamp(entry.sources.front().digest->tokens_end, entry.prefix, entry.tokens);
  task->tokens = {entry.prefix, end};
  const std::uint64_t window = window_of(options_.model.sliding_window, task->grid.tokens).begin;
  task->window = {window, std::max(window, end)};
  task->state = entry.hybrid.state_slot.has_value();
  out.push_back(VerifyRoom{entry.key, std::move(task)});
}

void Rooms::digest_done(Nanos now, const GrantKey& grant, const Digest& lies, Actions& out) {
  const RoomKey key{grant.room, grant.decode_rank};
  const auto at = entries_.find(key);
  if (at == entries_.end() || at->second.key != grant || at->second.verify != Entry::Verify::kReading) {
    return;  // the room ended meanwhile
  }
  Entry& entry = at->second;
  entry.verify = Entry::Verify::kDone;
  if (entry.failure) {
    return;
  }
  Digest sent{{}, lies.columns, {}};
  std::string wrong;
  for (const Source& source : entry.sources) {
    if (source.digest->digest.columns != lies.columns ||
        source.digest->tokens_end != entry.sources.front().digest->tokens_end) {
      wrong = fmt::format("prefill rank {} counted {} ranges of tokens up to {}, decode has {} up to {}",
                          source.rank, source.digest->digest.columns, source.digest->tokens_end, lies.columns,
                          entry.sources.front().digest->tokens_end);
      break;
    }
    add_digest(sent, source.digest->digest);
  }
  const DigestGrid grid = grid_of(entry.prefix, entry.tokens);
  if (const auto mismatch =
          wrong.empty() ? compare_digests(sent, lies, grid, options_.model.hidden_layers) : std::nullopt) {
    std::string ranks;
    for (const Source& source : entry.sources) {
      const std::vector<std::uint32_t>& layers = source.digest->digest.layers;
      if (mismatch->missing || std::binary_search(layers.begin(), layers.end(), mismatch->layer)) {
        ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", source.rank);
      }
    }
    wrong =
        mismatch->missing
            ? fmt::format("layer {} was sent by none of prefill ranks {}", mismatch->layer, ranks)
            : fmt::format(
                  "layer {}, tokens {} to {}: what lies in the pool of decode rank {} is not what prefill "
                  "ranks {} meant to send",
                  mismatch->layer, mismatch->tokens.begin, mismatch->tokens.end, key.rank, ranks);
  }
  if (!wrong.empty()) {
    begin_end(now, entry, Error{Code::kCorrupt, "wrong bytes: " + wrong}, out);
  }
  settle(now, key, out);
}

}  // namespace kvferry::decode
