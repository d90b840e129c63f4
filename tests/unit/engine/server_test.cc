// The socket file, and who may connect.

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <boost/asio/io_context.hpp>
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>

#include "tests/unit/engine/engine_fixture.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

Result<void> try_start(const EngineServerOptions& options) {
  boost::asio::io_context io;
  RecordingHandler handler;
  EngineServer server(io, options, handler);
  return server.start();
}

// What a killed daemon leaves: a socket file that nobody listens on.
void leave_stale_socket(const std::string& path) {
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  REQUIRE(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
}

std::string attach_error(const std::string& path, int expected) {
  const SmallPool pool;
  kvf_engine* engine = nullptr;
  std::array<char, 512> error{};
  CHECK(kvf_attach(path.c_str(), &pool.pool, &engine, error.data(), error.size()) == -expected);
  return error.data();
}

}  // namespace

TEST_CASE("a stale socket file is replaced, and the file is gone after stop") {
  const TempFolder folder;
  const EngineServerOptions options = options_in(folder);
  leave_stale_socket(options.path);
  RecordingHandler handler;
  RunningServer server(handler, options);
  const SmallPool pool;
  { const Engine engine = attach(options.path, pool.pool); }
  server.stop();
  CHECK(folder.entries() == 0);
}

TEST_CASE("a second daemon on the same path is refused and leaves the first alone") {
  const TempFolder folder;
  const EngineServerOptions options = options_in(folder);
  RecordingHandler handler;
  RunningServer server(handler, options);
  const auto second = try_start(options);
  REQUIRE_FALSE(second);
  CHECK(second.error().code == Code::kConflict);
  CHECK_THAT(second.error().message, Catch::Contains("another process listens on " + options.path));
  const SmallPool pool;
  const Engine engine = attach(options.path, pool.pool);
}

TEST_CASE("a daemon that stops does not remove its successor's socket file") {
  const TempFolder folder;
  const EngineServerOptions options = options_in(folder);
  RecordingHandler handler;
  RunningServer server(handler, options);
  REQUIRE(::unlink(options.path.c_str()) == 0);
  RecordingHandler next_handler;
  RunningServer next(next_handler, options);
  server.stop();
  const SmallPool pool;
  const Engine engine = attach(options.path, pool.pool);
}

TEST_CASE("a path that is a file, a missing folder or too long is refused and untouched") {
  const TempFolder folder;
  EngineServerOptions options = options_in(folder);
  std::ofstream(options.path) << "precious";
  const auto file = try_start(options);
  REQUIRE_FALSE(file);
  CHECK_THAT(file.error().message, Catch::Contains("exists and is not a socket"));
  std::string text;
  std::ifstream(options.path) >> text;
  CHECK(text == "precious");
  options.path = folder.file("missing/engine.sock");
  const auto missing = try_start(options);
  REQUIRE_FALSE(missing);
  CHECK_THAT(missing.error().message, Catch::Contains("No such file or directory"));
  options.path = folder.file(std::string(120, 'x'));
  const auto too_long = try_start(options);
  REQUIRE_FALSE(too_long);
  CHECK_THAT(too_long.error().message, Catch::Contains("legal are 1 to 107"));
}

TEST_CASE("the socket file has exactly the mode of the options") {
  const TempFolder folder;
  EngineServerOptions options = options_in(folder);
  options.mode = 0666;
  const mode_t old_mask = ::umask(0077);
  RecordingHandler handler;
  RunningServer server(handler, options);
  ::umask(old_mask);
  struct stat status {};
  REQUIRE(::stat(options.path.c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0666);
}

TEST_CASE("a uid outside the list is refused by number and setting") {
  const TempFolder folder;
  EngineServerOptions options = options_in(folder);
  options.allowed_uids = {::geteuid() + 1, ::geteuid() + 2};
  RecordingHandler handler;
  RunningServer server(handler, options);
  const std::string error = attach_error(options.path, KVF_UNAUTHORIZED);
  CHECK_THAT(error, Catch::Contains(fmt::format("uid {} ", ::geteuid())));
  CHECK_THAT(error, Catch::Contains("allowed_uids"));
  CHECK(handler.lines().empty());
}

TEST_CASE("a uid outside the list attaches with a group of the other list") {
  const TempFolder folder;
  EngineServerOptions options = options_in(folder);
  options.allowed_uids = {::geteuid() + 1};
  options.allowed_gids = {::getegid() + 1};
  {
    RecordingHandler handler;
    RunningServer server(handler, options);
    CHECK_THAT(attach_error(options.path, KVF_UNAUTHORIZED),
               Catch::Contains(fmt::format("gids {}", ::getegid() + 1)));
  }
  options.allowed_gids.push_back(::getegid());
  RecordingHandler handler;
  RunningServer server(handler, options);
  const SmallPool pool;
  const Engine engine = attach(options.path, pool.pool);
  CHECK(handler.lines().size() == 1);
}

TEST_CASE("one engine more than engines_max is refused, and admitted when another has left") {
  const TempFolder folder;
  EngineServerOptions options = options_in(folder);
  options.engines_max = 2;
  RecordingHandler handler;
  RunningServer server(handler, options);
  const SmallPool pool;
  Engine first = attach(options.path, pool.pool);
  const Engine second = attach(options.path, pool.pool);
  CHECK(attach_error(options.path, KVF_EXHAUSTED) ==
        "2 engines are connected, engines_max is 2: raise engines_max");
  first.reset();
  REQUIRE(handler.wait_for("gone 1"));
  const Engine third = attach(options.path, pool.pool);
}

TEST_CASE("requests before the attach and a second attach are refused, the connection goes on") {
  const TempFolder folder;
  RecordingHandler handler;
  RunningServer server(handler, options_in(folder));
  const SmallPool pool;
  RawClient client(options_in(folder).path);
  REQUIRE(client.send(wire::encode(5, wire::Abort{7, ""})));
  auto reply = client.reply();
  REQUIRE(reply);
  CHECK(reply->seq == 5);
  CHECK(reply->code == KVF_INVALID);
  CHECK(reply->message == "abort before an accepted attach: attach first");
  REQUIRE(client.send(wire::encode(6, small_attach(), 1), {pool.fd.get()}));
  reply = client.reply();
  REQUIRE(reply);
  CHECK(reply->seq == 6);
  CHECK(reply->code == 0);
  REQUIRE(client.send(wire::encode(7, small_attach(), 1), {pool.fd.get()}));
  reply = client.reply();
  REQUIRE(reply);
  CHECK(reply->seq == 7);
  CHECK_THAT(reply->message, Catch::Contains("second attach"));
  REQUIRE(client.send(wire::encode(8, wire::Abort{7, ""})));
  reply = client.reply();
  REQUIRE(reply);
  CHECK(reply->seq == 8);
  CHECK(reply->code == 0);
}
