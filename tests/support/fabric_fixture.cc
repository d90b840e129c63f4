#include "tests/support/fabric_fixture.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "common/base/check.h"

namespace kvferry::test {
namespace {

constexpr std::uint64_t kGap = 4096;  // between buffers, watched like everything else
constexpr std::uint32_t kAuxSlots = 4;
constexpr std::uint32_t kAuxSlot = 2;
constexpr std::uint32_t kAuxWidths[] = {8, 24};
// Only a bound for failures: nothing waits for it to pass.
constexpr auto kDeadline = std::chrono::seconds(60);

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// The bytes of one head of one token of one buffer.
void fill_head(std::byte* out, std::uint32_t bytes, const BufferShape& shape, std::uint64_t head,
               std::uint64_t token) {
  const std::uint64_t base =
      mix(mix(mix(shape.layer * 8ull + static_cast<std::uint64_t>(shape.kind)) ^ head) ^ token);
  for (std::uint32_t i = 0; i < bytes; i += 8) {
    const std::uint64_t word = mix(base + i / 8);
    std::memcpy(out + i, &word, std::min<std::uint32_t>(8, bytes - i));
  }
}

std::vector<std::byte> aux_bytes(std::uint32_t field, std::uint64_t seed) {
  std::vector<std::byte> bytes(field == 0 ? kAuxWidths[0] : kAuxWidths[field] - 4);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(mix(seed * 100 + field) >> (8 * (i % 8)));
  }
  return bytes;
}

PoolLayout make_layout(const FabricCase& spec, const Topology& topology, RankIndex rank,
                       std::uint32_t page_size) {
  PoolLayout layout;
  layout.rank = rank;
  layout.page_size = page_size;
  std::uint64_t offset = kGap;
  for (const BufferShape& shape : rank_buffers(spec.model, topology, topology.coord(rank), spec.pages)) {
    layout.buffers.push_back(BufferPlace{shape, 0, offset});
    offset += shape.pages * page_size * shape.row_bytes + kGap;
  }
  std::uint64_t aux_offset = 64;
  for (const std::uint32_t width : kAuxWidths) {
    layout.aux.push_back(
        AuxField{aux_offset == 64 ? kAuxRoomField : "tokens", width, kAuxSlots, 1, aux_offset});
    aux_offset += std::uint64_t{width} * kAuxSlots + 64;
  }
  return layout;
}

std::uint64_t fd_bytes(const PoolLayout& layout, std::uint32_t fd) {
  std::uint64_t end = 0;
  for (const BufferPlace& place : layout.buffers) {
    if (place.fd == fd) {
      end = std::max(end, place.offset + place.shape.pages * place.shape.rows_of_page(layout.page_size) *
                                             place.shape.row_bytes);
    }
  }
  for (const AuxField& field : layout.aux) {
    if (field.fd == fd) {
      end = std::max(end, field.offset + std::uint64_t{field.width} * field.slots);
    }
  }
  return end + kGap;
}

/// All bytes of both descriptors as they are now, read through the descriptors and not through the mapping.
std::vector<std::byte> image_of(const Pool& pool) {
  std::vector<std::byte> image;
  for (std::uint32_t fd = 0; fd < pool.fds().size(); ++fd) {
    const std::size_t at = image.size();
    image.resize(at + fd_bytes(pool.layout(), fd));
    std::size_t done = at;
    while (done < image.size()) {
      const ssize_t got = ::pread(pool.fds()[fd].get(), image.data() + done, image.size() - done,
                                  static_cast<off_t>(done - at));
      KVF_CHECK(got > 0);
      done += static_cast<std::size_t>(got);
    }
  }
  return image;
}

}  // namespace

FabricSink EventLog::sink() {
  return [this](FabricEvent&& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    changed_.notify_all();
  };
}

bool EventLog::wait(const std::function<bool(const Events&)>& done) {
  std::unique_lock lock(mutex_);
  if (!pump_) {
    return changed_.wait_for(lock, kDeadline, [&] { return done(events_); });
  }
  while (!done(events_)) {
    lock.unlock();
    const bool moved = pump_();
    lock.lock();
    if (!moved) {
      return done(events_);
    }
  }
  return true;
}

EventLog::Events EventLog::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

std::string EventLog::describe() const {
  static constexpr const char* kNames[] = {"PeerUp",  "PeerDown", "ChunkDone",   "ChunkFailed",
                                           "Drained", "Landed",   "GrantClosed", "Rejected"};
  std::string text;
  for (const FabricEvent& event : events()) {
    text += kNames[event.index()];
    std::visit(
        [&text](const auto& value) {
          if constexpr (requires { value.error; }) {
            text += "(" + value.error.message + ")";
          }
        },
        event);
    text += " ";
  }
  return text;
}

