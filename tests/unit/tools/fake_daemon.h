#pragma once
// Stands in for libkvferry in the tests of the synthetic engine's roles: records calls, answers as told, and
// delivers the events that a test queues. The C functions are defined in fake_daemon.cc and win over those of
// the shared library.

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/base/unique_fd.h"
#include "common/engine/kvferry.h"

namespace kvferry {

struct FakeCall {
  std::string name;  // "send", "expect", "abort"
  std::uint32_t tp_rank = 0;
  std::uint64_t room = 0;
  std::uint64_t first_token = 0;  // expect: prefix
  std::uint64_t token_count = 0;
  std::vector<std::uint32_t> pages;
  bool last = false;
  int aux_slot = -1;
  std::uint32_t layer_begin = 0;
  std::uint32_t layer_end = 0;
  std::shared_ptr<UniqueFd> ready = nullptr;  // a duplicate of the chunk's fence
};

struct FakeDaemon {
  int attach_code = 0;
  std::map<std::uint32_t, int> send_codes;  // by TP rank; expect uses them too
  std::vector<FakeCall> calls;
  std::map<std::uint32_t, std::deque<kvf_event>> events;  // by TP rank
  int attached = 0;

  std::vector<FakeCall> named(const std::string& name) const;
};

FakeDaemon& fake_daemon();

}  // namespace kvferry
