// The typed reading of configurations: what an operator may write, and what is said about the rest. All
// problems of one text are in one list.

#include "common/config/fields.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>

using namespace kvferry;
using namespace std::chrono_literals;
using Catch::Contains;
using Catch::StartsWith;
using nlohmann::json;
using std::chrono::nanoseconds;
using Lines = std::vector<std::string>;

namespace {

json parsed(std::string_view text) {
  const auto document = parse_config_text(text, "test");
  if (!document) {
    FAIL(document.error().message);
  }
  return *document;
}

std::string error_of(std::string_view text) {
  const auto document = parse_config_text(text, "test.json");
  REQUIRE_FALSE(document);
  CHECK(document.error().code == Code::kInvalid);
  return document.error().message;
}

// Runs `read` over the object in `text` and returns the problems.
template <class Read>
Lines problems(const json& document, Read read) {
  ConfigErrors errors;
  FieldReader reader(&document, "", errors);
  read(reader);
  reader.finish();
  return errors.list;
}

std::string duration_of(std::string_view text) {
  const auto value = parse_duration(text);
  return value ? fmt::format("{}", value->count()) : value.error().message;
}

std::string bytes_of(std::string_view text) {
  const auto value = parse_bytes(text);
  return value ? fmt::format("{}", *value) : value.error().message;
}

}  // namespace

TEST_CASE("fields: both kinds of comments are allowed, and only as comments") {
  CHECK(parsed("// first\n{\"a\": 1, /* in\nside */ \"b\": \"// not one\"} // last") ==
        json{{"a", 1}, {"b", "// not one"}});
  CHECK_THAT(error_of("{\"a\": 1 /* no end"), StartsWith("test.json: ") && Contains("line 1, column"));
  CHECK_THAT(error_of("{\"a\": 1 # shell\n}"), Contains("line 1, column 9"));
}

TEST_CASE("fields: a syntax error is named with its line and column") {
  CHECK_THAT(error_of("{\n  \"a\": 1,\n  \"b\": ,\n}"),
             StartsWith("test.json: ") && Contains("line 3, column 8"));
  CHECK_THAT(error_of(""), Contains("line 1, column 1") && Contains("end of input"));
  CHECK_THAT(error_of("{} {}"), Contains("line 1, column 4"));
  CHECK_THAT(error_of("{\"a\": 1,}"), Contains("line 1, column 9"));
  CHECK_THAT(error_of("{\"a\": \"\xFF\"}"), Contains("ill-formed UTF-8"));
}

TEST_CASE("fields: a key that appears twice in one object is refused, in two objects it is not") {
  CHECK(error_of("{\"a\": 1, \"b\": 2, \"a\": 1}") ==
        "test.json: key 'a' appears twice in one object; remove one");
  CHECK(error_of("{\"out\": {\"in\": [{\"x\": 1, \"x\": 2}]}}") ==
        "test.json: key 'x' appears twice in one object; remove one");
  CHECK(error_of("{\"a\": {\"x\": 1}, \"b\": 1, \"a\": 2}") ==
        "test.json: key 'a' appears twice in one object; remove one");
  CHECK(parsed("{\"a\": {\"a\": {\"a\": 1}}, \"b\": [{\"a\": 1}, {\"a\": 2}]}").size() == 2);
}

TEST_CASE("fields: a file is read whole, and what cannot be read is named") {
  char path[] = "/tmp/kvferry-fields-XXXXXX";
  const int fd = ::mkstemp(path);
  REQUIRE(fd >= 0);
  const auto write = [&](const std::string& text) { std::ofstream(path, std::ios::trunc) << text; };
  write("{\"a\": 1} // and a comment\n");
  CHECK(read_config_file(path).value() == "{\"a\": 1} // and a comment\n");
  write(std::string(4u << 20, ' '));
  CHECK(read_config_file(path).value().size() == 4u << 20);
  write(std::string((4u << 20) + 1, ' '));
  CHECK(read_config_file(path).error() ==
        Error{Code::kInvalid,
              fmt::format("{}: is larger than 4194304 bytes, the most of a configuration", path)});
  write("");
  CHECK(read_config_file(path).error() ==
        Error{Code::kInvalid, fmt::format("{}: is empty or not a file", path)});
  ::close(fd);
  std::remove(path);
  CHECK(read_config_file(path).error() ==
        Error{Code::kIo, fmt::format("cannot read configuration {}: No such file or directory", path)});
  CHECK(read_config_file("/tmp").error() == Error{Code::kInvalid, "/tmp: is empty or not a file"});
  CHECK_THAT(read_config_file("/dev/zero").error().message, Contains("is larger than 4194304 bytes"));
}

