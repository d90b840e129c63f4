// The shm fabric moves exactly the planned bytes, under every layout pair of the fixture.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "tests/unit/fabric/shm_support.h"

namespace kvferry::test {
namespace {

TEST_CASE("shm: every layout pair lands with all bytes right and no other byte touched") {
  for (const FabricCase& spec : standard_cases()) {
    for (const std::uint32_t threads : {1u, 3u}) {
      for (const std::uint64_t slice_bytes : {std::uint64_t{4096}, std::uint64_t{2} << 20}) {
        ShmSendOptions options;
        options.copy_threads = threads;
        options.slice_bytes = slice_bytes;
        ShmEnds ends(options);
        FabricFixture fixture(spec);
        INFO(spec.name << ", " << threads << " threads, slices of " << slice_bytes);
        CHECK(fixture.run(*ends.send, ends.send_log, *ends.receive, ends.receive_log) == "");
        CHECK(ends.receive_log.count<fabric_event::Rejected>() == 0);
      }
    }
  }
}

TEST_CASE("shm: a decode prefix is left alone") {
  FabricCase spec{"MLA DCP 1 -> 4 behind a prefix", small_mla(), tp(1), tp(4, 4)};
  spec.prefix = 64;
  ShmEnds ends;
  FabricFixture fixture(spec);
  CHECK(fixture.run(*ends.send, ends.send_log, *ends.receive, ends.receive_log) == "");
}

TEST_CASE("shm: PeerUp says what carries the bytes, ChunkDone what was moved and when") {
  ShmEnds ends;
  const auto source = plain_pool(0, 8, std::byte{0x11});
  ends.receive->add_pool(plain_pool(0, 8, std::byte{0}));
  REQUIRE(ends.connect());
  CHECK(ends.send_log.all<fabric_event::PeerUp>()[0].carries.rfind("shm 1x ", 0) == 0);
  ends.send->post(kPeer, chunk(transfer_key(1), row_plan(32), source));
  REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>());
  const auto done = ends.send_log.all<fabric_event::ChunkDone>()[0];
  CHECK(done.bytes == 32 * kRowBytes);
  CHECK(done.writes == 1);
  CHECK(done.first_post > 0);
  CHECK(done.last_done > done.first_post);
}

TEST_CASE("shm: an empty last chunk lands with the bytes of the chunks before it") {
  ShmEnds ends;
  const auto source = plain_pool(0, 8, std::byte{0x11});
  ends.receive->add_pool(plain_pool(0, 8, std::byte{0}));
  Grant grant;
  grant.key = transfer_key(1).grant;
  grant.pages = std::make_shared<const std::vector<std::uint32_t>>(std::vector<std::uint32_t>{0, 1});
  grant.sources.emplace_back(0, kPeer);
  ends.receive->open(grant);
  REQUIRE(ends.connect());
  ends.send->post(kPeer, chunk(transfer_key(1), row_plan(32), source));
  ends.send->post(kPeer, chunk(transfer_key(1), std::make_shared<const Plan>(), source, true));
  REQUIRE(ends.receive_log.wait_for<fabric_event::Landed>());
  CHECK(ends.receive_log.all<fabric_event::Landed>()[0].bytes == 32 * kRowBytes);
}

TEST_CASE("shm: a short chunk does not wait for a long one") {
  ShmSendOptions options;
  options.copy_threads = 1;
  ShmEnds ends(options);
  const auto source = plain_pool(0, 64, std::byte{0x11});
  ends.receive->add_pool(plain_pool(0, 64, std::byte{0}));
  REQUIRE(ends.connect());
  ends.send->post(kPeer, chunk(transfer_key(1), endless_plan(), source));
  ends.send->post(kPeer, chunk(transfer_key(2), row_plan(16), source));
  REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>());
  CHECK(ends.send_log.all<fabric_event::ChunkDone>()[0].key == transfer_key(2));
  ends.send->cancel(kPeer, transfer_key(1));
  CHECK(ends.send_log.wait_for<fabric_event::Drained>());
  CHECK(ends.send_log.count<fabric_event::ChunkDone>() == 1);
}

TEST_CASE("shm: a pool with more descriptors than one socket call carries arrives whole") {
  constexpr std::uint32_t kBuffers = 300;
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  if (limit.rlim_cur < 3 * kBuffers) {
    WARN("left out: this test needs " << 3 * kBuffers << " descriptors, the limit is " << limit.rlim_cur);
    return;
  }
  const auto wide_pool = [](bool counted) {
    PoolLayout layout;
    layout.page_size = 1;
    std::vector<UniqueFd> fds;
    for (std::uint32_t i = 0; i < kBuffers; ++i) {
      layout.buffers.push_back(BufferPlace{BufferShape{i, BufferKind::kLatent, 64, 1}, i, 0});
      UniqueFd fd(::memfd_create("kvferry-test-wide", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      const std::vector<std::uint32_t> content(16, counted ? i + 1 : 0);
      KVF_CHECK(::write(fd.get(), content.data(), 64) == 64);
      KVF_CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
      fds.push_back(std::move(fd));
    }
    auto pool = Pool::map(std::move(layout), std::move(fds));
    KVF_CHECK(pool.has_value());
    return *pool;
  };
  const std::shared_ptr<Pool> destination = wide_pool(false);
  ShmEnds ends;
  ends.receive->add_pool(destination);
  // The source shares one descriptor between its buffers to stay below the limit.
  PoolLayout layout;
  layout.page_size = 1;
  for (std::uint32_t i = 0; i < kBuffers; ++i) {
    layout.buffers.push_back(BufferPlace{BufferShape{i, BufferKind::kLatent, 64, 1}, 0, 64u * i});
  }
  const auto source = make_pool(layout, std::byte{0});
  auto plan = std::make_shared<Plan>();
  plan->runs.push_back(RowRun{0, 0, 0, 1, 1, 1, 1});
  for (std::uint32_t i = 0; i < kBuffers; ++i) {
    const std::vector<std::uint32_t> content(16, i + 1);
    std::memcpy(source->buffer(i).data(), content.data(), 64);
    plan->pairs.push_back(BufferPair{i, i, 64, 64, 0, 0, 64});
  }
  plan->rows = 1;
  plan->bytes = 64 * kBuffers;
  REQUIRE(ends.connect());
  ends.send->post(kPeer, chunk(transfer_key(1), plan, source));
  INFO(ends.events());
  REQUIRE(ends.send_log.wait_for<fabric_event::ChunkDone>());
  for (std::uint32_t i = 0; i < kBuffers; ++i) {
    REQUIRE(std::memcmp(destination->buffer(i).data(), source->buffer(i).data(), 64) == 0);
  }
}

}  // namespace
}  // namespace kvferry::test
