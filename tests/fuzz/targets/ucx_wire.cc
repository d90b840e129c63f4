// What two UCX fabrics say to each other: offer, hello, block, and the keys of a pool for puts.

#include "tests/fuzz/fuzz.h"
#include "transport/ucx/wire.h"

namespace kvferry::fuzz {
namespace {

std::string text_of_hello(const ucx::Hello& hello) {
  std::array<std::byte, ucx::kHelloBytes> bytes{};
  ucx::encode_hello(hello, bytes);
  return string_of(bytes);
}

std::string text_of_block(const ucx::BlockMessage& message) {
  std::array<std::byte, ucx::kBlockMessageBytes> bytes{};
  ucx::encode_block_message(message, bytes);
  return string_of(bytes);
}

}  // namespace

std::vector<std::string> seeds() {
  const ucx::Token token{std::byte{9}, std::byte{8}};
  const std::vector<std::byte> address = {std::byte{1}, std::byte{2}, std::byte{3}};
  ucx::RemotePool pool;
  pool.rank = 3;
  pool.regions = {{4096, 8192, address}};
  pool.buffers = {{0, 4096, 10, 64}, {0, 8192, 8, 128}};
  return {"o" + ucx::encode_offer({"1.13.1", UcxTransports::kTcp, false, address, token}),
          "o" + ucx::encode_offer({"1.13.1", UcxTransports::kRdma, true, address, token}),
          "h" + text_of_hello({token, 4711}),
          "b" + text_of_block({4711, 4096, make_notice({{7, 1, 0}, 2}, 8192, 3)}),
          "b" + text_of_block({4711, 0, make_drain({{7, 1, 0}, 2})}),
          "p" + ucx::encode_pool(pool)};
}

namespace {

void check_offer(std::string_view text) {
  const auto offer = ucx::decode_offer(text);
  if (!offer) {
    return check_reason(offer.error());
  }
  const std::string again = ucx::encode_offer(*offer);
  const auto second = ucx::decode_offer(again);
  KVF_CHECK(second && ucx::encode_offer(*second) == again);
}

void check_hello(std::string_view text) {
  const auto hello = ucx::decode_hello(bytes_of(text));
  if (!hello) {
    return check_reason(hello.error());
  }
  KVF_CHECK(text_of_hello(*hello) == text.substr(0, ucx::kHelloBytes));
}

void check_block(std::string_view text) {
  const auto message = ucx::decode_block_message(bytes_of(text));
  if (!message) {
    return check_reason(message.error());
  }
  KVF_CHECK(text_of_block(*message) == text.substr(0, ucx::kBlockMessageBytes));
}

void check_pool(std::string_view text) {
  const auto pool = ucx::decode_pool(text);
  if (!pool) {
    return check_reason(pool.error());
  }
  for (const ucx::RemotePool::Buffer& buffer : pool->buffers) {
    KVF_CHECK(buffer.region < pool->regions.size());
    const ucx::RemotePool::Region& region = pool->regions[buffer.region];
    const auto bytes = static_cast<unsigned __int128>(buffer.rows) * buffer.row_bytes;
    KVF_CHECK(buffer.base >= region.base);
    KVF_CHECK(buffer.base - region.base + bytes <= region.bytes);
  }
  const std::string again = ucx::encode_pool(*pool);
  const auto second = ucx::decode_pool(again);
  KVF_CHECK(second && ucx::encode_pool(*second) == again);
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry::fuzz;
  Input input(data, size);
  switch (input.byte()) {
    case 'o':
      check_offer(input.rest());
      return 0;
    case 'h':
      check_hello(input.rest());
      return 0;
    case 'b':
      check_block(input.rest());
      return 0;
    default:
      check_pool(input.rest());
      return 0;
  }
}
