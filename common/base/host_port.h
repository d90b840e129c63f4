#pragma once
// "host:port" texts. IPv6 literals are written in brackets when a port follows: [2001:db8::5]:18998. A bare
// IPv6 literal (two or more colons, no brackets) is a host without a port; it is never cut at a colon.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/base/result.h"

namespace kvferry {

struct HostPort {
  std::string host;  // without brackets; may carry a zone: fe80::1%lo
  std::uint16_t port = 0;

  /// The text form, with brackets where the host has a colon; also correct inside a URL.
  std::string to_string() const;
  friend auto operator<=>(const HostPort&, const HostPort&) = default;
};

/// Parses `text`. Where it carries no port, `default_port` is used, and it is an error to have none.
/// Port 0 is refused unless `allow_port_zero` (a listener that lets the system choose).
Result<HostPort> parse_host_port(std::string_view text, std::optional<std::uint16_t> default_port,
                                 bool allow_port_zero = false);

/// True for localhost, the addresses of 127.0.0.0/8 and ::1 (with or without zone), written in full. Names
/// that only begin like one ("127.example.com") are not.
bool is_loopback(std::string_view host);

}  // namespace kvferry
