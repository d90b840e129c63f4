#pragma once
// Settings of the two ends of the shm fabric.

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/base/ids.h"

namespace kvferry {

struct ShmSendOptions {
  std::uint32_t copy_threads = 1;          // 1 to 64; two nearly double the speed where cores are free
  std::uint64_t slice_bytes = 2ull << 20;  // one thread's share before it looks at other transfers again
  std::chrono::milliseconds welcome_wait{5000};  // from connect to PeerUp, mapping excluded
  std::chrono::milliseconds pool_wait{5000};     // a chunk may overtake the announcement of its pool
  std::uint64_t mapped_bytes_max = 0;            // of one peer's pools together; 0 = this machine's memory
  std::uint32_t jobs_max = 65536;   // chunks queued over all peers; above it post() fails the chunk
  std::vector<uid_t> allowed_uids;  // owners of a listening daemon; empty = our own user
};

struct ShmReceiveOptions {
  std::string path;                 // of the Unix socket; its folder must exist
  mode_t mode = 0600;               // letting another user in takes its uid below and a wider mode here
  std::vector<uid_t> allowed_uids;  // users of connecting daemons; empty = our own user
  std::chrono::milliseconds hello_wait{5000};  // a connection that says nothing for so long is dropped
  Epoch epoch = 0;                             // of the daemon; 0 = a random one
};

}  // namespace kvferry
