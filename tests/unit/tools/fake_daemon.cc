#include "fake_daemon.h"

#include <unistd.h>
#include <algorithm>

#include <cstdio>

struct kvf_engine {
  std::uint32_t tp_rank = 0;
};

namespace kvferry {

FakeDaemon& fake_daemon() {
  static FakeDaemon daemon;
  return daemon;
}

std::vector<FakeCall> FakeDaemon::named(const std::string& name) const {
  std::vector<FakeCall> found;
  std::copy_if(calls.begin(), calls.end(), std::back_inserter(found),
               [&](const FakeCall& call) { return call.name == name; });
  return found;
}

}  // namespace kvferry

using kvferry::fake_daemon;

int kvf_attach(const char*, const kvf_pool* pool, kvf_engine** out, char* error,
               size_t error_size) KVF_NOEXCEPT {
  std::snprintf(error, error_size, "as the test says");
  if (fake_daemon().attach_code == 0) {
    *out = new kvf_engine{pool->tp_rank};
    ++fake_daemon().attached;
  }
  return fake_daemon().attach_code;
}

int kvf_send(kvf_engine* engine, const kvf_chunk* chunk) KVF_NOEXCEPT {
  const int code = fake_daemon().send_codes[engine->tp_rank];
  if (code == 0) {
    fake_daemon().calls.push_back(
        {"send",
         engine->tp_rank,
         chunk->room,
         chunk->first_token,
         chunk->token_count,
         {chunk->pages, chunk->pages + chunk->page_count},
         chunk->last != 0,
         chunk->aux_slot,
         chunk->layer_begin,
         chunk->layer_end,
         chunk->ready_fd < 0 ? nullptr : std::make_shared<kvferry::UniqueFd>(::dup(chunk->ready_fd))});
  }
  return code;
}

int kvf_expect(kvf_engine* engine, const kvf_expectation* expectation) KVF_NOEXCEPT {
  const int code = fake_daemon().send_codes[engine->tp_rank];
  if (code == 0) {
    fake_daemon().calls.push_back({"expect",
                                   engine->tp_rank,
                                   expectation->room,
                                   expectation->prefix,
                                   expectation->token_count,
                                   {expectation->pages, expectation->pages + expectation->page_count},
                                   true,
                                   expectation->aux_slot});
  }
  return code;
}

int kvf_abort(kvf_engine* engine, uint64_t room, const char*) KVF_NOEXCEPT {
  fake_daemon().calls.push_back({.name = "abort", .tp_rank = engine->tp_rank, .room = room, .pages = {}});
  return 0;
}

int kvf_next_event(kvf_engine*, kvf_event*, int) KVF_NOEXCEPT {
  return 0;
}

int kvf_event_fd(const kvf_engine*) KVF_NOEXCEPT {
  return -1;
}

void kvf_detach(kvf_engine* engine) KVF_NOEXCEPT {
  --fake_daemon().attached;
  delete engine;
}

const char* kvf_last_error(const kvf_engine*) KVF_NOEXCEPT {
  return "refused by the test";
}
