// Attaching: the memory really is shared, and every pool that cannot be meant is refused with a reason.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "common/pool/pool.h"
#include "tests/unit/engine/engine_fixture.h"

using namespace kvferry;
using namespace kvferry::test;

namespace {

struct Mapped {
  Mapped(int fd, std::size_t size)
      : bytes(size),
        base(static_cast<char*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0))) {
    REQUIRE(base != MAP_FAILED);
  }
  ~Mapped() { ::munmap(base, bytes); }
  std::size_t bytes;
  char* base;
};

std::string attach_error(const std::string& path, const kvf_pool& pool, int expected) {
  kvf_engine* engine = nullptr;
  std::array<char, 512> error{};
  CHECK(kvf_attach(path.c_str(), &pool, &engine, error.data(), error.size()) == -expected);
  CHECK(engine == nullptr);
  return error.data();
}

}  // namespace

TEST_CASE("two buffers on one descriptor arrive as one descriptor with the engine's memory behind it") {
  const TempFolder folder;
  RecordingHandler handler;
  RunningServer server(handler, options_in(folder));
  SmallPool pool;
  std::vector<kvf_buffer> buffers = {
      {0, KVF_KEY, 32, 32, pool.fd.get(), 0, 0, 0},
      {0, KVF_VALUE, 32, 32, pool.fd.get(), SmallPool::kBufferBytes / 2, 0, 0},
  };
  pool.pool.buffers = buffers.data();
  pool.pool.buffer_count = buffers.size();
  pool.pool.tp_rank = 1;
  pool.pool.pp_rank = 2;
  pool.pool.cp_rank = 3;
  pool.pool.dp_rank = 4;
  const Engine engine = attach(options_in(folder).path, pool.pool);

  const EngineAttach& got = handler.last_attach;
  CHECK(got.coord == RankCoord{1, 2, 3, 4});
  CHECK(got.dtype == Dtype::kBf16);
  CHECK(got.pid == ::getpid());
  REQUIRE(got.fds.size() == 1);
  REQUIRE(got.layout.buffers.size() == 2);
  CHECK(got.layout.buffers[1].shape ==
        BufferShape{0, BufferKind::kValue, 32, 32, pool.pool.page_size, pool.pool.page_size});
  CHECK(got.layout.buffers[1].offset == SmallPool::kBufferBytes / 2);
  CHECK((::fcntl(got.fds[0].get(), F_GETFD) & FD_CLOEXEC) != 0);

  const Mapped ours(pool.fd.get(), SmallPool::kBufferBytes);
  const Mapped theirs(got.fds[0].get(), SmallPool::kBufferBytes);
  ours.base[12345] = 77;
  CHECK(theirs.base[12345] == 77);
  theirs.base[SmallPool::kBufferBytes - 1] = 78;
  CHECK(ours.base[SmallPool::kBufferBytes - 1] == 78);
}

TEST_CASE("what the engine wrote is what the daemon's Pool reads, also after the engine's death") {
  const TempFolder folder;
  RecordingHandler handler;
  std::shared_ptr<Pool> mapped;
  handler.attach_hook = [&](EngineId, const EngineAttach&) -> Result<void> {
    KVF_TRY(mapped, Pool::map(handler.last_attach.layout, std::move(handler.last_attach.fds)));
    return {};
  };
  RunningServer server(handler, options_in(folder));
  std::optional<SmallPool> pool(std::in_place);
  {
    const Engine engine = attach(options_in(folder).path, pool->pool);
    const Mapped ours(pool->fd.get(), SmallPool::kBufferBytes + 8);
    ours.base[100] = 42;
    ours.base[SmallPool::kBufferBytes] = 43;
  }
  REQUIRE(handler.wait_for("gone 1"));
  pool.reset();
  REQUIRE(mapped);
  CHECK(mapped->buffer(0)[100] == std::byte{42});
  CHECK(mapped->aux_row(0, 0)[0] == std::byte{43});
}

