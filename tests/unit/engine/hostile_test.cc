// Bytes and descriptors that no correct client sends: the connection ends with a reason, nothing else does.

#include <fcntl.h>
#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include "tests/unit/engine/engine_fixture.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

struct World {
  World() : server(handler, options_in(folder)), path(options_in(folder).path) {}
  /// Sends and returns the reply, which is followed by the end of the stream.
  std::string last_words(std::string_view bytes, const std::vector<int>& fds = {}) {
    RawClient client(path);
    client.send(bytes, fds);
    const auto reply = client.reply();
    if (!reply) {
      return "nothing";
    }
    CHECK(reply->code == KVF_PROTOCOL);
    CHECK_FALSE(client.reply());
    return reply->message;
  }
  TempFolder folder;
  RecordingHandler handler;
  RunningServer server;
  std::string path;
  SmallPool pool;
};

std::uint64_t seed() {
  const char* given = std::getenv("KVF_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 16) : std::random_device{}();
}

std::string mutated(std::string frame, std::mt19937_64& random) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  switch (below(5)) {
    case 0:
      frame.resize(below(frame.size() + 1));
      break;
    case 1: {  // a truncated body whose length says so
      frame.resize(kFrameHeaderBytes + below(frame.size() - kFrameHeaderBytes));
      return frame_of(frame.substr(kFrameHeaderBytes));
    }
    case 2:
      frame.insert(below(frame.size() + 1), std::string(1 + below(8), static_cast<char>(random())));
      break;
    default:
      break;
  }
  for (std::size_t i = below(4); i > 0 && !frame.empty(); --i) {
    // Mostly behind the length, where it gets interesting.
    const std::size_t from = frame.size() > kFrameHeaderBytes && below(8) != 0 ? kFrameHeaderBytes : 0;
    frame[from + below(frame.size() - from)] = static_cast<char>(random());
  }
  return frame;
}

}  // namespace

TEST_CASE("malformed frames end their connection with a reason") {
  World world;
  CHECK_THAT(world.last_words(std::string("\0\0\0\0", 4)), Catch::Contains("frame length is 0"));
  CHECK_THAT(world.last_words("\xFF\xFF\xFF\x7F"), Catch::Contains("frame length is 2147483647"));
  CHECK_THAT(world.last_words(frame_of("hello")), Catch::Contains("not a MessagePack map"));
  CHECK_THAT(world.last_words(frame_of("\x80")), Catch::Contains("op is missing"));
  CHECK_THAT(world.last_words(wire::encode(wire::Reply{4, 0, ""})), Catch::Contains("other direction"));
  CHECK_THAT(world.last_words(frame_of(std::string(1u << 20, '\x81'))), Catch::Contains("nested deeper"));
  const SmallPool pool;
  const Engine engine = attach(world.path, pool.pool);
  CHECK(world.handler.lines().size() == 1);
}

TEST_CASE("descriptors must be there when a frame claims them, and be claimed when they are there") {
  World world;
  const int fd = world.pool.fd.get();
  const std::string one = wire::encode(1, small_attach(), 1);
  CHECK_THAT(world.last_words(one), Catch::Contains("fds is 1, but 0 descriptors arrived"));
  CHECK_THAT(world.last_words(one, {fd, fd}), Catch::Contains("1 descriptors came that no frame claims"));
  CHECK_THAT(world.last_words(one, std::vector<int>(65, fd)),
             Catch::Contains("65 descriptors wait for their frame, at most 64"));
  CHECK_THAT(world.last_words(one, std::vector<int>(253, fd)), Catch::Contains("253 descriptors wait"));

  RawClient client(world.path);
  REQUIRE(client.send(wire::encode(1, small_attach(), 0)));
  CHECK(client.reply()->message == "buffers[0].fd is 0, but 0 descriptors came with the attach");
  REQUIRE(client.send(wire::encode(2, small_attach(), 2), {fd, fd}));
  CHECK(client.reply()->message == "descriptor 1 of 2 is used by no buffer and no aux field");
  REQUIRE(client.send(wire::encode(3, small_attach(), 1), {fd}));
  CHECK(client.reply()->code == 0);
  wire::Send send;
  send.room = 7;
  REQUIRE(client.send(wire::encode(4, send, 2), {fd, fd}));
  CHECK_THAT(client.reply()->message, Catch::Contains("send came with 2 descriptors"));
  REQUIRE(client.send(wire::encode(5, send, 1), {fd}));
  CHECK(client.reply()->code == 0);
}

