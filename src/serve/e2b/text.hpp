// Encodings of the E2B API: URLs, base64, times. Pure. Private to serve/e2b.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace tidelock::serve::e2b {

// Percent-decoding; '+' is a space where `form`. Nothing for a '%' that two hexadecimal digits do not follow.
std::optional<std::string> percent_decode(std::string_view text, bool form);

// "a=b&c=d", names and values decoded once; the last of a name counts. Nothing when it cannot be decoded.
std::optional<std::map<std::string, std::string>> parse_form(std::string_view text);

std::string base64(std::string_view bytes);
std::optional<std::string> base64_decode(std::string_view text);  // padding may be absent

// Milliseconds since 1970 as RFC 3339 in UTC: 2026-01-02T03:04:05.678Z.
std::string rfc3339(std::int64_t milliseconds);
std::string rfc3339(std::int64_t seconds, std::int64_t nanoseconds);
// Nothing for what is not such a time; any offset and any number of digits of a second.
std::optional<std::int64_t> parse_rfc3339(std::string_view text);

// The same time for equal lengths, whatever they hold: a token is not found out byte by byte.
bool same_secret(std::string_view a, std::string_view b);

// Whether the query of a request for /files carries a signature made with the sandbox's token, for this path, method
// and user: v1_ and the unpadded base64 of SHA-256("path:read|write:user:token[:expiration]"). `now`: seconds since
// 1970. Throws ApiError{401} for one that is wrong or too old.
bool is_signed(const std::map<std::string, std::string>& query, std::string_view method, const std::string& token,
               std::int64_t now);

// `bytes` random bytes in hexadecimal. Throws Error{io}.
std::string random_hex(std::size_t bytes);

}  // namespace tidelock::serve::e2b
