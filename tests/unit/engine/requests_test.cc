// send, expect and abort through the C ABI to the handler and back.

#include <sys/eventfd.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstddef>
#include <functional>
#include <numeric>
#include <vector>

#include "tests/unit/engine/engine_fixture.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

struct Attached {
  Attached() : server(handler, options_in(folder)), engine(attach(options_in(folder).path, pool.pool)) {}
  explicit Attached(const kvf_pool& large)
      : server(handler, options_in(folder)), engine(attach(options_in(folder).path, large)) {}
  TempFolder folder;
  RecordingHandler handler;
  RunningServer server;
  SmallPool pool;
  Engine engine;
};

kvf_expectation expectation_of(const std::vector<std::uint32_t>& pages) {
  kvf_expectation expectation{};
  expectation.struct_size = sizeof(expectation);
  expectation.room = 7;
  expectation.bootstrap = "10.0.0.1:8998";
  expectation.pages = pages.data();
  expectation.page_count = pages.size();
  expectation.token_count = 100;
  expectation.aux_slot = -1;
  expectation.prefill_dp_rank = -1;
  return expectation;
}

}  // namespace

TEST_CASE("a send arrives with every field, also with 100,000 pages") {
  SmallPool large;
  large.buffer.pages = 200'000;
  Attached world(large.pool);
  std::vector<std::uint32_t> pages(100'000);
  std::iota(pages.rbegin(), pages.rend(), 1u);
  kvf_chunk chunk = chunk_of(kRoomMax, pages);
  chunk.first_token = 1ull << 33;
  chunk.token_count = 1'600'000;
  chunk.last = 5;
  chunk.aux_slot = 3;
  chunk.layer_begin = 30;
  chunk.layer_end = 61;
  INFO(kvf_last_error(world.engine.get()));
  REQUIRE(kvf_send(world.engine.get(), &chunk) == 0);
  const EngineChunk& got = world.handler.last_chunk;
  CHECK(got.room == kRoomMax);
  CHECK(got.pages == pages);
  CHECK(got.first_token == 1ull << 33);
  CHECK(got.token_count == 1'600'000);
  CHECK(got.last);
  CHECK(got.aux_slot == 3);
  CHECK_FALSE(got.ready);
  CHECK(got.layer_begin == 30);
  CHECK(got.layer_end == 61);
  CHECK_FALSE(got.all_layers());
}

TEST_CASE("a program that was built before chunks had layers sends all of them") {
  Attached world;
  const std::vector<std::uint32_t> pages = {1, 2};
  kvf_chunk chunk = chunk_of(7, pages);
  chunk.layer_begin = 3;  // what lies behind its struct
  chunk.layer_end = 5;
  chunk.struct_size = offsetof(kvf_chunk, layer_begin);
  REQUIRE(kvf_send(world.engine.get(), &chunk) == 0);
  CHECK(world.handler.last_chunk.all_layers());
  CHECK(world.handler.last_chunk.pages == pages);
  for (const std::uint32_t size :
       {chunk.struct_size - 8, chunk.struct_size + 4, static_cast<std::uint32_t>(sizeof(kvf_chunk)) + 8}) {
    chunk.struct_size = size;
    CHECK(kvf_send(world.engine.get(), &chunk) == -KVF_INVALID);
    CHECK_THAT(kvf_last_error(world.engine.get()), Catch::Contains("kvf_chunk.struct_size is"));
  }
}

TEST_CASE("the ready descriptor of a send is the engine's own event") {
  Attached world;
  const UniqueFd ready(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const std::vector<std::uint32_t> pages = {1, 2};
  kvf_chunk chunk = chunk_of(7, pages);
  chunk.ready_fd = ready.get();
  REQUIRE(kvf_send(world.engine.get(), &chunk) == 0);
  REQUIRE(world.handler.last_chunk.ready);
  std::uint64_t value = 0;
  CHECK(::read(world.handler.last_chunk.ready.get(), &value, sizeof(value)) < 0);
  REQUIRE(::eventfd_write(ready.get(), 5) == 0);
  REQUIRE(::read(world.handler.last_chunk.ready.get(), &value, sizeof(value)) == sizeof(value));
  CHECK(value == 5);
}

TEST_CASE("an expectation arrives with every field") {
  Attached world;
  const std::vector<std::uint32_t> pages = {63, 0, 5};
  kvf_expectation expectation = expectation_of(pages);
  expectation.prefix = 64;
  expectation.aux_slot = 2;
  expectation.prefill_dp_rank = 6;
  REQUIRE(kvf_expect(world.engine.get(), &expectation) == 0);
  const EngineExpectation& got = world.handler.last_expectation;
  CHECK(got.room == 7);
  CHECK(got.bootstrap == "10.0.0.1:8998");
  CHECK(got.pages == pages);
  CHECK(got.prefix == 64);
  CHECK(got.token_count == 100);
  CHECK(got.aux_slot == 2);
  CHECK(got.prefill_dp_rank == 6);
}

TEST_CASE("an abort arrives with its reason, cleaned") {
  Attached world;
  REQUIRE(kvf_abort(world.engine.get(), 7, "client \xFF left\n") == 0);
  CHECK(world.handler.last_reason == "client ? left?");
  REQUIRE(kvf_abort(world.engine.get(), 8, nullptr) == 0);
  CHECK(world.handler.last_reason.empty());
  CHECK(kvf_abort(world.engine.get(), 0, "x") == -KVF_INVALID);
}

TEST_CASE("a refused call says why, changes nothing, and may be repeated") {
  Attached world;
  int calls = 0;
  world.server.run([&](EngineServer&) {
    world.handler.send_hook = [&](EngineId, const EngineChunk& chunk) -> Result<void> {
      if (++calls == 1) {
        return fail(Code::kConflict, "room {} is alive already", chunk.room);
      }
      return {};
    };
  });
  const std::vector<std::uint32_t> pages = {1};
  const kvf_chunk chunk = chunk_of(77, pages);
  CHECK(kvf_send(world.engine.get(), &chunk) == -KVF_CONFLICT);
  CHECK(std::string(kvf_last_error(world.engine.get())) == "room 77 is alive already");
  CHECK(kvf_send(world.engine.get(), &chunk) == 0);
}

TEST_CASE("the handler's own protocol error does not end the connection") {
  Attached world;
  world.server.run([&](EngineServer&) {
    world.handler.send_hook = [](EngineId, const EngineChunk&) -> Result<void> {
      return fail(Code::kProtocol, "the peer daemon broke the protocol");
    };
  });
  const std::vector<std::uint32_t> pages = {1};
  const kvf_chunk chunk = chunk_of(7, pages);
  CHECK(kvf_send(world.engine.get(), &chunk) == -KVF_PROTOCOL);
  CHECK(kvf_abort(world.engine.get(), 7, "") == 0);
}

TEST_CASE("what names a page, slot or room outside the pool never reaches the handler") {
  Attached world;
  const auto send_error = [&](const std::vector<std::uint32_t>& pages,
                              const std::function<void(kvf_chunk&)>& change) -> std::string {
    kvf_chunk chunk = chunk_of(7, pages);
    change(chunk);
    CHECK(kvf_send(world.engine.get(), &chunk) == -KVF_INVALID);
    return kvf_last_error(world.engine.get());
  };
  CHECK(send_error({0, 64}, [](kvf_chunk&) {}) == "pages[1] is 64, but the pool has 64 pages");
  CHECK_THAT(send_error({}, [](kvf_chunk& c) { c.room = 0; }), Catch::Contains("room is 0"));
  CHECK_THAT(send_error({}, [](kvf_chunk& c) { c.room = 1ull << 63; }), Catch::Contains("2^63-1"));
  CHECK(send_error({}, [](kvf_chunk& c) { c.last = 1, c.aux_slot = 4; }) ==
        "aux_slot is 4, but the pool has 4 aux slots");
  CHECK_THAT(send_error({}, [](kvf_chunk& c) { c.aux_slot = 0; }), Catch::Contains("not the last"));
  CHECK_THAT(send_error({}, [](kvf_chunk& c) { c.aux_slot = -2; }), Catch::Contains("aux_slot is -2"));
  CHECK_THAT(send_error({}, [](kvf_chunk& c) { c.token_count = ~0ull; }), Catch::Contains("token_count is"));
  CHECK_THAT(send_error({}, [](kvf_chunk& c) { c.page_count = 1, c.pages = nullptr; }),
             Catch::Contains("chunk.pages is NULL"));
  CHECK_THAT(send_error({}, [](kvf_chunk& c) { c.struct_size = 0; }),
             Catch::Contains("kvf_chunk.struct_size"));

  const std::vector<std::uint32_t> pages = {1};
  const auto expect_error = [&](const std::function<void(kvf_expectation&)>& change) -> std::string {
    kvf_expectation expectation = expectation_of(pages);
    change(expectation);
    CHECK(kvf_expect(world.engine.get(), &expectation) == -KVF_INVALID);
    return kvf_last_error(world.engine.get());
  };
  CHECK(expect_error([](kvf_expectation& e) { e.prefix = 101; }) == "prefix is 101, legal are 0 to 100");
  CHECK_THAT(expect_error([](kvf_expectation& e) { e.bootstrap = ""; }),
             Catch::Contains("bootstrap is empty"));
  CHECK_THAT(expect_error([](kvf_expectation& e) { e.bootstrap = nullptr; }),
             Catch::Contains("bootstrap is NULL"));
  CHECK_THAT(expect_error([](kvf_expectation& e) { e.prefill_dp_rank = -7; }),
             Catch::Contains("prefill_dp_rank is -7"));
  CHECK(world.handler.lines() == std::vector<std::string>{"attach 1"});
}

TEST_CASE("a request above the frame limit is refused by name of the limit and ends that connection only") {
  TempFolder folder;
  RecordingHandler handler;
  EngineServerOptions options = options_in(folder);
  options.frame_bytes_max = 4096;
  RunningServer server(handler, options);
  const SmallPool pool;
  const Engine large = attach(options.path, pool.pool);
  const Engine small = attach(options.path, pool.pool);
  const std::vector<std::uint32_t> pages(1u << 20, 1);
  const kvf_chunk chunk = chunk_of(7, pages);
  CHECK(kvf_send(large.get(), &chunk) == -KVF_PROTOCOL);
  CHECK_THAT(kvf_last_error(large.get()), Catch::Contains("legal are 1 to 4096 (frame_bytes_max)"));
  CHECK(handler.wait_for("gone 1"));
  CHECK(kvf_send(large.get(), &chunk) == -KVF_UNAVAILABLE);
  CHECK(kvf_abort(small.get(), 7, "") == 0);
}
