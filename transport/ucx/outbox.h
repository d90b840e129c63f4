#pragma once
// Small control messages to one peer that wait for a free operation. Keeps their order. Worker's thread only.

#include <cstddef>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "transport/ucx/endpoint.h"
#include "transport/ucx/wire.h"

namespace kvferry::ucx {

class Outbox {
 public:
  /// A peer that makes us owe it more answers than this does not take part in the protocol.
  static constexpr std::size_t kMessagesMax = 65536;

  void push(MessageId id, std::span<const std::byte> header, std::span<const std::byte> body = {});
  void push_session(MessageId id, Session session, std::string_view body = {});
  void push_block(Session session, const BlockHeader& block);
  bool overflowed() const { return messages_.size() > kMessagesMax; }
  /// Sends what it can.
  void flush(Endpoint& endpoint);
  bool empty() const { return messages_.empty(); }

 private:
  struct Item {
    MessageId id;
    std::vector<std::byte> header;
    std::vector<std::byte> body;
  };
  std::deque<Item> messages_;
};

}  // namespace kvferry::ucx
