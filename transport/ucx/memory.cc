#include "transport/ucx/memory.h"

#include <ucp/api/ucp.h>

#include <algorithm>
#include <map>

#include "common/base/check.h"
#include "transport/ucx/worker.h"

namespace kvferry::ucx {

Result<std::unique_ptr<Registration>> Registration::map(const Progress& progress,
                                                        std::span<std::byte> memory) {
  std::unique_ptr<Registration> registration(new Registration(progress, memory));
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = memory.data();
  params.length = memory.size();
  if (const ucs_status_t status = ucp_mem_map(progress.context(), &params, &registration->handle_);
      status != UCS_OK) {
    registration->handle_ = nullptr;
    return fail(ucs_error(
        status,
        fmt::format("ucx: registering {} bytes; raise the memlock limit of the daemon", memory.size())));
  }
  return registration;
}

Registration::~Registration() {
  if (handle_ != nullptr) {
    ucp_mem_unmap(progress_.context(), handle_);
  }
}

Result<std::vector<std::byte>> Registration::key() const {
  void* packed = nullptr;
  std::size_t size = 0;
  if (const ucs_status_t status = ucp_rkey_pack(progress_.context(), handle_, &packed, &size);
      status != UCS_OK) {
    return fail(ucs_error(status, "ucx: packing a memory key"));
  }
  const auto* bytes = static_cast<const std::byte*>(packed);
  std::vector<std::byte> out(bytes, bytes + size);
  ucp_rkey_buffer_release(packed);
  return out;
}

Result<std::unique_ptr<PoolRegistration>> PoolRegistration::map(const Progress& progress,
                                                                std::shared_ptr<const Pool> pool) {
  struct Extent {
    std::byte* begin;
    std::byte* end;
  };
  // The buffers of one descriptor lie in one mapping, so everything between them is mapped too.
  std::map<std::uint32_t, Extent> extents;
  for (std::uint32_t i = 0; i < pool->buffer_count(); ++i) {
    const auto buffer = pool->buffer(i);
    std::byte* end = buffer.data() + buffer.size();
    const auto [it, fresh] = extents.try_emplace(pool->layout().buffers[i].fd, Extent{buffer.data(), end});
    if (!fresh) {
      it->second = Extent{std::min(it->second.begin, buffer.data()), std::max(it->second.end, end)};
    }
  }
  auto registration = std::make_unique<PoolRegistration>();
  registration->pool = std::move(pool);
  for (const auto& [fd, extent] : extents) {
    KVF_TRY(auto region, Registration::map(progress, {extent.begin, extent.end}));
    registration->regions.push_back(std::move(region));
  }
  return registration;
}

std::uint32_t PoolRegistration::region_of(const std::byte* address) const {
  for (std::uint32_t i = 0; i < regions.size(); ++i) {
    const auto memory = regions[i]->memory();
    if (address >= memory.data() && address < memory.data() + memory.size()) {
      return i;
    }
  }
  KVF_CHECK(!"address outside its own pool");
  return 0;
}

}  // namespace kvferry::ucx