TEST_CASE("fields: durations in every unit, with fractions rounded to the nanosecond") {
  CHECK(duration_of("0") == "0");
  CHECK(duration_of("7ns") == "7");
  CHECK(duration_of("7us") == "7000");
  CHECK(duration_of("250ms") == "250000000");
  CHECK(duration_of("5s") == "5000000000");
  CHECK(duration_of("5") == "5000000000");
  CHECK(duration_of("2m") == "120000000000");
  CHECK(duration_of("1h") == "3600000000000");
  CHECK(duration_of("1.5h") == "5400000000000");
  // Each of these is a little less than what it says once it is a binary fraction.
  CHECK(duration_of("4.1s") == "4100000000");
  CHECK(duration_of("1.005s") == "1005000000");
  CHECK(duration_of("2.01ms") == "2010000");
  CHECK(duration_of("8.7m") == "522000000000");
  CHECK(duration_of("0.29h") == "1044000000000");
  CHECK(duration_of("1e3ms") == "1000000000");
  CHECK(duration_of("2500000h") == "9000000000000000000");  // the most: 9e18 ns
}

TEST_CASE("fields: sizes in every unit") {
  CHECK(bytes_of("0") == "0");
  CHECK(bytes_of("500B") == "500");
  CHECK(bytes_of("500") == "500");
  CHECK(bytes_of("64KiB") == "65536");
  CHECK(bytes_of("2MiB") == "2097152");
  CHECK(bytes_of("1GiB") == "1073741824");
  CHECK(bytes_of("3TiB") == "3298534883328");
  CHECK(bytes_of("64KB") == "64000");
  CHECK(bytes_of("2MB") == "2000000");
  CHECK(bytes_of("1GB") == "1000000000");
  CHECK(bytes_of("1.5KiB") == "1536");
  CHECK(bytes_of("2.01KB") == "2010");
  CHECK(bytes_of("0.29GB") == "290000000");
}

TEST_CASE("fields: what is no duration and no size is refused with an example of one") {
  for (const std::string text : {"",     " ",      "s",        "ms",    "-1s",
                                 "-1",   "+1s",    "5 s",      " 5s",   "5s ",
                                 "5S",   "5sec",   "5ms5",     "5d",    "0x5s",
                                 "1,5s", "five",   "inf",      "infs",  "nan",
                                 "nans", "1e400s", "2600000h", "9e18s", "18446744073709551615",
                                 "5s\n"}) {
    CHECK(duration_of(text) == fmt::format("'{}' is not a duration such as 250ms, 5s, 2m or 1h", text));
  }
  for (const std::string text : {"", "B", "-1", "-64KiB", "64kib", "64K", "64kB", "64 KiB", "64KiBs", "1PiB",
                                 "0x40", "inf", "nan", "1e400", "9000000000GiB", "18446744073709551615"}) {
    CHECK(bytes_of(text) == fmt::format("'{}' is not a size such as 64KiB, 2MiB or 1GiB", text));
  }
}

TEST_CASE("fields: a printed duration reads back as the same") {
  CHECK(format_duration(0ns) == "0s");
  CHECK(format_duration(90s) == "90s");
  CHECK(format_duration(1500ms) == "1500ms");
  CHECK(format_duration(1500us) == "1500000ns");
  for (const nanoseconds value : {nanoseconds(0), nanoseconds(1), nanoseconds(999999), nanoseconds(1ms),
                                  nanoseconds(1001ms), nanoseconds(24h), nanoseconds(24h) - 1ms}) {
    CHECK(parse_duration(format_duration(value)).value() == value);
  }
}

