#include "model/json.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <vector>

#include "base/files.hpp"

namespace tidelock::model {
namespace {

// Looks for a key that stands twice in one object. The library keeps the last of two; in a file that somebody may have
// forged, both are a lie. Returning false stops.
struct RepeatFinder {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  std::optional<std::string> repeated;

  bool key(std::string& name) {
    if (!keys.back().insert(name).second) repeated = name;
    return !repeated;
  }
  bool start_object(std::size_t) {
    keys.emplace_back();
    return true;
  }
  bool end_object() {
    keys.pop_back();
    return true;
  }
  bool start_array(std::size_t) { return true; }
  bool end_array() { return true; }
  bool null() { return true; }
  bool boolean(bool) { return true; }
  bool number_integer(Json::number_integer_t) { return true; }
  bool number_unsigned(Json::number_unsigned_t) { return true; }
  bool number_float(Json::number_float_t, const std::string&) { return true; }
  bool string(std::string&) { return true; }
  bool binary(Json::binary_t&) { return true; }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) { return false; }
};

}  // namespace

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

  if (text.find('\0') != std::string_view::npos)  // the library takes one for the end of the text
    fail(limits.code, "{}: not valid JSON: a zero byte", what);
  // Two passes: the library's parser with a call-back is quadratic in the members of an object.
  RepeatFinder finder;
  Json::sax_parse(text.begin(), text.end(), &finder);
  if (finder.repeated)
    fail(limits.code, "{}: the key {} stands twice in one object", what, json_quote(*finder.repeated));
  try {
    return Json::parse(text.begin(), text.end());
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
