#pragma once
// SGLang's bootstrap HTTP interface over a Registry, without HTTP: the daemon hands in method, path, query
// and body, and sends what comes back. Existing routers and engines find the same statuses and bodies as from
// SGLang's own server; what that one answers with 500 is a 4xx here that names the field. Paths that are not
// SGLang's answer nullopt and belong to the daemon. Pure; same thread as the Registry.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "common/bootstrap/registry.h"

namespace kvferry {

struct BootstrapResponse {
  int status = 200;
  std::string content_type;
  std::string body;
  std::string allow;  // for the Allow header of a 405; empty otherwise
};

class BootstrapRoutes {
 public:
  static constexpr std::size_t kBodyBytesMax = std::size_t{1} << 20;
  static constexpr std::size_t kRoomsPerQuery = 32768;

  /// Borrows the registry, which outlives it.
  explicit BootstrapRoutes(Registry& registry) : registry_(registry) {}

  using Query = std::map<std::string, std::string>;
  /// `now` as for Registry. Any bytes are safe as path, query and body.
  std::optional<BootstrapResponse> handle(std::string_view method, std::string_view path, const Query& query,
                                          std::string_view body, std::int64_t now);

  /// Fields whose first value stayed although a rank said another, since the start. For a metric.
  std::uint64_t values_kept() const { return values_kept_; }

 private:
  BootstrapResponse put_route(std::string_view body, std::int64_t now);
  BootstrapResponse get_route(const Query& query);
  BootstrapResponse register_dp_rank(std::string_view body, std::int64_t now);
  BootstrapResponse query_dp_ranks(std::string_view body, std::int64_t now);

  Registry& registry_;
  std::uint64_t values_kept_ = 0;
};

}  // namespace kvferry
