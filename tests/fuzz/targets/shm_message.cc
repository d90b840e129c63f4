// The messages of a shm session in both directions, and its offer: what parses comes back the same.

#include "tests/fuzz/fuzz.h"
#include "transport/shm/message.h"

namespace kvferry::fuzz {

std::vector<std::string> seeds() {
  const std::string token = "00112233445566778899aabbccddeeff";
  PoolLayout layout;
  layout.rank = 3;
  layout.page_size = 64;
  layout.buffers = {BufferPlace{BufferShape{0, BufferKind::kLatent, 1152, 10}, 0, 64},
                    BufferPlace{BufferShape{61, BufferKind::kKey, 128, 10, 128, 256}, 0, 1 << 20}};
  layout.aux = {AuxField{"bootstrap_room", 16, 32, 1, 4096}};
  return {"s" + shm::to_text(shm::Hello{token}),
          "s" + shm::to_text(shm::Notice{{{kRoomMax, 2, 3}, 4}, 5, 1ull << 40, 7}),
          "r" + shm::to_text(shm::Welcome{UINT64_MAX, 2}),
          "r" + shm::to_text(shm::PoolAdded{1, 2, layout}),
          "r" + shm::to_text(shm::PoolGone{3, 1}),
          "r" + shm::to_text(shm::Refused{Error{Code::kUnauthorized, "wrong token"}}),
          "o" + shm::to_text(shm::Offer{"host", "/run/kvferry/decode-shm.sock", token, 77})};
}

namespace {

template <class Message>
void check_variant(const Result<Message>& message, Result<Message> (*parse)(std::string_view)) {
  if (!message) {
    KVF_CHECK(message.error().code == Code::kProtocol);
    return check_reason(message.error());
  }
  const auto text = [](const Message& one) {
    return std::visit([](const auto& alternative) { return shm::to_text(alternative); }, one);
  };
  const std::string again = text(*message);
  const auto second = parse(again);
  KVF_CHECK(second && second->index() == message->index() && text(*second) == again);
}

void check_offer(std::string_view input) {
  const auto offer = shm::parse_offer(input);
  if (!offer) {
    return check_reason(offer.error());
  }
  const auto second = shm::parse_offer(shm::to_text(*offer));
  KVF_CHECK(second && shm::to_text(*second) == shm::to_text(*offer));
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  const std::uint8_t which = input.byte();
  const std::string_view text = input.rest();
  if (which == 's') {
    fuzz::check_variant<shm::FromSender>(shm::parse_from_sender(text), shm::parse_from_sender);
  } else if (which == 'r') {
    fuzz::check_variant<shm::FromReceiver>(shm::parse_from_receiver(text), shm::parse_from_receiver);
  } else {
    fuzz::check_offer(text);
  }
  return 0;
}
