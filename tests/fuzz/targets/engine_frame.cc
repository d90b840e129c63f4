// A stream of the engine socket: the first byte says how it is cut into reads, which must not matter. Every
// frame is opened and decoded as what it says it is, on both ends, and what decodes comes back the same.

#include <algorithm>

#include "common/engine/wire.h"
#include "tests/fuzz/fuzz.h"

namespace kvferry::fuzz {
namespace {

constexpr std::uint32_t kFrameMax = 1u << 20;

wire::Attach sample_attach() {
  wire::Attach attach;
  attach.coord = RankCoord{1, 2, 3, 4};
  attach.dtype = "bf16";
  attach.layout.page_size = 64;
  attach.layout.buffers = {BufferPlace{BufferShape{0, BufferKind::kLatent, 1152, 10}, 0, 64},
                           BufferPlace{BufferShape{61, BufferKind::kLatent, 1152, 10, 128, 256}, 0, 1 << 20}};
  attach.layout.aux = {AuxField{"bootstrap_room", 16, 32, 1, 0}, AuxField{"output_ids", 64, 32, 1, 4096}};
  return attach;
}

void check_error(const Error& error) {
  check_reason(error);
  KVF_CHECK(error.code == Code::kProtocol || error.code == Code::kInvalid || error.code == Code::kMismatch);
}

// `encode_again` gives the frame of what was decoded; its frame's body decodes to an equal frame.
template <class Message, class Decode, class Encode>
void check_message(const wire::Envelope& envelope, Decode decode, Encode encode_again) {
  const Result<Message> message = decode(envelope);
  if (!message) {
    check_error(message.error());
    return;
  }
  const std::string frame = encode_again(*message);
  const auto opened = wire::open(bytes_of(frame).subspan(kFrameHeaderBytes));
  KVF_CHECK(opened.has_value() && opened->op == envelope.op && opened->seq == envelope.seq);
  const Result<Message> second = decode(*opened);
  KVF_CHECK(second.has_value() && encode_again(*second) == frame);
}

void check_frame(std::span<const std::byte> body) {
  using namespace wire;
  const auto envelope = open(body);
  if (!envelope) {
    check_error(envelope.error());
    return;
  }
  const std::uint64_t seq = envelope->seq;
  const std::size_t fds = envelope->fds;
  switch (envelope->op) {
    case Op::kAttach:
      return check_message<Attach>(*envelope, decode_attach,
                                   [&](const Attach& m) { return encode(seq, m, fds); });
    case Op::kSend:
      return check_message<Send>(*envelope, decode_send, [&](const Send& m) { return encode(seq, m, fds); });
    case Op::kExpect:
      return check_message<Expect>(*envelope, decode_expect, [&](const Expect& m) { return encode(seq, m); });
    case Op::kAbort:
      return check_message<Abort>(*envelope, decode_abort, [&](const Abort& m) { return encode(seq, m); });
    case Op::kReply:
      return check_message<Reply>(*envelope, decode_reply, [](const Reply& m) { return encode(m); });
    case Op::kEvent:
      return check_message<Event>(*envelope, decode_event, [](const Event& m) { return encode(m); });
    case Op::kDetach:
      if (const auto done = decode_detach(*envelope); !done) {
        check_error(done.error());
      }
      return;
  }
}

struct Cut {
  std::vector<std::string> frames;
  bool broken = false;

  friend bool operator==(const Cut&, const Cut&) = default;
};

Cut cut(std::string_view stream, std::size_t read_bytes) {
  Cut out;
  FrameBuffer buffer(kFrameMax);
  while (!stream.empty() && !out.broken) {
    buffer.append(bytes_of(stream.substr(0, read_bytes)));
    stream.remove_prefix(std::min(read_bytes, stream.size()));
    for (;;) {
      const auto next = buffer.next();
      out.broken = !next;
      if (!next || !*next) {
        break;
      }
      out.frames.emplace_back(reinterpret_cast<const char*>((*next)->data()), (*next)->size());
    }
  }
  return out;
}

}  // namespace

std::vector<std::string> seeds() {
  const HybridRows hybrid{{9, 11}, 896, 3};
  const std::vector<std::string> frames = {
      wire::encode(1, sample_attach(), 2),
      wire::encode(2, wire::Send{kRoomMax, {0, 1, UINT32_MAX}, 64, 1000, true, 3, true, hybrid}, 1),
      wire::encode(6, wire::Send{7, {0, 1}, 64, 128, false, -1, true, {}, 4, 8}, 1),
      wire::encode(3, wire::Expect{7, "[2001:db8::7]:8998", {5, 4, 3}, 128, 1000, -1, 2, hybrid}),
      wire::encode(4, wire::Abort{7, "the client went away", true}),
      wire::encode_detach(5),
      wire::encode(wire::Reply{4, 3, "room 7 is alive already"}),
      wire::encode(wire::Event{5, 7, 1000, 1 << 20, 12345, 12, "aborted"}),
      wire::encode(wire::Event{2, 7, 64, 0, 0, 0, "", 8}),
  };
  std::vector<std::string> all;
  std::string together = "\x05";
  for (const std::string& frame : frames) {
    all.push_back("\xFF" + frame);
    together += frame;
  }
  all.push_back(together);
  return all;
}

}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry::fuzz;
  Input input(data, size);
  const std::size_t read_bytes = std::size_t{1} + input.byte();
  const std::string_view stream = input.rest();
  const Cut whole = cut(stream, std::max<std::size_t>(stream.size(), 1));
  KVF_CHECK(cut(stream, read_bytes) == whole);
  for (const std::string& body : whole.frames) {
    check_frame(bytes_of(body));
  }
  return 0;
}
