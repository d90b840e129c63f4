#include "tools/engine/attach_pool.h"

#include <array>

namespace kvferry {

int attach_pool(const PoolAttachment& attachment, kvf_engine*& engine, std::string& reason) {
  kvf_pool pool{};
  pool.struct_size = sizeof(pool);
  pool.tp_rank = attachment.coord.tp;
  pool.pp_rank = attachment.coord.pp;
  pool.cp_rank = attachment.coord.cp;
  pool.dp_rank = attachment.coord.dp;
  pool.page_size = attachment.page_size;
  pool.dtype = attachment.dtype.c_str();
  pool.buffers = attachment.memory.pool_buffers().data();
  pool.buffer_count = attachment.memory.pool_buffers().size();
  pool.aux = attachment.memory.pool_aux().data();
  pool.aux_count = attachment.memory.pool_aux().size();
  std::array<char, 512> error{};
  const int code = kvf_attach(attachment.socket.c_str(), &pool, &engine, error.data(), error.size());
  reason = error.data();
  return code;
}

}  // namespace kvferry
