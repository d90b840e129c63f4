// The C ABI of kvferry.h over ClientConnection. Nothing but return codes leaves this file: every entry is
// noexcept, and what the library under it throws (out of memory) becomes KVF_INTERNAL.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/base/clean_text.h"
#include "common/engine/client_connection.h"
#include "common/engine/kvferry.h"
#include "common/engine/wire.h"
#include "common/pool/writer_lock.h"

struct kvf_engine {
  std::unique_ptr<kvferry::ClientConnection> connection;
  std::string last_error;
};

namespace kvferry {
namespace {

static_assert(KVF_INVALID == static_cast<int>(Code::kInvalid) &&
              KVF_UNAUTHORIZED == static_cast<int>(Code::kUnauthorized) &&
              KVF_UNAVAILABLE == static_cast<int>(Code::kUnavailable) &&
              KVF_CORRUPT == static_cast<int>(Code::kCorrupt) &&
              KVF_INTERNAL == static_cast<int>(Code::kInternal));
static_assert(sizeof(kvf_event::reason) == wire::kReasonBytesMax + 1);
// What programs were built with: the chunk without its layers, and the event whose last four bytes were
// padding.
constexpr std::size_t kChunkWithoutLayers = offsetof(kvf_chunk, layer_begin);
static_assert(sizeof(void*) != 8 || (kChunkWithoutLayers == 96 && sizeof(kvf_event) == 560));

// Mapping a pool touches each of its pages, at some GiB per second; a large pool is not a hanging daemon.
constexpr std::chrono::seconds kAttachPerGiB{1};

int number_of(const Error& error) {
  return -static_cast<int>(error.code);
}

/// Runs `body` (returning Result<int>) and turns its Error, or anything thrown, into a code and a text.
template <class Body, class SetError>
int guarded(Body&& body, SetError&& set_error) noexcept {
  try {
    Result<int> result = body();
    if (result) {
      return *result;
    }
    set_error(result.error().message);
    return number_of(result.error());
  } catch (...) {
    try {
      set_error(std::string("libkvferry ran out of memory"));
    } catch (...) {
    }
    return -KVF_INTERNAL;
  }
}

template <class Body>
int on_engine(kvf_engine* engine, Body&& body) noexcept {
  if (engine == nullptr) {
    return -KVF_INVALID;
  }
  return guarded([&] { return body(*engine->connection); },
                 [&](const std::string& text) { engine->last_error = text; });
}

/// `older_size`: what it was before fields were appended whose zeros mean what was meant then.
Result<void> check_struct(const char* name, bool given, std::uint32_t struct_size, std::size_t known_size,
                          std::size_t older_size = 0) {
  if (!given) {
    return fail(Code::kInvalid, "{} is NULL", name);
  }
  if (struct_size != known_size && (older_size == 0 || struct_size != older_size)) {
    return fail(
        Code::kInvalid,
        "{}.struct_size is {}, this libkvferry ({}) knows {}: set it to sizeof({}), and build with the "
        "kvferry.h of the installed library",
        name, struct_size, KVF_VERSION, known_size, name);
  }
  return {};
}

Result<void> check_array(const char* name, const void* items, std::size_t count) {
  if (items == nullptr && count > 0) {
    return fail(Code::kInvalid, "{} is NULL, but its count is {}", name, count);
  }
  return {};
}

Result<std::string> text_of(const char* name, const char* text) {
  if (text == nullptr) {
    return fail(Code::kInvalid, "{} is NULL", name);
  }
  return std::string(text);
}

/// The position of `fd` in `fds`, where each descriptor stands once however many buffers it serves.
Result<std::uint32_t> fd_index(const std::string& name, int fd, std::vector<int>& fds) {
  if (fd < 0) {
    return fail(Code::kInvalid, "{}.fd is {}, which is no descriptor", name, fd);
  }
  const auto found = std::find(fds.begin(), fds.end(), fd);
  if (found != fds.end()) {
    return static_cast<std::uint32_t>(found - fds.begin());
  }
  if (fds.size() == wire::kFdsMax) {
    return fail(
        Code::kInvalid,
        "{}.fd is the {}th different descriptor, at most {} are legal: put several buffers into one memfd",
        name, fds.size() + 1, wire::kFdsMax);
  }
  fds.push_back(fd);
  return static_cast<std::uint32_t>(fds.size() - 1);
}

Result<wire::Attach> to_wire(const kvf_pool& pool, std::vector<int>& fds) {
  KVF_TRY_VOID(check_array("pool.buffers", pool.buffers, pool.buffer_count));
  KVF_TRY_VOID(check_array("pool.aux", pool.aux, pool.aux_count));
  if (pool.buffer_count > wire::kBuffersMax || pool.aux_count > wire::kAuxFieldsMax) {
    return fail(Code::kInvalid, "pool has {} buffers and {} aux fields, at most {} and {} are legal",
                pool.buffer_count, pool.aux_count, wire::kBuffersMax, wire::kAuxFieldsMax);
  }
  wire::Attach attach;
  attach.coord = RankCoord{pool.tp_rank, pool.pp_rank, pool.cp_rank, pool.dp_rank};
  KVF_TRY(attach.dtype, text_of("pool.dtype", pool.dtype));
  attach.layout.page_size = pool.page_size;
  for (std::size_t i = 0; i < pool.buffer_count; ++i) {
    const kvf_buffer& buffer = pool.buffers[i];
    const std::string name = fmt::format("buffers[{}]", i);
    if (buffer.kind >= kBufferKinds) {
      return fail(Code::kInvalid, "{}.kind is {}, legal are 0 (key) to {} (recurrent)", name, buffer.kind,
                  kBufferKinds - 1);
    }
    const std::uint32_t page_rows = buffer.page_rows != 0 ? buffer.page_rows : pool.page_size;
    const std::uint64_t stride =
        buffer.page_stride != 0 ? buffer.page_stride : std::uint64_t{page_rows} * buffer.row_bytes;
    const std::uint64_t unit = std::max<std::uint64_t>(1, buffer.row_bytes);  // 0 is refused by the daemon
    if (stride % unit != 0 || stride / unit > UINT32_MAX) {
      return fail(Code::kInvalid, "{}.page_stride {} is not a multiple of row_bytes {}; pad the pages to one",
                  name, stride, buffer.row_bytes);
    }
    BufferPlace place;
    place.shape =
        BufferShape{buffer.layer, static_cast<BufferKind>(buffer.kind),     buffer.row_bytes, buffer.pages,
                    page_rows,    static_cast<std::uint32_t>(stride / unit)};
    KVF_TRY(place.fd, fd_index(name, buffer.fd, fds));
    place.offset = buffer.offset;
    attach.layout.buffers.push_back(place);
  }
  for (std::size_t i = 0; i < pool.aux_count; ++i) {
    const kvf_aux_field& field = pool.aux[i];
    const std::string name = fmt::format("aux[{}]", i);
    AuxField aux;
    KVF_TRY(aux.name, text_of("pool.aux.name", field.name));
    aux.width = field.width;
    aux.slots = field.slots;
    KVF_TRY(aux.fd, fd_index(name, field.fd, fds));
    aux.offset = field.offset;
    attach.layout.aux.push_back(std::move(aux));
  }
  return attach;
}

std::chrono::seconds attach_deadline(const PoolLayout& layout) {
  double bytes = 0;
  for (const BufferPlace& place : layout.buffers) {
    bytes += static_cast<double>(place.shape.pages) * place.shape.pitch_of(layout.page_size) *
             place.shape.row_bytes;
  }
  // Bounded, because the sizes are the caller's and may be nonsense.
  const double gib = std::min(bytes / (1024.0 * 1024 * 1024), 3600.0);
  return kAnswerDeadline + kAttachPerGiB * static_cast<int>(gib);
}

Result<int> attach(const char* socket_path, const kvf_pool* pool, kvf_engine** out) {
  if (out == nullptr) {
    return fail(Code::kInvalid, "out is NULL");
  }
  *out = nullptr;
  KVF_TRY(const std::string path, text_of("socket_path", socket_path));
  KVF_TRY_VOID(
      check_struct("kvf_pool", pool != nullptr, pool != nullptr ? pool->struct_size : 0, sizeof(kvf_pool)));
  std::vector<int> fds;
  KVF_TRY(const wire::Attach message, to_wire(*pool, fds));
  auto engine = std::make_unique<kvf_engine>();
  KVF_TRY(engine->connection, ClientConnection::connect(path));
  const std::uint64_t seq = engine->connection->next_seq();
  KVF_TRY_VOID(engine->connection->call(seq, wire::encode(seq, message, fds.size()), fds,
                                        attach_deadline(message.layout)));
  *out = engine.release();
  return 0;
}

Result<HybridRows> to_rows(const kvf_hybrid& hybrid) {
  KVF_TRY_VOID(check_array("hybrid.window_pages", hybrid.window_pages, hybrid.window_page_count));
  HybridRows rows;
  rows.window_pages.assign(hybrid.window_pages, hybrid.window_pages + hybrid.window_page_count);
  rows.window_first = hybrid.window_first;
  if (hybrid.has_state != 0) {
    rows.state_slot = hybrid.state_slot;
  }
  return rows;
}

Result<int> send(ClientConnection& connection, const kvf_chunk* chunk) {
  KVF_TRY_VOID(check_struct("kvf_chunk", chunk != nullptr, chunk != nullptr ? chunk->struct_size : 0,
                            sizeof(kvf_chunk), kChunkWithoutLayers));
  KVF_TRY_VOID(check_array("chunk.pages", chunk->pages, chunk->page_count));
  wire::Send message;
  message.room = chunk->room;
  message.pages.assign(chunk->pages, chunk->pages + chunk->page_count);
  message.first_token = chunk->first_token;
  message.token_count = chunk->token_count;
  message.last = chunk->last != 0;
  message.begun = connection.room_is_begun(chunk->room);
  message.aux_slot = chunk->aux_slot;
  KVF_TRY(message.hybrid, to_rows(chunk->hybrid));
  if (chunk->struct_size > kChunkWithoutLayers) {
    message.layer_begin = chunk->layer_begin;
    message.layer_end = chunk->layer_end;
  }
  std::vector<int> fds;
  if (chunk->ready_fd >= 0) {
    fds.push_back(chunk->ready_fd);
  }
  const std::uint64_t seq = connection.next_seq();
  KVF_TRY_VOID(connection.call(seq, wire::encode(seq, message, fds.size()), fds, kAnswerDeadline));
  connection.room_begun(chunk->room);
  return 0;
}

Result<int> expect(ClientConnection& connection, const kvf_expectation* expectation) {
  KVF_TRY_VOID(check_struct("kvf_expectation", expectation != nullptr,
                            expectation != nullptr ? expectation->struct_size : 0, sizeof(kvf_expectation)));
  KVF_TRY_VOID(check_array("expectation.pages", expectation->pages, expectation->page_count));
  wire::Expect message;
  message.room = expectation->room;
  KVF_TRY(message.bootstrap, text_of("expectation.bootstrap", expectation->bootstrap));
  message.pages.assign(expectation->pages, expectation->pages + expectation->page_count);
  message.prefix = expectation->prefix;
  message.token_count = expectation->token_count;
  message.aux_slot = expectation->aux_slot;
  message.prefill_dp_rank = expectation->prefill_dp_rank;
  KVF_TRY(message.hybrid, to_rows(expectation->hybrid));
  const std::uint64_t seq = connection.next_seq();
  KVF_TRY_VOID(connection.call(seq, wire::encode(seq, message), {}, kAnswerDeadline));
  connection.room_begun(expectation->room);
  return 0;
}

Result<int> abort(ClientConnection& connection, std::uint64_t room, const char* reason) {
  const wire::Abort message{room, reason == nullptr ? std::string() : std::string(reason),
                            connection.room_is_begun(room)};
  const std::uint64_t seq = connection.next_seq();
  KVF_TRY_VOID(connection.call(seq, wire::encode(seq, message), {}, kAnswerDeadline));
  return 0;
}

Result<int> next_event(ClientConnection& connection, kvf_event* event, int timeout_ms) {
  KVF_TRY_VOID(check_struct("kvf_event", event != nullptr, event != nullptr ? event->struct_size : 0,
                            sizeof(kvf_event)));
  KVF_TRY(const std::optional<wire::Event> next, connection.next_event(timeout_ms));
  *event = kvf_event{};
  event->struct_size = sizeof(kvf_event);
  if (!next) {
    return 0;
  }
  event->type = next->type;
  event->room = next->room;
  event->tokens = next->tokens;
  event->bytes = next->bytes;
  event->transfer_ns = next->transfer_ns;
  event->code = next->code;
  event->layer_end = next->layer_end;
  const std::string_view reason = cut_text(next->reason, wire::kReasonBytesMax);
  std::memcpy(event->reason, reason.data(), reason.size());
  return 1;
}

}  // namespace
}  // namespace kvferry

