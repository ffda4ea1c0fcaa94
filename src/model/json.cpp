#include "model/json.hpp"

#include <algorithm>
#include <set>
#include <vector>

#include "base/files.hpp"

namespace tidelock::model {

int json_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

Json parse_json(std::string_view text, const std::string& what, const JsonLimits& limits) {
  if (text.size() > limits.bytes)
    fail(limits.code, "{}: {} bytes of JSON, at most {} are accepted", what, text.size(), limits.bytes);
  const int depth = json_depth(text);
  if (depth > limits.depth)
    fail(limits.code, "{}: JSON nested {} deep, at most {} is accepted", what, depth, limits.depth);

  // The library keeps the last of two equal keys; for a file that somebody may have forged, both are a lie.
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && repeated.empty() &&
        !keys.back().insert(value.get_ref<const std::string&>()).second)
      repeated = value.get<std::string>();
    return true;
  };
  try {
    Json value = Json::parse(text.begin(), text.end(), watch);
    if (!repeated.empty()) fail(limits.code, "{}: the key \"{}\" stands twice in one object", what, repeated);
    return value;
  } catch (const Json::exception& error) {
    fail(limits.code, "{}: not valid JSON: {}", what, error.what());
  }
}

Json read_json(const std::filesystem::path& path, const JsonLimits& limits) {
  return parse_json(read_file(path, limits.bytes), path.string(), limits);
}

std::string json_quote(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tidelock::model
