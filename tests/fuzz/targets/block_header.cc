// A block header of a peer: what decodes is encoded to the same bytes, and its arithmetic does not overflow.

#include "tests/fuzz/fuzz.h"
#include "transport/block.h"

namespace kvferry::fuzz {
namespace {

std::string text_of_header(const BlockHeader& header) {
  BlockBytes bytes{};
  encode_block(header, bytes);
  return string_of(bytes);
}

}  // namespace

std::vector<std::string> seeds() {
  const TransferKey key{{kRoomMax, 7, 3}, 5};
  const BlockHeader rows{.key = key,
                         .target = 60,
                         .row_offset = 128,
                         .dst_index = 1 << 20,
                         .rows = 4,
                         .count = 3,
                         .step = 8,
                         .row_bytes = 64,
                         .payload_bytes = 4 * 3 * 64};
  const BlockHeader aux{.type = BlockType::kAux,
                        .key = key,
                        .target = 1,
                        .dst_index = 9,
                        .rows = 1,
                        .count = 1,
                        .step = 1,
                        .row_bytes = 16,
                        .payload_bytes = 16};
  BlockHeader drained = make_drain(key);
  drained.type = BlockType::kDrained;
  return {text_of_header(rows), text_of_header(aux), text_of_header(make_notice(key, 1ull << 40, 7)),
          text_of_header(make_drain(key)), text_of_header(drained)};
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const std::string_view text = fuzz::text_of(data, size);
  const auto header = decode_block(fuzz::bytes_of(text));
  if (!header) {
    KVF_CHECK(header.error().code == Code::kProtocol);
    fuzz::check_reason(header.error());
    return 0;
  }
  KVF_CHECK(fuzz::text_of_header(*header) == text.substr(0, kBlockHeaderBytes));
  if (header->type == BlockType::kRows) {
    KVF_CHECK(end_index(*header) > header->dst_index);
    KVF_CHECK(header->payload_bytes == std::uint64_t{header->rows} * header->count * header->row_bytes);
  }
  return 0;
}
