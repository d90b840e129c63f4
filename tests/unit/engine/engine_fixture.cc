#include "tests/unit/engine/engine_fixture.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <catch2/catch.hpp>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>

#include "common/base/log.h"

namespace kvferry::test {

TempFolder::TempFolder() {
  std::string name = std::filesystem::temp_directory_path().string() + "/kvf-engine-XXXXXX";
  REQUIRE(::mkdtemp(name.data()) != nullptr);
  path_ = name;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::size_t TempFolder::entries() const {
  const auto begin = std::filesystem::directory_iterator(path_);
  return static_cast<std::size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

void RecordingHandler::record(std::string line) {
  const std::lock_guard lock(mutex_);
  lines_.push_back(std::move(line));
  changed_.notify_all();
}

Result<void> RecordingHandler::on_attach(EngineId engine, EngineAttach attach) {
  record(fmt::format("attach {}", engine));
  last_attach = std::move(attach);
  return attach_hook ? attach_hook(engine, last_attach) : Result<void>();
}

Result<void> RecordingHandler::on_send(EngineId engine, EngineChunk chunk) {
  record(fmt::format("send {} room={}", engine, chunk.room));
  last_chunk = std::move(chunk);
  return send_hook ? send_hook(engine, last_chunk) : Result<void>();
}

Result<void> RecordingHandler::on_expect(EngineId engine, EngineExpectation expectation) {
  record(fmt::format("expect {} room={}", engine, expectation.room));
  last_expectation = std::move(expectation);
  return expect_hook ? expect_hook(engine, last_expectation) : Result<void>();
}

Result<void> RecordingHandler::on_abort(EngineId engine, EngineAbort abort) {
  record(fmt::format("abort {} room={}{}", engine, abort.room, abort.begun ? "" : " not begun"));
  last_reason = std::move(abort.reason);
  return {};
}

void RecordingHandler::on_gone(EngineId engine) {
  if (gone_hook) {
    gone_hook(engine);
  }
  record(fmt::format("gone {}", engine));
}

bool RecordingHandler::wait_for(const std::string& line, std::size_t count) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(30), [&] {
    return static_cast<std::size_t>(std::count(lines_.begin(), lines_.end(), line)) >= count;
  });
}

std::size_t RecordingHandler::count(const std::string& line) {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(std::count(lines_.begin(), lines_.end(), line));
}

std::vector<std::string> RecordingHandler::lines() {
  const std::lock_guard lock(mutex_);
  return lines_;
}

RunningServer::RunningServer(RecordingHandler& handler, EngineServerOptions options)
    : work_(boost::asio::make_work_guard(io_)) {
  log::set_level(log::Level::kError);
  server_.emplace(io_, std::move(options), handler);
  const auto started = server_->start();
  INFO((started ? std::string() : started.error().message));
  REQUIRE(started);
  thread_ = std::thread([this] { io_.run(); });
}

void RunningServer::run(const std::function<void(EngineServer&)>& body) {
  std::promise<void> done;
  boost::asio::post(io_, [&] {
    body(*server_);
    done.set_value();
  });
  done.get_future().wait();
}

void RunningServer::stop() {
  if (!thread_.joinable()) {
    return;
  }
  run([](EngineServer& server) { server.stop(); });
  work_.reset();
  thread_.join();
}

EngineServerOptions options_in(const TempFolder& folder) {
  EngineServerOptions options;
  options.path = folder.file("engine.sock");
  return options;
}

UniqueFd make_memfd(std::size_t bytes) {
  UniqueFd fd(::memfd_create("kvf-test-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(fd);
  REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  return fd;
}

SmallPool::SmallPool() : fd(make_memfd(kBufferBytes + std::size_t{8} * kAuxSlots)) {
  buffer = kvf_buffer{3, KVF_LATENT, kRowBytes, kPages, fd.get(), 0, 0, 0};
  aux = kvf_aux_field{kAuxRoomField, 8, kAuxSlots, fd.get(), kBufferBytes};
  pool.struct_size = sizeof(pool);
  pool.page_size = kPageSize;
  pool.dtype = "bf16";
  pool.buffers = &buffer;
  pool.buffer_count = 1;
  pool.aux = &aux;
  pool.aux_count = 1;
}

Engine attach(const std::string& path, const kvf_pool& pool) {
  kvf_engine* engine = nullptr;
  std::array<char, 512> error{};
  const int rc = kvf_attach(path.c_str(), &pool, &engine, error.data(), error.size());
  INFO(error.data());
  REQUIRE(rc == 0);
  return Engine(engine);
}

kvf_chunk chunk_of(Room room, const std::vector<std::uint32_t>& pages) {
  kvf_chunk chunk{};
  chunk.struct_size = sizeof(chunk);
  chunk.room = room;
  chunk.pages = pages.data();
  chunk.page_count = pages.size();
  chunk.token_count = pages.size() * SmallPool::kPageSize;
  chunk.aux_slot = -1;
  chunk.ready_fd = -1;
  return chunk;
}

kvf_event empty_event() {
  kvf_event event{};
  event.struct_size = sizeof(event);
  return event;
}

RawClient::RawClient(const std::string& path) : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  REQUIRE(path.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  REQUIRE(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
}

bool RawClient::send(std::string_view bytes, const std::vector<int>& fds) {
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  bool first = true;
  while (!bytes.empty()) {
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (first && !fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* item = CMSG_FIRSTHDR(&message);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(item), fds.data(), fds.size() * sizeof(int));
    }
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      return false;
    }
    first = false;
    bytes.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

void RawClient::finish_sending() {
  ::shutdown(socket_.get(), SHUT_WR);
}

std::optional<wire::Reply> RawClient::reply() {
  std::array<std::byte, 4096> buffer;
  while (true) {
    const auto frame = in_.next();
    REQUIRE(frame);
    if (frame->has_value()) {
      const auto envelope = wire::open(**frame);
      REQUIRE(envelope);
      if (envelope->op == wire::Op::kEvent) {
        ++events;
        continue;
      }
      const auto reply = wire::decode_reply(*envelope);
      REQUIRE(reply);
      return *reply;
    }
    const ssize_t n = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
    if (n <= 0) {
      return std::nullopt;
    }
    in_.append(std::span(buffer).first(static_cast<std::size_t>(n)));
  }
}

void RawClient::drain() {
  std::array<char, 4096> buffer;
  while (::recv(socket_.get(), buffer.data(), buffer.size(), 0) > 0) {
  }
}

wire::Attach small_attach() {
  wire::Attach attach;
  attach.dtype = "bf16";
  attach.layout.page_size = SmallPool::kPageSize;
  attach.layout.buffers = {
      {BufferShape{3, BufferKind::kLatent, SmallPool::kRowBytes, SmallPool::kPages}, 0, 0}};
  attach.layout.aux = {{kAuxRoomField, 8, SmallPool::kAuxSlots, 0, SmallPool::kBufferBytes}};
  return attach;
}

std::string frame_of(std::string_view body) {
  return to_frame(std::span(reinterpret_cast<const std::uint8_t*>(body.data()), body.size()));
}

std::size_t open_fds() {
  const auto begin = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

}  // namespace kvferry::test