TEST_CASE(
    "a pool that cannot be meant is refused with field, value and limit, and the next engine attaches") {
  const TempFolder folder;
  RecordingHandler handler;
  RunningServer server(handler, options_in(folder));
  const auto refused = [&](const std::function<void(SmallPool&)>& change, const std::string& expected) {
    SmallPool pool;
    change(pool);
    CHECK_THAT(attach_error(options_in(folder).path, pool.pool, KVF_INVALID), Catch::Contains(expected));
  };
  refused([](SmallPool& p) { p.pool.dtype = "fp17"; }, "fp17");
  refused([](SmallPool& p) { p.pool.dtype = nullptr; }, "pool.dtype is NULL");
  refused([](SmallPool& p) { p.pool.page_size = 0; }, "page_size is 0, legal are 1 to 65536");
  refused(
      [](SmallPool& p) {
        p.pool.buffer_count = 0;
        p.pool.aux_count = 0;
      },
      "buffers is empty");
  refused([](SmallPool& p) { p.pool.buffers = nullptr; }, "pool.buffers is NULL, but its count is 1");
  refused([](SmallPool& p) { p.buffer.kind = 7; }, "buffers[0].kind is 7");
  refused([](SmallPool& p) { p.buffer.row_bytes = 0; }, "buffers[0].row_bytes is 0");
  refused([](SmallPool& p) { p.buffer.pages = 1ull << 33; }, "buffers[0].pages is 8589934592");
  refused([](SmallPool& p) { p.buffer.fd = -1; }, "buffers[0].fd is -1");
  refused([](SmallPool& p) { p.buffer.fd = 999'999; },
          "pass 2 descriptors to the daemon: Bad file descriptor");
  refused([](SmallPool& p) { p.aux.name = ""; }, "aux[0].name is \"\"");
  refused([](SmallPool& p) { p.aux.name = "a\nb"; }, "aux[0].name is not UTF-8 without control characters");
  refused([](SmallPool& p) { p.aux.width = 0; }, "aux[0].width is 0");
  refused([](SmallPool& p) { p.aux.slots = 1u << 31; }, "aux[0].slots is 2147483648");
  refused([](SmallPool& p) { p.pool.struct_size = 8; }, "kvf_pool.struct_size is 8");
  refused([](SmallPool& p) { p.pool.buffer_count = wire::kBuffersMax + 1; }, "pool has 4097 buffers");
  CHECK(handler.lines().empty());
  const SmallPool good;
  const Engine engine = attach(options_in(folder).path, good.pool);
  CHECK(handler.lines().size() == 1);
}

TEST_CASE(
    "the handler's refusal of an attach reaches the engine word for word, and its descriptors are closed") {
  const TempFolder folder;
  RecordingHandler handler;
  handler.attach_hook = [&](EngineId, const EngineAttach&) -> Result<void> {
    handler.last_attach = EngineAttach{};
    return fail(Code::kMismatch, "tp rank 9 is outside the topology's 8: start the engine with tp 8");
  };
  RunningServer server(handler, options_in(folder));
  const SmallPool pool;
  const std::size_t before = open_fds();
  CHECK(attach_error(options_in(folder).path, pool.pool, KVF_MISMATCH) ==
        "tp rank 9 is outside the topology's 8: start the engine with tp 8");
  server.stop();
  CHECK(open_fds() < before);  // the server's own descriptors are gone, too
  CHECK(handler.count("gone 1") == 0);
}

TEST_CASE("65 different descriptors are refused by the client before anything is sent") {
  const TempFolder folder;
  RecordingHandler handler;
  RunningServer server(handler, options_in(folder));
  SmallPool pool;
  std::vector<UniqueFd> fds;
  std::vector<kvf_buffer> buffers;
  for (std::uint32_t i = 0; i < wire::kFdsMax + 1; ++i) {
    fds.emplace_back(::fcntl(pool.fd.get(), F_DUPFD_CLOEXEC, 0));
    buffers.push_back({i, KVF_LATENT, 32, 1, fds.back().get(), 0, 0, 0});
  }
  pool.pool.buffers = buffers.data();
  pool.pool.buffer_count = buffers.size();
  pool.pool.aux_count = 0;
  CHECK_THAT(attach_error(options_in(folder).path, pool.pool, KVF_INVALID),
             Catch::Contains("buffers[64].fd is the 65th different descriptor, at most 64"));
  pool.pool.buffer_count = wire::kFdsMax;
  const Engine engine = attach(options_in(folder).path, pool.pool);
  CHECK(handler.last_attach.fds.size() == wire::kFdsMax);
}

TEST_CASE("the largest legal pool description is accepted") {
  const TempFolder folder;
  RecordingHandler handler;
  RunningServer server(handler, options_in(folder));
  SmallPool pool;
  std::vector<kvf_buffer> buffers(wire::kBuffersMax, pool.buffer);
  std::vector<kvf_aux_field> aux(wire::kAuxFieldsMax, pool.aux);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < aux.size(); ++i) {
    names.push_back("field" + std::to_string(i));
  }
  for (std::size_t i = 0; i < aux.size(); ++i) {
    aux[i].name = names[i].c_str();
  }
  pool.pool.buffers = buffers.data();
  pool.pool.buffer_count = buffers.size();
  pool.pool.aux = aux.data();
  pool.pool.aux_count = aux.size();
  const Engine engine = attach(options_in(folder).path, pool.pool);
  CHECK(handler.last_attach.layout.buffers.size() == wire::kBuffersMax);
  CHECK(handler.last_attach.layout.aux.back().name == "field255");
}

