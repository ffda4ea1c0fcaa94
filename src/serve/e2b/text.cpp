#include "serve/e2b/text.hpp"

#include <fmt/format.h>
#include <openssl/crypto.h>

#include <charconv>
#include <cstdio>
#include <ctime>
#include <span>

#include "base/files.hpp"
#include "base/random.hpp"
#include "serve/api_error.hpp"

namespace tidelock::serve::e2b {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

constexpr std::string_view kBase64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::optional<std::string> percent_decode(std::string_view text, bool form) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && form) {
      out.push_back(' ');
    } else if (text[i] != '%') {
      out.push_back(text[i]);
    } else {
      const int high = i + 2 < text.size() ? hex_digit(text[i + 1]) : -1;
      const int low = i + 2 < text.size() ? hex_digit(text[i + 2]) : -1;
      if (high < 0 || low < 0) return std::nullopt;
      out.push_back(static_cast<char>(high * 16 + low));
      i += 2;
    }
  }
  return out;
}

std::optional<std::map<std::string, std::string>> parse_form(std::string_view text) {
  std::map<std::string, std::string> out;
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find('&'));
    text.remove_prefix(std::min(pair.size() + 1, text.size()));
    if (pair.empty()) continue;
    const std::size_t equals = std::min(pair.find('='), pair.size());
    const auto name = percent_decode(pair.substr(0, equals), true);
    const auto value = percent_decode(pair.substr(std::min(equals + 1, pair.size())), true);
    if (!name || !value) return std::nullopt;
    out[*name] = *value;
  }
  return out;
}

std::string base64(std::string_view bytes) {
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t j = 0; j < 3; ++j)
      group = group << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0U);
    for (std::size_t j = 0; j < 4; ++j)
      out.push_back(i + j > bytes.size() ? '=' : kBase64[group >> (18 - 6 * j) & 63U]);
  }
  return out;
}

std::optional<std::string> base64_decode(std::string_view text) {
  while (!text.empty() && text.back() == '=') text.remove_suffix(1);
  std::string out;
  std::uint32_t group = 0;
  int bits = 0;
  for (const char c : text) {
    const std::size_t value = kBase64.find(c == '-' ? '+' : c == '_' ? '/' : c);
    if (value == std::string_view::npos) return std::nullopt;
    group = group << 6 | static_cast<std::uint32_t>(value);
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      out.push_back(static_cast<char>(group >> bits));
    }
  }
  return text.size() % 4 == 1 ? std::nullopt : std::optional(out);
}

std::string rfc3339(std::int64_t milliseconds) {
  return rfc3339(milliseconds / 1000, milliseconds % 1000 * 1'000'000);
}

std::string rfc3339(std::int64_t seconds, std::int64_t nanoseconds) {
  const std::time_t time = seconds;
  std::tm parts{};
  gmtime_r(&time, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec, nanoseconds / 1'000'000);
}

std::optional<std::int64_t> parse_rfc3339(std::string_view text) {
  std::tm parts{};
  int used = 0;
  const std::string copy(text);
  if (std::sscanf(copy.c_str(), "%4d-%2d-%2d%*1[Tt ]%2d:%2d:%2d%n", &parts.tm_year, &parts.tm_mon, &parts.tm_mday,
                  &parts.tm_hour, &parts.tm_min, &parts.tm_sec, &used) != 6 ||
      used == 0)
    return std::nullopt;
  parts.tm_year -= 1900, parts.tm_mon -= 1;
  std::int64_t out = static_cast<std::int64_t>(timegm(&parts)) * 1000;
  std::string_view rest = text.substr(static_cast<std::size_t>(used));
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    for (int unit = 100; !rest.empty() && rest[0] >= '0' && rest[0] <= '9'; unit /= 10, rest.remove_prefix(1))
      out += (rest[0] - '0') * unit;
  }
  if (rest == "Z" || rest == "z") return out;
  int hours = 0, minutes = 0;
  const std::string offset(rest.substr(std::min<std::size_t>(1, rest.size())));
  if (rest.empty() || (rest[0] != '+' && rest[0] != '-') ||
      std::sscanf(offset.c_str(), "%2d:%2d%n", &hours, &minutes, &used) != 2 ||
      static_cast<std::size_t>(used) != offset.size())
    return std::nullopt;
  return out - (rest[0] == '-' ? -1 : 1) * (hours * 60 + minutes) * 60'000LL;
}

bool same_secret(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string random_hex(std::size_t bytes) {
  const std::string raw = random_bytes(bytes);
  return to_hex(std::as_bytes(std::span(raw.data(), raw.size())));
}

bool is_signed(const std::map<std::string, std::string>& query, std::string_view method, const std::string& token,
               std::int64_t now) {
  const auto value = [&query](const char* name) {
    const auto found = query.find(name);
    return found == query.end() ? std::string() : found->second;
  };
  const std::string given = value("signature"), until = value("signature_expiration");
  if (given.empty()) return false;
  std::string text = value("path") + (method == "GET" ? ":read:" : ":write:") + value("username") + ":" + token;
  if (!until.empty()) text += ":" + until;
  const auto hash = sha256(std::as_bytes(std::span(text.data(), text.size())));
  std::string wanted = base64({reinterpret_cast<const char*>(hash.data()), hash.size()});
  wanted.erase(wanted.find_last_not_of('=') + 1);
  if (!same_secret(given, "v1_" + wanted))
    throw ApiError(401, "", "signature: it is not one of this sandbox for this file");
  std::int64_t end = 0;
  const auto parsed = std::from_chars(until.data(), until.data() + until.size(), end);
  if (!until.empty() && (parsed.ec != std::errc() || parsed.ptr != until.data() + until.size() || end <= now))
    throw ApiError(401, "", "signature: it has expired");
  return true;
}

}  // namespace tidelock::serve::e2b
