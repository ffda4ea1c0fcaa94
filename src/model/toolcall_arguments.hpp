// A tool call's arguments: one JSON object for clients, one element per key in the K3 protocol.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tidelock::model {

struct Argument {
  std::string key;
  std::string type;   // "string", "number", "boolean", "null", "object" or "array"
  std::string value;  // a string's own text; JSON for every other type
  friend bool operator==(const Argument&, const Argument&) = default;
};

// The members of a JSON object in their order; nothing when `json` is not one object, repeats a key, or nests deeper
// than 64. Values are written with ", " and ": " between their parts; numbers keep their spelling.
std::optional<std::vector<Argument>> split_arguments(std::string_view json);

// The reverse: {"key": value, "key": value}. Values other than strings must be JSON. Bytes that are not UTF-8 become
// U+FFFD, since JSON cannot carry them.
std::string join_arguments(std::span<const Argument> arguments);

// The type of one JSON value and its text as split_arguments writes it; nothing when `json` is not one value.
std::optional<Argument> read_value(std::string_view json);

}  // namespace tidelock::model
