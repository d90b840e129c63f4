// "host:port" texts, every form that an operator or a peer writes, and what is said about the others.

#include "common/base/host_port.h"

#include <catch2/catch.hpp>

using namespace kvferry;

namespace {

// "host|port", or the message.
std::string parsed(std::string_view text, std::optional<std::uint16_t> default_port = std::nullopt,
                   bool allow_port_zero = false) {
  const auto address = parse_host_port(text, default_port, allow_port_zero);
  if (!address) {
    CHECK(address.error().code == Code::kInvalid);
    return address.error().message;
  }
  return fmt::format("{}|{}", address->host, address->port);
}

}  // namespace

TEST_CASE("host:port: names and IPv4 with a port") {
  CHECK(parsed("127.0.0.1:8998") == "127.0.0.1|8998");
  CHECK(parsed("0.0.0.0:1") == "0.0.0.0|1");
  CHECK(parsed("localhost:65535") == "localhost|65535");
  CHECK(parsed("node-7.cluster_a.example.com:80") == "node-7.cluster_a.example.com|80");
  CHECK(parsed("node:80", 9999) == "node|80");  // a written port wins over the default
  CHECK(parsed("node:0080") == "node|80");
}

TEST_CASE("host:port: IPv6 literals in brackets, with and without zone") {
  CHECK(parsed("[::1]:8998") == "::1|8998");
  CHECK(parsed("[2001:db8::5]:1") == "2001:db8::5|1");
  CHECK(parsed("[fe80::1%eth0]:8998") == "fe80::1%eth0|8998");
  CHECK(parsed("[::ffff:10.0.0.1]:80") == "::ffff:10.0.0.1|80");
  CHECK(parsed("[::]", 8998) == "::|8998");
}

TEST_CASE("host:port: a bare IPv6 literal is a host and never cut at a colon (BL-35)") {
  CHECK(parsed("2001:db8:cd51:4600:9c7d:e2a3:a136:efc", 18998) ==
        "2001:db8:cd51:4600:9c7d:e2a3:a136:efc|18998");
  CHECK(parsed("::1", 8998) == "::1|8998");
  CHECK(parsed("2001:db8::5", 1) == "2001:db8::5|1");
  CHECK(parsed("::1:8998", 1) == "::1:8998|1");
  CHECK(parsed("fe80::1%lo", 8998) == "fe80::1%lo|8998");
  CHECK(parsed("::1") == "address '::1' has no port; write host:port or [ipv6]:port");
}

TEST_CASE("host:port: a text with several colons that is no IPv6 literal is refused") {
  CHECK(parsed("node:80:90", 1) == "address 'node:80:90': 'node:80:90' is not an IPv6 literal");
  CHECK(parsed("10.0.0.1:80:", 1) == "address '10.0.0.1:80:': '10.0.0.1:80:' is not an IPv6 literal");
  CHECK(parsed("1:2:3", 1) == "address '1:2:3': '1:2:3' is not an IPv6 literal");
  CHECK(parsed("[::1::]:80") == "address '[::1::]:80': '::1::' is not an IPv6 literal");
  CHECK(parsed("[fe80::1%]:80") == "address '[fe80::1%]:80': 'fe80::1%' is not an IPv6 literal");
  CHECK(parsed("[%eth0:1]:80") == "address '[%eth0:1]:80': '%eth0:1' is not an IPv6 literal");
}

TEST_CASE("host:port: without a port the default is used, and it is an error to have none") {
  CHECK(parsed("node", 8998) == "node|8998");
  CHECK(parsed("10.1.2.3", 8998) == "10.1.2.3|8998");
  CHECK(parsed("node") == "address 'node' has no port; write host:port or [ipv6]:port");
  CHECK(parsed("[::1]") == "address '[::1]' has no port; write host:port or [ipv6]:port");
  CHECK(parsed("node", 0) == "node|0");  // the caller's own choice is not judged
}

