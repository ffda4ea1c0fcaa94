// Which entries of a sandbox's log a client asks for: GET /sandboxes/ID/logs and /v2/sandboxes/ID/logs. Pure. Private
// to serve/e2b.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sandbox/sandbox.hpp"

namespace tidelock::serve::e2b {

struct LogQuery {
  std::optional<std::int64_t> from;  // milliseconds since 1970; this one counts: where reading starts
  std::size_t limit = 1000;
  bool backward = false;  // from there to older ones, newest first
  sandbox::LogLevel least = sandbox::LogLevel::debug;
  std::string search;  // stands in the message or in a field's text; empty: all
};
// From decoded query parameters: `start` and `limit`; in the second version `cursor`, `limit`, `direction`, `level`
// and `search`. Throws ApiError{400} naming the parameter.
LogQuery parse_log_query(const std::map<std::string, std::string>& query, bool second_version);

// `all`: oldest first.
std::vector<sandbox::LogEntry> select_entries(std::vector<sandbox::LogEntry> all, const LogQuery& query);

}  // namespace tidelock::serve::e2b
