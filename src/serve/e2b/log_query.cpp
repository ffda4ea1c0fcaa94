#include "serve/e2b/log_query.hpp"

#include <algorithm>
#include <charconv>

#include "base/base.hpp"
#include "serve/api_error.hpp"

namespace tidelock::serve::e2b {
namespace {

constexpr std::size_t kMostSearched = 256;  // bytes of a text to search for

[[noreturn]] void refuse(const std::string& name, const char* expected, const std::string& found) {
  throw ApiError(400, "", fmt::format("{}: expected {}, found '{}'", name, expected, found.substr(0, 100)));
}

std::int64_t number(const std::string& name, const std::string& text, std::int64_t most, const char* expected) {
  std::int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || out < 0 || out > most) refuse(name, expected, text);
  return out;
}

bool contains(const sandbox::LogEntry& entry, const std::string& text) {
  return entry.message.find(text) != std::string::npos ||
         std::any_of(entry.fields.begin(), entry.fields.end(),
                     [&](const auto& field) { return field.second.find(text) != std::string::npos; });
}

}  // namespace

LogQuery parse_log_query(const std::map<std::string, std::string>& query, bool second_version) {
  LogQuery out;
  for (const auto& [name, value] : query) {
    if (name == (second_version ? "cursor" : "start")) {
      out.from = number(name, value, INT64_MAX, "milliseconds since 1970");
    } else if (name == "limit") {
      out.limit = static_cast<std::size_t>(number(name, value, 1000, "0 to 1000"));
    } else if (second_version && name == "direction") {
      if (value != "forward" && value != "backward") refuse(name, "forward or backward", value);
      out.backward = value == "backward";
    } else if (second_version && name == "level") {
      const std::optional<sandbox::LogLevel> level = sandbox::parse_log_level(value);
      if (!level) refuse(name, "debug, info, warn or error", value);
      out.least = *level;
    } else if (second_version && name == "search") {
      if (value.size() > kMostSearched) refuse(name, "up to 256 bytes", value);
      out.search = value;
    } else {
      throw ApiError(400, "", fmt::format("there is no parameter '{}' here", name.substr(0, 100)));
    }
  }
  return out;
}

std::vector<sandbox::LogEntry> select_entries(std::vector<sandbox::LogEntry> all, const LogQuery& query) {
  std::erase_if(all, [&](const sandbox::LogEntry& entry) {
    const bool before = query.from && (query.backward ? entry.time > *query.from : entry.time < *query.from);
    return before || entry.level < query.least || !contains(entry, query.search);
  });
  if (query.backward) std::reverse(all.begin(), all.end());
  if (all.size() > query.limit) all.resize(query.limit);
  return all;
}

}  // namespace tidelock::serve::e2b
