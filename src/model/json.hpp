// JSON from files and clients, parsed with limits. Include this from .cpp files only: it brings nlohmann with it, which
// no public header of ours does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace tidelock::model {

// Objects keep their keys sorted by bytes, which for UTF-8 is also the order of code points.
using Json = nlohmann::json;

struct JsonLimits {
  std::size_t bytes = std::size_t{256} << 20;
  int depth = 64;  // dumping and destroying a value recurse: hostile nesting must not reach them
  ErrorCode code = ErrorCode::corrupt_data;  // what to throw; a request's JSON is an invalid_argument instead
};

// Parses one document. `what` names the file or request in messages. Throws Error{limits.code} for a syntax error, a
// zero byte, invalid UTF-8, a key that stands twice in one object, too deep nesting or too many bytes.
Json parse_json(std::string_view text, const std::string& what, const JsonLimits& limits = {});
Json read_json(const std::filesystem::path& path, const JsonLimits& limits = {});

// The deepest nesting of arrays and objects in `text`, which need not be valid.
int json_depth(std::string_view text);

// `text` as a JSON string in quotes. Bytes that are not UTF-8 become U+FFFD, since JSON cannot carry them.
std::string json_quote(std::string_view text);

}  // namespace tidelock::model