TEST_CASE("fields: absent keys take their defaults and are no problem") {
  const json empty = json::object();
  const Lines found = problems(empty, [](FieldReader& in) {
    CHECK(in.text("text", "fallback") == "fallback");
    CHECK(in.flag("flag", true));
    CHECK(in.number("number", 7, 1, 9) == 7);
    CHECK(in.number("outside", 70, 1, 9) == 70);  // a default is not judged
    CHECK(in.duration("duration", 5s, 1s, 9s) == 5s);
    CHECK(in.bytes("bytes", 5, 1, 9) == 5);
    CHECK(in.texts("texts", {"a", "b"}) == Lines{"a", "b"});
    CHECK(in.numbers("numbers", {4, 5}, 9) == std::vector<std::uint32_t>{4, 5});
    CHECK_FALSE(in.has("object"));
    FieldReader object = in.object("object");
    CHECK(object.number("inner", 3, 1, 9) == 3);
    object.finish();
  });
  CHECK(found.empty());
}

TEST_CASE("fields: values of the right type are read") {
  const json document = parsed(
      R"({"text": "t", "flag": false, "number": 9, "duration": "9s", "seconds": 3, "bytes": "9B", "plain": 4,
          "texts": ["x"], "none": [], "numbers": [0, 9], "object": {"inner": 1}})");
  const Lines found = problems(document, [](FieldReader& in) {
    CHECK(in.text("text", "") == "t");
    CHECK(in.required_text("text") == "t");
    CHECK_FALSE(in.flag("flag", true));
    CHECK(in.number("number", 1, 1, 9) == 9);
    CHECK(in.duration("duration", 1s, 1s, 9s) == 9s);
    CHECK(in.duration("seconds", 1s, 1s, 9s) == 3s);
    CHECK(in.bytes("bytes", 1, 1, 9) == 9);
    CHECK(in.bytes("plain", 1, 1, 9) == 4);
    CHECK(in.texts("texts", {}) == Lines{"x"});
    CHECK(in.texts("none", {"a"}).empty());
    CHECK(in.numbers("numbers", {}, 9) == std::vector<std::uint32_t>{0, 9});
    CHECK(in.has("object"));
    FieldReader object = in.object("object");
    CHECK(object.number("inner", 3, 1, 9) == 1);
    CHECK(object.path("inner") == "object.inner");
    object.finish();
  });
  CHECK(found.empty());
}

TEST_CASE("fields: limits are inclusive, and one beyond is refused with both limits") {
  const auto number = [](const std::string& value) {
    const json document = parsed("{\"n\": " + value + "}");
    return problems(document, [](FieldReader& in) { in.number("n", 5, 2, 8); });
  };
  CHECK(number("2").empty());
  CHECK(number("8").empty());
  CHECK(number("1") == Lines{"n: is 1, must be a whole number from 2 to 8"});
  CHECK(number("9") == Lines{"n: is 9, must be a whole number from 2 to 8"});
  CHECK(number("18446744073709551615") ==
        Lines{"n: is 18446744073709551615, must be a whole number from 2 to 8"});

  const auto duration = [](const std::string& value) {
    const json document = parsed("{\"d\": " + value + "}");
    return problems(document, [](FieldReader& in) { in.duration("d", 5s, 100ms, 1h); });
  };
  CHECK(duration(R"("100ms")").empty());
  CHECK(duration(R"("1h")").empty());
  CHECK(duration("3600").empty());
  CHECK(duration(R"("99999us")") ==
        Lines{"d: is \"99999us\", must be a duration from 100ms to 3600s, e.g. \"5s\""});
  CHECK(duration(R"("3600001ms")") ==
        Lines{"d: is \"3600001ms\", must be a duration from 100ms to 3600s, e.g. \"5s\""});
  CHECK(duration("0") == Lines{"d: is 0, must be a duration from 100ms to 3600s, e.g. \"5s\""});
  CHECK(duration("3601") == Lines{"d: is 3601, must be a duration from 100ms to 3600s, e.g. \"5s\""});

  const auto bytes = [](const std::string& value) {
    const json document = parsed("{\"b\": " + value + "}");
    return problems(document, [](FieldReader& in) { in.bytes("b", 4096, 1024, 2048); });
  };
  CHECK(bytes(R"("1KiB")").empty());
  CHECK(bytes("2048").empty());
  CHECK(bytes(R"("1023B")") ==
        Lines{"b: is \"1023B\", must be a size from 1024 to 2048 bytes, e.g. \"2MiB\""});
  CHECK(bytes("2049") == Lines{"b: is 2049, must be a size from 1024 to 2048 bytes, e.g. \"2MiB\""});

  const auto numbers = [](const std::string& value) {
    const json document = parsed("{\"l\": " + value + "}");
    return problems(document, [](FieldReader& in) { in.numbers("l", {}, 3); });
  };
  CHECK(numbers("[0, 3]").empty());
  CHECK(numbers("[0, 4]") == Lines{"l: is [0,4], must be a list of whole numbers from 0 to 3"});
}