TEST_CASE("host:port: ports from 1, or 0 where the system may choose, to 65535") {
  CHECK(parsed("node:65535") == "node|65535");
  CHECK(parsed("node:65536") == "port '65536' in 'node:65536' is not a number from 1 to 65535");
  CHECK(parsed("node:0") == "port '0' in 'node:0' is not a number from 1 to 65535");
  CHECK(parsed("node:0", std::nullopt, true) == "node|0");
  CHECK(parsed("[::1]:0", std::nullopt, true) == "::1|0");
  CHECK(parsed("node:65536", std::nullopt, true) ==
        "port '65536' in 'node:65536' is not a number from 0 to 65535");
  for (const std::string port : {"", "-1", "+1", " 1", "1 ", "0x50", "8k", "http", "1.5", "4294967297",
                                 "18446744073709551617", "99999999999999999999999999"}) {
    const std::string text = "node:" + port;
    CHECK(parsed(text, 8998) == fmt::format("port '{}' in '{}' is not a number from 1 to 65535", port, text));
    CHECK(parsed("[::1]:" + port, 8998) ==
          fmt::format("port '{}' in '[::1]:{}' is not a number from 1 to 65535", port, port));
  }
}

TEST_CASE("host:port: broken brackets and hosts are named") {
  CHECK(parsed("[::1:80") == "address '[::1:80' has '[' without ']'");
  CHECK(parsed("[", 1) == "address '[' has '[' without ']'");
  CHECK(parsed("[::1]80") == "address '[::1]80' has '80' after ']'; write [host]:port");
  CHECK(parsed("[::1] :80") == "address '[::1] :80' has ' :80' after ']'; write [host]:port");
  CHECK(parsed("[127.0.0.1]:80") == "address '[127.0.0.1]:80': brackets are for IPv6 literals only");
  CHECK(parsed("[node]:80") == "address '[node]:80': brackets are for IPv6 literals only");
  CHECK(parsed("[]:80") == "address '[]:80': brackets are for IPv6 literals only");
  CHECK(parsed("") == "address '' has no host");
  CHECK(parsed("", 8998) == "address '' has no host");
  CHECK(parsed(":80") == "address ':80' has no host");
  for (const std::string text : {"a b:80", "a/b:80", "http://node:80", "user@node:80", "node]:80", "a[:80",
                                 "no\nde:80", "node\t:80", " node:80"}) {
    CHECK(parsed(text) == fmt::format("address '{}' has an illegal character in its host", text));
  }
  const std::string with_nul("node\0x:80", 9);
  CHECK(parsed(with_nul) == fmt::format("address '{}' has an illegal character in its host", with_nul));
}

TEST_CASE("host:port: the text form reads back as the same address") {
  const HostPort addresses[] = {
      {"127.0.0.1", 8998},    {"node.example.com", 1}, {"::1", 65535},        {"::", 80},
      {"2001:db8::5", 18998}, {"fe80::1%eth0", 9},     {"::ffff:10.0.0.1", 7}};
  for (const HostPort& address : addresses) {
    CAPTURE(address.to_string());
    const auto again = parse_host_port(address.to_string(), std::nullopt);
    REQUIRE(again);
    CHECK(*again == address);
  }
  CHECK(HostPort{"127.0.0.1", 8998}.to_string() == "127.0.0.1:8998");
  CHECK(HostPort{"fe80::1%eth0", 9}.to_string() == "[fe80::1%eth0]:9");
  CHECK(HostPort{"::1", 0}.to_string() == "[::1]:0");
}

TEST_CASE("host:port: loopback is this host's own, and no name that only looks like it") {
  for (const char* host :
       {"localhost", "127.0.0.1", "127.0.0.0", "127.255.255.255", "127.1.2.3", "::1", "::1%lo"}) {
    CAPTURE(host);
    CHECK(is_loopback(host));
  }
  for (const char* host : {"",
                           "0.0.0.0",
                           "::",
                           "10.0.0.1",
                           "128.0.0.1",
                           "126.255.255.255",
                           "1270.0.0.1",
                           "127.example.com",
                           "127.0.0.1.example.com",
                           "127.",
                           "127.0.0.1:80",
                           "127.0.0.256",
                           "127.0.0.1%lo",
                           "localhost.example.com",
                           "localhost%lo",
                           "::1%",
                           "::2",
                           "fe80::1%lo",
                           "::ffff:127.0.0.1x",
                           "[::1]"}) {
    CAPTURE(host);
    CHECK_FALSE(is_loopback(host));
  }
  CHECK_FALSE(is_loopback(std::string_view("127.0.0.1\0.example.com", 22)));
}
