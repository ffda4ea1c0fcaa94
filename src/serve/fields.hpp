// A JSON object of a request, read field by field: what is read is checked, what was never asked for is refused at the
// end. Private to serve/. Include from .cpp files only, as model/json.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "model/json.hpp"
#include "serve/api_error.hpp"

namespace tidelock::serve {

using model::Json;

// Throughout, null counts as absent, and every fault is ApiError{400} naming the field: "messages[0].content".
class Fields {
 public:
  // `path` names the object within the request; empty: the request itself. The value must outlive this.
  Fields(const Json& object, std::string path);

  const Json* find(std::string_view name);     // null when absent
  const Json& require(std::string_view name);  // of any type
  std::optional<bool> flag(std::string_view name);
  std::optional<std::string> text(std::string_view name);
  std::string require_text(std::string_view name);
  std::optional<std::int64_t> integer(std::string_view name, std::int64_t low, std::int64_t high);
  std::optional<double> number(std::string_view name, double low, double high);
  std::optional<std::string> choice(std::string_view name, const std::vector<std::string>& allowed);

  // The field may be given with this value alone, which says what is done anyway. `why` is for the message.
  void only(std::string_view name, const Json& neutral, const std::string& why);

  // Refuses every field that nothing above has asked for.
  void finish() const;

  std::string path_of(std::string_view name) const;
  [[noreturn]] void refuse(std::string_view name, const std::string& expected, const Json& found) const;

 private:
  const Json& object_;
  std::string path_;
  std::set<std::string, std::less<>> known_;
};

// A request's body. Throws ApiError{400}.
Json parse_body(std::string_view body);

// A value for a message, shortened.
std::string shown(const Json& value);

}  // namespace tidelock::serve