ModelGeometry small_mla(std::uint32_t layers) {
  ModelGeometry model;
  model.name = "small-mla";
  model.attention = AttentionKind::kMla;
  model.hidden_layers = layers;
  model.kv_heads = 1;
  model.latent_dim = 512;
  model.rope_dim = 64;
  model.hidden_size = 1024;
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    model.kv_layers.push_back(layer);
  }
  return model;
}

ModelGeometry small_gqa(std::uint32_t heads, std::uint32_t layers) {
  ModelGeometry model = small_mla(layers);
  model.name = "small-gqa";
  model.attention = AttentionKind::kMha;
  model.kv_heads = heads;
  model.latent_dim = 0;
  model.rope_dim = 0;
  model.head_dim = 64;
  model.v_head_dim = 64;
  return model;
}

Topology tp(std::uint32_t size, std::uint32_t dcp) {
  Topology topology;
  topology.tp = size;
  topology.dcp = dcp;
  return topology;
}

std::vector<FabricCase> standard_cases() {
  std::vector<FabricCase> cases(4);
  cases[0] = FabricCase{"MLA TP2 -> TP4", small_mla(), tp(2), tp(4)};
  cases[1] = FabricCase{"MLA TP1 -> TP4 DCP4", small_mla(), tp(1), tp(4, 4)};
  cases[2] = FabricCase{"GQA TP4 -> TP8", small_gqa(4), tp(4), tp(8)};
  cases[3] = FabricCase{"GQA TP8 -> TP2", small_gqa(8), tp(8), tp(2)};
  cases[3].dst_page_size = 32;
  return cases;
}