TEST_CASE("without a daemon the attach says so") {
  const TempFolder folder;
  const SmallPool pool;
  CHECK_THAT(attach_error(folder.file("nobody.sock"), pool.pool, KVF_UNAVAILABLE),
             Catch::Contains("No such file or directory: is the KVFerry daemon running"));
  CHECK_THAT(attach_error(std::string(200, 'x'), pool.pool, KVF_INVALID), Catch::Contains("has 200 bytes"));
}

TEST_CASE("a short error buffer gets the start of the reason, and NULL is legal") {
  const TempFolder folder;
  const SmallPool pool;
  kvf_engine* engine = nullptr;
  std::array<char, 8> error{};
  CHECK(kvf_attach(folder.file("nobody").c_str(), &pool.pool, &engine, error.data(), error.size()) ==
        -KVF_UNAVAILABLE);
  CHECK(std::string(error.data()) == "connect");
  CHECK(kvf_attach(folder.file("nobody").c_str(), &pool.pool, &engine, nullptr, 0) == -KVF_UNAVAILABLE);
}

// Pages of 16 rows: 16 keys of 128 bytes, then 16 scales of 4. Rows are the unit of a plan, so the distance
// of two pages must be whole keys.
TEST_CASE("index keys and scales share pages whose stride is whole keys; another stride says to pad") {
  const TempFolder folder;
  RecordingHandler handler;
  RunningServer server(handler, options_in(folder));
  SmallPool pool;
  pool.pool.page_size = 16;
  constexpr std::uint64_t kKeys = 16 * 128;
  constexpr std::uint64_t kPage = kKeys + 16 * 4;
  const auto buffers = [&](std::uint64_t stride) {
    return std::vector<kvf_buffer>{{0, KVF_INDEX_KEY, 128, 2, pool.fd.get(), 0, 0, stride},
                                   {0, KVF_INDEX_SCALE, 4, 2, pool.fd.get(), kKeys, 0, stride}};
  };
  auto tight = buffers(kPage);
  pool.pool.buffers = tight.data();
  pool.pool.buffer_count = tight.size();
  CHECK(attach_error(options_in(folder).path, pool.pool, KVF_INVALID) ==
        "buffers[0].page_stride 2112 is not a multiple of row_bytes 128; pad the pages to one");
  auto padded = buffers(kKeys + 128);
  pool.pool.buffers = padded.data();
  const Engine engine = attach(options_in(folder).path, pool.pool);
  REQUIRE(handler.last_attach.layout.buffers.size() == 2);
  CHECK(handler.last_attach.layout.buffers[0].shape.pitch == 17);
  CHECK(handler.last_attach.layout.buffers[1].shape.pitch == 544);
}
