#include "transport/ucx/outbox.h"

#include <cstring>

#include "common/base/check.h"

namespace kvferry::ucx {

void Outbox::push(MessageId id, std::span<const std::byte> header, std::span<const std::byte> body) {
  messages_.push_back(Item{id, {header.begin(), header.end()}, {body.begin(), body.end()}});
}

void Outbox::push_session(MessageId id, Session session, std::string_view body) {
  std::array<std::byte, kSessionBytes> header{};
  put_u64(header.data(), session);
  push(id, header, std::as_bytes(std::span(body)));
}

void Outbox::push_block(Session session, const BlockHeader& block) {
  std::array<std::byte, kBlockMessageBytes> header{};
  encode_block_message(BlockMessage{session, 0, block}, header);
  push(kBlock, header);
}

void Outbox::flush(Endpoint& endpoint) {
  while (!messages_.empty()) {
    Op* op = endpoint.take_control();
    if (op == nullptr) {
      return;
    }
    Item& item = messages_.front();
    KVF_CHECK(item.header.size() <= op->header.size());
    std::memcpy(op->header.data(), item.header.data(), item.header.size());
    op->header_bytes = static_cast<std::uint32_t>(item.header.size());
    op->body = std::move(item.body);
    const MessageId id = item.id;
    messages_.pop_front();
    endpoint.send(id, op);
  }
}

}  // namespace kvferry::ucx
