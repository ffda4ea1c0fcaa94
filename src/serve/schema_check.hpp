// What of JSON Schema an answer can be held to. Private to serve/. Include from .cpp files only, as model/json.hpp.
#pragma once

#include <string>
#include <string_view>

#include "model/json.hpp"

namespace tidelock::serve {

// The schema that a grammar is made of: as the client's, its keys in the same order, with patterns that match nothing
// that JSON escapes and anyOf for oneOf. Throws ApiError{400} naming the place below `path`: for keywords that would
// not be kept, or only in part (they are refused, never passed over), for values of the wrong kind, and for bounds
// beyond which a grammar would take too long to make.
std::string checked_schema(nlohmann::ordered_json schema, const std::string& path);

// What the pattern matches, but for texts with characters that JSON escapes. Throws Error{invalid_argument}, whose text
// goes on behind "expected", for what would need them, and for back references, look-around and other escapes.
std::string json_safe_pattern(std::string_view pattern);

}  // namespace tidelock::serve
