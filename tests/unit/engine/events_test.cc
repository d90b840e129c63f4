// Events: order, waiting, the descriptor, and what happens when either end dies or does not read.

#include <poll.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <vector>

#include "tests/unit/engine/engine_fixture.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

EngineEvent event_of(Room room) {
  EngineEvent event;
  event.type = EngineEventType::kChunkDone;
  event.room = room;
  event.tokens = room * 10;
  event.layer_end = static_cast<std::uint32_t>(room % 61);
  return event;
}

bool readable(int fd, int timeout_ms) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) == 1;
}

struct World {
  explicit World(std::uint32_t event_queue_max = 65536) {
    options = options_in(folder);
    options.event_queue_max = event_queue_max;
    server.emplace(handler, options);
  }
  TempFolder folder;
  RecordingHandler handler;
  EngineServerOptions options;
  std::optional<RunningServer> server;
  SmallPool pool;
};

}  // namespace

TEST_CASE("events come in order and with every field") {
  World world;
  const Engine engine = attach(world.options.path, world.pool.pool);
  constexpr Room kEvents = 5000;
  world.server->run([&](EngineServer& server) {
    for (Room room = 1; room <= kEvents; ++room) {
      server.send_event(1, event_of(room));
    }
    server.send_event(1, {EngineEventType::kFailed, 9, 1, 2, 3, Code::kPeerLost, "decode-3 went away"});
    server.send_event(1, {EngineEventType::kLanded, 8, 100, 200, 300, Code::kInternal, "not for landed"});
    server.send_event(999, event_of(1));  // nobody
  });
  kvf_event event = empty_event();
  for (Room room = 1; room <= kEvents; ++room) {
    REQUIRE(kvf_next_event(engine.get(), &event, 10'000) == 1);
    REQUIRE(event.type == KVF_EVENT_CHUNK_DONE);
    REQUIRE(event.room == room);
    REQUIRE(event.tokens == room * 10);
    REQUIRE(event.layer_end == room % 61);
  }
  REQUIRE(kvf_next_event(engine.get(), &event, 10'000) == 1);
  CHECK(event.type == KVF_EVENT_FAILED);
  CHECK(event.code == KVF_PEER_LOST);
  CHECK(std::string(event.reason) == "decode-3 went away");
  REQUIRE(kvf_next_event(engine.get(), &event, 10'000) == 1);
  CHECK(event.type == KVF_EVENT_LANDED);
  CHECK(event.tokens == 100);
  CHECK(event.bytes == 200);
  CHECK(event.transfer_ns == 300);
  CHECK(event.layer_end == 0);
  CHECK(event.code == KVF_OK);
  CHECK(std::string(event.reason).empty());
  CHECK(kvf_next_event(engine.get(), &event, 0) == 0);
  CHECK(event.type == KVF_EVENT_NONE);
}

TEST_CASE("events that arrive before and behind a reply are kept, and the descriptor announces them") {
  World world;
  // The first event is sent inside the call, the second right behind its reply.
  world.handler.attach_hook = [](EngineId, const EngineAttach&) { return Result<void>(); };
  EngineServer* running = nullptr;
  world.server->run([&](EngineServer& server) { running = &server; });
  world.server->run([&](EngineServer&) {
    world.handler.send_hook = [&](EngineId engine, const EngineChunk& chunk) -> Result<void> {
      running->send_event(engine, event_of(chunk.room));
      return {};
    };
  });
  const Engine engine = attach(world.options.path, world.pool.pool);
  const int fd = kvf_event_fd(engine.get());
  CHECK_FALSE(readable(fd, 0));
  const std::vector<std::uint32_t> pages = {1};
  kvf_event event = empty_event();
  for (Room room = 1; room <= 200; ++room) {
    const kvf_chunk chunk = chunk_of(room, pages);
    REQUIRE(kvf_send(engine.get(), &chunk) == 0);
    REQUIRE(readable(fd, 0));
  }
  for (Room room = 1; room <= 200; ++room) {
    REQUIRE(readable(fd, 0));
    REQUIRE(kvf_next_event(engine.get(), &event, 0) == 1);
    REQUIRE(event.room == room);
  }
  CHECK(kvf_next_event(engine.get(), &event, 0) == 0);
  CHECK_FALSE(readable(fd, 0));
  world.server->run([](EngineServer& server) { server.send_event(1, event_of(5)); });
  CHECK(readable(fd, 10'000));
  CHECK(kvf_next_event(engine.get(), &event, 0) == 1);
}

TEST_CASE("an engine that dies is gone exactly once, and so is one that detaches") {
  World world;
  { const Engine detaching = attach(world.options.path, world.pool.pool); }
  CHECK(world.handler.wait_for("gone 1"));
  {
    RawClient dying(world.options.path);
    REQUIRE(dying.send(wire::encode(1, small_attach(), 1), {world.pool.fd.get()}));
    REQUIRE(dying.reply()->code == 0);
  }
  CHECK(world.handler.wait_for("gone 2"));
  world.server->run([](EngineServer& server) {
    server.send_event(1, event_of(1));
    server.send_event(2, event_of(1));
  });
  world.server->stop();
  CHECK(world.handler.count("gone 1") == 1);
  CHECK(world.handler.count("gone 2") == 1);
}

TEST_CASE("a daemon that stops is unavailable for its engines, after the events it had sent") {
  World world;
  const Engine engine = attach(world.options.path, world.pool.pool);
  world.server->run([](EngineServer& server) { server.send_event(1, event_of(3)); });
  world.server.reset();
  kvf_event event = empty_event();
  const int fd = kvf_event_fd(engine.get());
  CHECK(readable(fd, 0));
  CHECK(kvf_next_event(engine.get(), &event, 10'000) == 1);
  CHECK(event.room == 3);
  CHECK(kvf_next_event(engine.get(), &event, 10'000) == -KVF_UNAVAILABLE);
  CHECK_THAT(kvf_last_error(engine.get()), Catch::Contains("the daemon closed the connection: re-attach"));
  CHECK(readable(fd, 0));
  const std::vector<std::uint32_t> pages = {1};
  const kvf_chunk chunk = chunk_of(7, pages);
  CHECK(kvf_send(engine.get(), &chunk) == -KVF_UNAVAILABLE);
  CHECK(world.handler.count("gone 1") == 0);  // stop() is the daemon's own decision
}

TEST_CASE("a daemon that dies before it answers makes the call fail, not hang") {
  World world;
  EngineServer* running = nullptr;
  world.server->run([&](EngineServer& server) { running = &server; });
  world.server->run([&](EngineServer&) {
    world.handler.send_hook = [&](EngineId, const EngineChunk&) -> Result<void> {
      running->stop();
      return {};
    };
  });
  const Engine engine = attach(world.options.path, world.pool.pool);
  const std::vector<std::uint32_t> pages = {1};
  const kvf_chunk chunk = chunk_of(7, pages);
  CHECK(kvf_send(engine.get(), &chunk) == -KVF_UNAVAILABLE);
}

TEST_CASE("an engine that does not read is cut off above the limit, and nobody is called inside send_event") {
  World world(100);
  std::atomic<bool> inside = false;
  std::atomic<bool> reentered = false;
  world.server->run(
      [&](EngineServer&) { world.handler.gone_hook = [&](EngineId) { reentered = reentered || inside; }; });
  RawClient slow(world.options.path);
  REQUIRE(slow.send(wire::encode(1, small_attach(), 1), {world.pool.fd.get()}));
  REQUIRE(slow.reply()->code == 0);
  const Engine other = attach(world.options.path, world.pool.pool);
  std::size_t sent = 0;
  while (world.handler.count("gone 1") == 0 && sent < 1'000'000) {
    world.server->run([&](EngineServer& server) {
      inside = true;
      for (int i = 0; i < 1000; ++i, ++sent) {
        server.send_event(1, event_of(1));
      }
      inside = false;
    });
  }
  CHECK(sent < 1'000'000);
  CHECK(world.handler.wait_for("gone 1"));
  CHECK_FALSE(reentered);
  CHECK(kvf_abort(other.get(), 7, "") == 0);
  CHECK_FALSE(slow.reply());  // what was sent before the cut, then the end
  CHECK(slow.events > 100);
  CHECK(slow.events < sent);
}

TEST_CASE("an engine that reads late but in time gets everything") {
  World world(20'000);
  const Engine engine = attach(world.options.path, world.pool.pool);
  world.server->run([](EngineServer& server) {
    for (Room room = 1; room <= 20'000; ++room) {
      server.send_event(1, event_of(room));
    }
  });
  kvf_event event = empty_event();
  for (Room room = 1; room <= 20'000; ++room) {
    REQUIRE(kvf_next_event(engine.get(), &event, 10'000) == 1);
    REQUIRE(event.room == room);
  }
}