std::shared_ptr<Pool> make_pool(PoolLayout layout, std::byte guard) {
  std::vector<UniqueFd> fds;
  for (std::uint32_t i = 0; i < (layout.aux.empty() ? 1u : 2u); ++i) {
    UniqueFd fd(::memfd_create("kvferry-test-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const std::uint64_t bytes = fd_bytes(layout, i);
    KVF_CHECK(fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
    const std::vector<std::byte> filler(bytes, guard);
    KVF_CHECK(::pwrite(fd.get(), filler.data(), bytes, 0) == static_cast<ssize_t>(bytes));
    KVF_CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    fds.push_back(std::move(fd));
  }
  auto pool = Pool::map(std::move(layout), std::move(fds));
  KVF_CHECK(pool.has_value());
  return *pool;
}

FabricFixture::FabricFixture(FabricCase spec) : spec_(std::move(spec)) {
  grant_key_.room = 4711;
  grant_key_.generation = spec_.seed * 1000 + 1;
  for (RankIndex rank = 0; rank < spec_.prefill.rank_count(); ++rank) {
    sources_.push_back(make_pool(make_layout(spec_, spec_.prefill, rank, spec_.src_page_size), kSrcGuard));
    src_pages_.push_back(shuffled_pages(rank));
    fill_source(rank);
  }
  for (RankIndex rank = 0; rank < spec_.decode.rank_count(); ++rank) {
    destinations_.push_back(
        make_pool(make_layout(spec_, spec_.decode, rank, spec_.dst_page_size), kDstGuard));
    dst_pages_.push_back(shuffled_pages(1000 + rank));
  }
  for (RankIndex decode = 0; decode < destinations_.size(); ++decode) {
    for (RankIndex prefill = 0; prefill < sources_.size(); ++prefill) {
      if (!jobs(Pair{prefill, decode}).empty()) {
        pairs_.push_back(Pair{prefill, decode});
      }
    }
  }
}

std::vector<std::uint32_t> FabricFixture::shuffled_pages(std::uint64_t salt) const {
  std::vector<std::uint32_t> pages(spec_.pages);
  for (std::uint32_t i = 0; i < pages.size(); ++i) {
    pages[i] = i;
  }
  std::mt19937_64 random(spec_.seed * 7919 + salt);
  // Short sorted stretches, so that both merged and lone pages occur.
  std::shuffle(pages.begin(), pages.end(), random);
  for (std::size_t i = 0; i + 8 <= pages.size(); i += 16) {
    std::sort(pages.begin() + static_cast<std::ptrdiff_t>(i),
              pages.begin() + static_cast<std::ptrdiff_t>(i) + 8);
  }
  return pages;
}

void FabricFixture::fill_source(RankIndex rank) {
  const Pool& pool = *sources_[rank];
  const Ownership own = ownership(spec_.prefill, spec_.model, spec_.prefill.coord(rank));
  for (std::uint32_t b = 0; b < pool.buffer_count(); ++b) {
    const BufferShape& shape = pool.layout().buffers[b].shape;
    const std::uint32_t head_bytes = spec_.model.head_bytes(shape.kind);
    for (std::uint64_t token = 0; token < spec_.tokens; ++token) {
      if (!own.tokens.owns(token)) {
        continue;
      }
      const std::uint64_t index = own.tokens.owned_before(token);
      const std::uint64_t row =
          std::uint64_t{src_pages_[rank][index / spec_.src_page_size]} * spec_.src_page_size +
          index % spec_.src_page_size;
      for (std::uint64_t head = own.heads.begin; head < own.heads.end; ++head) {
        fill_head(pool.buffer(b).data() + row * shape.row_bytes + (head - own.heads.begin) * head_bytes,
                  head_bytes, shape, head, token);
      }
    }
  }
}

TransferKey FabricFixture::key(const Pair& pair) const {
  TransferKey result{grant_key_, pair.prefill};
  result.grant.decode_rank = pair.decode;
  return result;
}

Grant FabricFixture::grant(RankIndex decode_rank, PeerId peer) const {
  Grant result;
  result.key = grant_key_;
  result.key.decode_rank = decode_rank;
  // dst_index counts from the first granted page, which is the one after the prefix.
  const std::uint64_t virtual_page = std::uint64_t{spec_.dst_page_size} * spec_.decode.dcp;
  const std::uint64_t skip = spec_.prefix / virtual_page;
  const std::uint64_t needed = (spec_.tokens + virtual_page - 1) / virtual_page;
  const auto& pages = dst_pages_[decode_rank];
  result.pages = std::make_shared<const std::vector<std::uint32_t>>(
      pages.begin() + static_cast<std::ptrdiff_t>(skip), pages.begin() + static_cast<std::ptrdiff_t>(needed));
  result.has_aux = true;
  result.aux_slot = kAuxSlot;
  for (const Pair& pair : pairs_) {
    if (pair.decode == decode_rank) {
      result.sources.emplace_back(pair.prefill, peer);
    }
  }
  return result;
}

std::vector<ChunkJob> FabricFixture::jobs(const Pair& pair) const {
  const auto shape = [](const Topology& topology, const Pool& pool) {
    return RankShape{topology, topology.coord(pool.rank()), pool.page_size(), shapes(pool.layout())};
  };
  const auto layout = pair_layout(spec_.model, shape(spec_.prefill, *sources_[pair.prefill]),
                                  shape(spec_.decode, *destinations_[pair.decode]));
  KVF_CHECK(layout.has_value());
  std::vector<ChunkJob> result;
  if (layout->pairs.empty() || !layout->elected(grant_key_.room)) {
    return result;
  }
  const auto granted = grant(pair.decode).pages;
  for (std::uint64_t begin = spec_.prefix; begin < spec_.tokens; begin += spec_.chunk_tokens) {
    ChunkRequest request;
    request.begin = begin;
    request.end = std::min(spec_.tokens, begin + spec_.chunk_tokens);
    request.dst_first_token = spec_.prefix;
    request.src_pages = src_pages_[pair.prefill];
    request.dst_pages = *granted;
    auto plan = plan_chunk(*layout, request);
    KVF_CHECK(plan.has_value());
    ChunkJob job;
    job.key = key(pair);
    job.plan = std::make_shared<const Plan>(*std::move(plan));
    job.source = sources_[pair.prefill];
    job.aux_slot = kAuxSlot;
    job.last = request.end == spec_.tokens;
    job.ticket = result.size() + 1;
    const bool first_source =
        pairs_.empty() || std::none_of(pairs_.begin(), pairs_.end(), [&pair](const Pair& other) {
          return other.decode == pair.decode && other.prefill < pair.prefill;
        });
    if (job.last && first_source) {
      for (std::uint32_t field = 0; field < std::size(kAuxWidths); ++field) {
        job.aux.push_back(AuxWrite{field, aux_bytes(field, spec_.seed)});
      }
    }
    result.push_back(std::move(job));
  }
  return result;
}

std::uint64_t FabricFixture::bytes(const Pair& pair) const {
  std::uint64_t total = 0;
  for (const ChunkJob& job : jobs(pair)) {
    total += job.plan->bytes;
    for (const AuxWrite& aux : job.aux) {
      total += aux.bytes.size();
    }
  }
  return total;
}

std::string FabricFixture::connect(SendFabric& send, EventLog& send_log, ReceiveFabric& receive) {
  for (const auto& pool : destinations_) {
    receive.add_pool(pool);
  }
  for (RankIndex rank = 0; rank < destinations_.size(); ++rank) {
    receive.open(grant(rank));
  }
  const auto offer = receive.offer(kPeer);
  if (!offer) {
    return "offer: " + offer.error().message;
  }
  send.connect(kPeer, *offer);
  return send_log.wait_for<fabric_event::PeerUp>() ? "" : "no PeerUp: " + send_log.describe();
}

std::string FabricFixture::run(SendFabric& send, EventLog& send_log, ReceiveFabric& receive,
                               EventLog& receive_log) {
  if (std::string error = connect(send, send_log, receive); !error.empty()) {
    return error;
  }
  std::size_t chunks = 0;
  for (const Pair& pair : pairs_) {
    for (ChunkJob& job : jobs(pair)) {
      send.post(kPeer, std::move(job));
      ++chunks;
    }
  }
  if (!receive_log.wait_for<fabric_event::Landed>(pairs_.size()) ||
      !send_log.wait_for<fabric_event::ChunkDone>(chunks)) {
    return "not all landed: sender " + send_log.describe() + " receiver " + receive_log.describe();
  }
  for (const Pair& pair : pairs_) {
    std::size_t found = 0;
    for (const auto& landed : receive_log.all<fabric_event::Landed>()) {
      found += landed.key == key(pair) && landed.peer == kPeer && landed.bytes == bytes(pair) ? 1 : 0;
    }
    if (found != 1) {
      return fmt::format("prefill {} -> decode {}: {} right Landed events", pair.prefill, pair.decode, found);
    }
  }
  for (RankIndex rank = 0; rank < destinations_.size(); ++rank) {
    receive.close(grant(rank).key);
  }
  if (!receive_log.wait_for<fabric_event::GrantClosed>(destinations_.size())) {
    return "not all grants closed: " + receive_log.describe();
  }
  return mismatch();
}

std::vector<std::byte> FabricFixture::expected_image(RankIndex rank) const {
  const Pool& pool = *destinations_[rank];
  const PoolLayout& layout = pool.layout();
  const std::uint64_t kv_bytes = fd_bytes(layout, 0);
  std::vector<std::byte> image(kv_bytes + fd_bytes(layout, 1), kDstGuard);
  const Ownership own = ownership(spec_.decode, spec_.model, spec_.decode.coord(rank));
  for (const BufferPlace& place : layout.buffers) {
    const std::uint32_t head_bytes = spec_.model.head_bytes(place.shape.kind);
    for (std::uint64_t token = spec_.prefix; token < spec_.tokens; ++token) {
      if (!own.tokens.owns(token)) {
        continue;
      }
      const std::uint64_t index = own.tokens.owned_before(token);
      const std::uint64_t row =
          std::uint64_t{dst_pages_[rank][index / spec_.dst_page_size]} * spec_.dst_page_size +
          index % spec_.dst_page_size;
      for (std::uint64_t head = own.heads.begin; head < own.heads.end; ++head) {
        fill_head(
            image.data() + place.offset + row * place.shape.row_bytes + (head - own.heads.begin) * head_bytes,
            head_bytes, place.shape, head, token);
      }
    }
  }
  for (std::uint32_t field = 0; field < layout.aux.size(); ++field) {
    const std::vector<std::byte> bytes = aux_bytes(field, spec_.seed);
    const std::uint64_t at =
        kv_bytes + layout.aux[field].offset + std::uint64_t{kAuxSlot} * layout.aux[field].width;
    std::copy(bytes.begin(), bytes.end(), image.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return image;
}

std::string FabricFixture::compare(bool may_be_guard) const {
  constexpr std::size_t kStride = 4096;  // compared at once where nothing differs
  for (RankIndex rank = 0; rank < destinations_.size(); ++rank) {
    const std::vector<std::byte> expected = expected_image(rank);
    const std::vector<std::byte> found = image_of(*destinations_[rank]);
    KVF_CHECK(expected.size() == found.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (i % kStride == 0 && i + kStride <= found.size() &&
          std::memcmp(found.data() + i, expected.data() + i, kStride) == 0) {
        i += kStride - 1;
        continue;
      }
      if (found[i] != expected[i] && !(may_be_guard && found[i] == kDstGuard)) {
        return fmt::format("{}: decode rank {} byte {} of {} is {:#x}, but must be {:#x}", spec_.name, rank,
                           i, found.size(), static_cast<int>(found[i]), static_cast<int>(expected[i]));
      }
    }
  }
  return "";
}

std::string FabricFixture::mismatch() const {
  return compare(false);
}

std::string FabricFixture::foreign_bytes() const {
  return compare(true);
}

}  // namespace kvferry::test
