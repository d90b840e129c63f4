#pragma once
// Text from the other end of a socket ends up in logs, JSON and terminals, so it has to be UTF-8 without
// control characters before it goes any further.

#include <cstddef>
#include <string>
#include <string_view>

namespace kvferry {

/// UTF-8 without control characters (U+0000 to U+001F, U+007F).
bool is_clean_text(std::string_view text);
/// `text` with '?' for each byte that is_clean_text() would refuse.
std::string clean_text(std::string_view text);
/// At most `bytes_max` bytes of `text`, cut before the start of a UTF-8 character, never inside one.
std::string_view cut_text(std::string_view text, std::size_t bytes_max);

}  // namespace kvferry