TEST_CASE("fields: a value of a wrong type is named with what it is and what it must be") {
  const json wrong = parsed(R"([null, true, 1, -1, 1.5, "text", ["a", 1], {"k": 1}])");
  const auto accepts = [](const std::string& reader, const json& value) {
    return (reader == "a text" && value.is_string()) || (reader == "true or false" && value.is_boolean()) ||
           (reader == "a whole number from 0 to 9" && value.is_number_unsigned()) ||
           (reader.starts_with("a duration") && value.is_number_unsigned()) ||
           (reader.starts_with("a size") && value.is_number_unsigned());
  };
  for (const json& value : wrong) {
    const json document = {{"k", value}};
    const auto check = [&](const std::string& expected, auto read) {
      CAPTURE(document.dump(), expected);
      const Lines line =
          accepts(expected, value) ? Lines{} : Lines{"k: is " + value.dump() + ", must be " + expected};
      CHECK(problems(document, read) == line);
    };
    check("a text", [](FieldReader& in) { in.text("k", "fallback"); });
    check("a text", [](FieldReader& in) { in.required_text("k"); });
    check("true or false", [](FieldReader& in) { in.flag("k", false); });
    check("a whole number from 0 to 9", [](FieldReader& in) { in.number("k", 1, 0, 9); });
    check("a duration from 0s to 9s, e.g. \"5s\"", [](FieldReader& in) { in.duration("k", 1s, 0s, 9s); });
    check("a size from 0 to 9 bytes, e.g. \"2MiB\"", [](FieldReader& in) { in.bytes("k", 1, 0, 9); });
    check("a list of texts", [](FieldReader& in) { CHECK(in.texts("k", {"z"}) == Lines{"z"}); });
    check("a list of whole numbers from 0 to 9",
          [](FieldReader& in) { CHECK(in.numbers("k", {4}, 9) == std::vector<std::uint32_t>{4}); });
    if (!value.is_object()) {
      CHECK(problems(document, [](FieldReader& in) { in.object("k").finish(); }) ==
            Lines{"k: must be an object, is " + value.dump()});
    }
  }
}

TEST_CASE("fields: every problem of a text is listed, each with its path") {
  const json document = parsed(
      R"({"a": -1, "b": {"c": "soon", "d": {"e": [1, "x"], "empty": ""}, "typo": 1}, "other": {}, "f": "yes"})");
  const Lines found = problems(document, [](FieldReader& in) {
    in.number("a", 1, 0, 5);
    FieldReader b = in.object("b");
    b.duration("c", 1s, 1s, 2s);
    FieldReader d = b.object("d");
    d.numbers("e", {}, 9);
    d.required_text("empty");
    d.required_text("name");
    d.finish();
    b.finish();
    in.flag("f", false);
  });
  CHECK(found == Lines{
                     "a: is -1, must be a whole number from 0 to 5",
                     "b.c: is \"soon\", must be a duration from 1s to 2s, e.g. \"5s\"",
                     "b.d.e: is [1,\"x\"], must be a list of whole numbers from 0 to 9",
                     "b.d.empty: is empty and has no default",
                     "b.d.name: is missing and has no default",
                     "b.typo: is not a known key; known here: c, d",
                     "f: is \"yes\", must be true or false",
                     "other: is not a known key; known here: a, b, f",
                 });
}

TEST_CASE("fields: a wrong value is shortened in the message, and the document must be an object") {
  const json document = {{"k", std::string(200, 'x')}};
  CHECK(problems(document, [](FieldReader& in) { in.flag("k", false); }) ==
        Lines{"k: is \"" + std::string(76, 'x') + "..., must be true or false"});
  CHECK(problems(json::array({1}), [](FieldReader& in) { CHECK_FALSE(in.has("k")); }) ==
        Lines{"(top level): must be an object, is [1]"});
}
