#include "tools/engine/role.h"

#include <cstring>

namespace kvferry {

Error refusal(const Rank& rank, const char* call, int code) {
  const char* text = rank.engine() == nullptr ? "not attached" : kvf_last_error(rank.engine());
  return Error{code_from_number(static_cast<std::uint8_t>(-code)),
               fmt::format("{} on rank {} was refused: {}", call, rank.index(), text)};
}

nlohmann::json failure_event(Room room, const Error& error) {
  return {{"event", error.code == Code::kAborted ? "aborted" : "failed"},
          {"room", room},
          {"code", to_string(error.code)},
          {"reason", error.message}};
}

void report_stray(EventSink& sink, const Rank& rank, const kvf_event& event) {
  if (event.type == KVF_EVENT_LANDED || event.type == KVF_EVENT_FAILED || event.type == KVF_EVENT_ABORTED) {
    sink.emit({{"event", "stray"},
               {"room", event.room},
               {"reason", fmt::format("rank {} got final event {} for room {}, which is not alive on it",
                                      rank.index(), event.type, event.room)}});
  }
}

Error event_error(const kvf_event& event) {
  const std::size_t size = ::strnlen(event.reason, sizeof(event.reason));
  const auto number = static_cast<std::uint8_t>(event.code < 0 || event.code > 255 ? 0 : event.code);
  const Code code = event.type == KVF_EVENT_ABORTED ? Code::kAborted : code_from_number(number);
  return Error{code, std::string(event.reason, size)};
}

}  // namespace kvferry