extern "C" {

int kvf_attach(const char* socket_path, const kvf_pool* pool, kvf_engine** out, char* error,
               size_t error_size) KVF_NOEXCEPT {
  return kvferry::guarded([&] { return kvferry::attach(socket_path, pool, out); },
                          [&](const std::string& text) {
                            if (error != nullptr && error_size > 0) {
                              const auto part = kvferry::cut_text(text, error_size - 1);
                              std::memcpy(error, part.data(), part.size());
                              error[part.size()] = '\0';
                            }
                          });
}

int kvf_send(kvf_engine* engine, const kvf_chunk* chunk) KVF_NOEXCEPT {
  return kvferry::on_engine(engine, [&](auto& connection) { return kvferry::send(connection, chunk); });
}

int kvf_expect(kvf_engine* engine, const kvf_expectation* expectation) KVF_NOEXCEPT {
  return kvferry::on_engine(engine,
                            [&](auto& connection) { return kvferry::expect(connection, expectation); });
}

int kvf_abort(kvf_engine* engine, uint64_t room, const char* reason) KVF_NOEXCEPT {
  return kvferry::on_engine(engine,
                            [&](auto& connection) { return kvferry::abort(connection, room, reason); });
}

int kvf_next_event(kvf_engine* engine, kvf_event* event, int timeout_ms) KVF_NOEXCEPT {
  return kvferry::on_engine(
      engine, [&](auto& connection) { return kvferry::next_event(connection, event, timeout_ms); });
}

int kvf_writers_gone(int fd) KVF_NOEXCEPT {
  const auto writers = kvferry::has_writers(fd);
  if (!writers) {
    return -static_cast<int>(writers.error().code);
  }
  return *writers ? 0 : 1;
}

int kvf_event_fd(const kvf_engine* engine) KVF_NOEXCEPT {
  return engine == nullptr ? -KVF_INVALID : engine->connection->event_fd();
}

void kvf_detach(kvf_engine* engine) KVF_NOEXCEPT {
  if (engine == nullptr) {
    return;
  }
  const std::unique_ptr<kvf_engine> owned(engine);
  try {
    owned->connection->send_last_words(kvferry::wire::encode_detach(owned->connection->next_seq()));
  } catch (...) {
    // Closing the socket says the same.
  }
}

const char* kvf_last_error(const kvf_engine* engine) KVF_NOEXCEPT {
  return engine == nullptr ? "engine is NULL" : engine->last_error.c_str();
}

const char* kvf_version(void) KVF_NOEXCEPT {
  return KVF_VERSION;
}

}  // extern "C"
