// The ABI from C++, and its manners with NULL. c_header.c is the same header for a C99 compiler.

#include <catch2/catch.hpp>
#include <string>

#include "tests/unit/engine/engine_fixture.h"

TEST_CASE("NULL engines and structs are refused, never followed") {
  kvf_event event = kvferry::test::empty_event();
  CHECK(kvf_send(nullptr, nullptr) == -KVF_INVALID);
  CHECK(kvf_expect(nullptr, nullptr) == -KVF_INVALID);
  CHECK(kvf_abort(nullptr, 1, nullptr) == -KVF_INVALID);
  CHECK(kvf_next_event(nullptr, &event, 0) == -KVF_INVALID);
  CHECK(kvf_event_fd(nullptr) == -KVF_INVALID);
  CHECK(std::string(kvf_last_error(nullptr)) == "engine is NULL");
  kvf_detach(nullptr);
  CHECK(kvf_attach("x", nullptr, nullptr, nullptr, 0) == -KVF_INVALID);
  kvf_engine* engine = nullptr;
  CHECK(kvf_attach("x", nullptr, &engine, nullptr, 0) == -KVF_INVALID);
  CHECK(kvf_attach(nullptr, nullptr, &engine, nullptr, 0) == -KVF_INVALID);
}

TEST_CASE("NULL and wrongly sized structs on a live engine are refused by name") {
  const kvferry::test::TempFolder folder;
  kvferry::test::RecordingHandler handler;
  kvferry::test::RunningServer server(handler, kvferry::test::options_in(folder));
  const kvferry::test::SmallPool pool;
  const auto engine = kvferry::test::attach(kvferry::test::options_in(folder).path, pool.pool);
  CHECK(kvf_send(engine.get(), nullptr) == -KVF_INVALID);
  CHECK(std::string(kvf_last_error(engine.get())) == "kvf_chunk is NULL");
  CHECK(kvf_expect(engine.get(), nullptr) == -KVF_INVALID);
  CHECK(kvf_next_event(engine.get(), nullptr, 0) == -KVF_INVALID);
  kvf_event event{};
  CHECK(kvf_next_event(engine.get(), &event, 0) == -KVF_INVALID);
  CHECK_THAT(kvf_last_error(engine.get()), Catch::Contains("kvf_event.struct_size is 0"));
  CHECK(std::string(kvf_version()) == KVF_VERSION);
}
