#include "common/http/target.h"

#include <catch2/catch.hpp>
#include <random>

namespace kvferry {

TEST_CASE("a target is split into a decoded path and decoded query values") {
  const auto target = parse_target("/a%20b/%C3%A9?room=12&name=x+y%2Bz&flag&empty=&room=13&&k%3D=v%26w");
  REQUIRE(target);
  CHECK(target->path == "/a b/\xC3\xA9");
  CHECK(target->query.at("room") == "12");
  CHECK(target->query.at("name") == "x y+z");
  CHECK(target->query.at("flag").empty());
  CHECK(target->query.at("empty").empty());
  CHECK(target->query.at("k=") == "v&w");
  CHECK(target->query.size() == 5);
}

TEST_CASE("a plus sign is a blank in the query and itself in the path") {
  const auto target = parse_target("/a+b?a+b=c+d");
  REQUIRE(target);
  CHECK(target->path == "/a+b");
  CHECK(target->query.at("a b") == "c d");
}

TEST_CASE("an encoded question mark belongs to the path") {
  const auto target = parse_target("/a%3Fb?c=%3F");
  REQUIRE(target);
  CHECK(target->path == "/a?b");
  CHECK(target->query.at("c") == "?");
}

TEST_CASE("the absolute form of proxies means the same as its path") {
  CHECK(parse_target("http://host:1/x?a=b")->path == "/x");
  CHECK(parse_target("http://host:1/x?a=b")->query.at("a") == "b");
  CHECK(parse_target("http://host")->path == "/");
  CHECK(parse_target("http://host?a=b")->path == "/");
  CHECK(parse_target("*")->path == "*");
}

TEST_CASE("targets that cannot be decoded exactly are refused") {
  for (const char* bad : {"", "x", "?a=b", "/%", "/%4", "/%4g", "/%g4", "/a?b=%", "/a?%zz=1", "/%00",
                          "/a?b=%00", "/a b", "/a#b", "/a\tb", "/a\x7f", "/%+1", "/% 1"}) {
    INFO(bad);
    const auto target = parse_target(bad);
    REQUIRE_FALSE(target);
    CHECK(target.error().code == Code::kInvalid);
    CHECK_FALSE(target.error().message.empty());
  }
}

TEST_CASE("what percent_encode writes, parse_target reads back") {
  const auto seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::string text;
    for (auto left = random() % 20; left > 0; --left) {
      text.push_back(static_cast<char>(1 + random() % 255));
    }
    const auto target = parse_target("/" + percent_encode(text) + "?k=" + percent_encode(text));
    REQUIRE(target);
    CHECK(target->path == "/" + text);
    CHECK(target->query.at("k") == text);
  }
}

TEST_CASE("no byte sequence makes parse_target fail in another way than an error") {
  const auto seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  constexpr std::string_view kAlphabet = "/?&=%+#0aF \n\x00\xff";
  for (int round = 0; round < 5000; ++round) {
    std::string text = "/";
    for (auto left = random() % 12; left > 0; --left) {
      text.push_back(kAlphabet[random() % kAlphabet.size()]);
    }
    if (const auto target = parse_target(text)) {
      CHECK(target->path.front() == '/');
      CHECK(target->path.find('\0') == std::string::npos);
    }
  }
}

}  // namespace kvferry
