// The owner of shared memory learns whether another process may still write it, whatever happened to that.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>
#include <csignal>

#include "common/pool/writer_lock.h"

using namespace kvferry;

namespace {

std::vector<UniqueFd> memory() {
  std::vector<UniqueFd> out;
  out.emplace_back(::memfd_create("writers", MFD_ALLOW_SEALING));
  REQUIRE(out[0]);
  REQUIRE(::ftruncate(out[0].get(), 4096) == 0);
  return out;
}

}  // namespace

TEST_CASE("a writer is seen through the owner's own descriptor, and not once it has let go") {
  const auto fds = memory();
  CHECK(has_writers(fds[0].get()) == false);
  {
    const auto lock = WriterLock::take(fds);
    REQUIRE(lock);
    CHECK(has_writers(fds[0].get()) == true);
    const auto second = WriterLock::take(fds);  // a second prefill daemon
    REQUIRE(second);
    CHECK(has_writers(fds[0].get()) == true);
  }
  CHECK(has_writers(fds[0].get()) == false);
  CHECK_FALSE(has_writers(-1).has_value());
}

TEST_CASE("the kernel lets go for a writer that is killed") {
  const auto fds = memory();
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const auto lock = WriterLock::take(fds);
    const char answer = lock ? 'y' : 'n';
    (void)!::write(ready[1], &answer, 1);
    ::pause();
    ::_exit(1);
  }
  char answer = 0;
  REQUIRE(::read(ready[0], &answer, 1) == 1);
  CHECK(answer == 'y');
  CHECK(has_writers(fds[0].get()) == true);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  CHECK(has_writers(fds[0].get()) == false);
  ::close(ready[0]);
  ::close(ready[1]);
}