#ifndef KVF_SANITIZED
// Not under the sanitizers: their check of a virtual call opens a pipe, which this test leaves no room for.
TEST_CASE("descriptors that the kernel had to drop end the connection by name of the limit") {
  World world;
  RawClient client(world.path);
  REQUIRE(client.send(wire::encode(1, small_attach(), 1), {world.pool.fd.get()}));
  REQUIRE(client.reply()->code == 0);
  // Fill the process's descriptor table up to a low limit, so that the server cannot receive any more.
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &old) == 0);
  rlimit low = old;
  low.rlim_cur = static_cast<rlim_t>(::fcntl(world.pool.fd.get(), F_DUPFD_CLOEXEC, 0)) + 4;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  std::vector<UniqueFd> fillers;
  while (true) {
    UniqueFd filler(::fcntl(world.pool.fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!filler) {
      break;
    }
    fillers.push_back(std::move(filler));
  }
  wire::Send send;
  send.room = 7;
  const bool sent = client.send(wire::encode(2, send, 1), {world.pool.fd.get()});
  const auto reply = client.reply();
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &old) == 0);
  fillers.clear();
  ::close(static_cast<int>(low.rlim_cur) - 4);
  CHECK(sent);
  REQUIRE(reply);
  CHECK_THAT(reply->message, Catch::Contains("descriptors were lost on their way, 0 arrived"));
  CHECK(world.handler.wait_for("gone 1"));
}
#endif

TEST_CASE("20,000 mutated frames crash nothing, leak nothing, and the next engine attaches") {
  const std::uint64_t run_seed = seed();
  CAPTURE(run_seed);
  std::mt19937_64 random(run_seed);
  World world;
  world.server.run([&](EngineServer&) {
    // The recorded descriptors would look like a leak.
    world.handler.attach_hook = [&](EngineId, const EngineAttach&) {
      world.handler.last_attach = EngineAttach{};
      return Result<void>();
    };
    world.handler.send_hook = [&](EngineId, const EngineChunk&) {
      world.handler.last_chunk = EngineChunk{};
      return Result<void>();
    };
  });
  const int fd = world.pool.fd.get();
  const std::string good_attach = wire::encode(1, small_attach(), 1);
  wire::Send send;
  send.room = 7;
  send.pages = {1, 2, 3};
  wire::Expect expect;
  expect.room = 7;
  expect.bootstrap = "10.0.0.1:8998";
  expect.pages = {4, 5};
  const std::vector<std::string> frames = {good_attach, wire::encode(2, send, 1), wire::encode(3, expect),
                                           wire::encode(4, wire::Abort{7, "why"}), wire::encode_detach(5)};
  const std::size_t before = open_fds();
  for (int i = 0; i < 20'000; ++i) {
    RawClient client(world.path);
    if (random() % 2 == 0) {
      client.send(good_attach, {fd});
    }
    const std::string& frame = frames[random() % frames.size()];
    client.send(mutated(frame, random), std::vector<int>(random() % 3, fd));
    client.finish_sending();
    client.drain();
  }
  const SmallPool pool;
  { const Engine engine = attach(world.path, pool.pool); }
  const std::vector<std::string> lines = world.handler.lines();
  const std::string last =
      lines.at(lines.size() - 1).substr(0, 6) == "attach" ? lines.back() : lines[lines.size() - 2];
  CHECK(world.handler.wait_for("gone" + last.substr(6)));
  std::size_t attached = 0;
  std::size_t gone = 0;
  std::size_t sends = 0;
  for (const std::string& line : world.handler.lines()) {
    attached += line.starts_with("attach") ? 1 : 0;
    gone += line.starts_with("gone") ? 1 : 0;
    sends += line.starts_with("send") ? 1 : 0;
  }
  CHECK(attached == gone);
  CHECK(attached > 5'000);  // the mutations are not all refused at the door
  CHECK(sends > 10);
  CHECK(open_fds() == before + 1);  // `pool`
}
