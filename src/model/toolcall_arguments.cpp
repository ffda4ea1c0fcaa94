#include "model/toolcall_arguments.hpp"

#include <set>

#include "model/json.hpp"

namespace tidelock::model {
namespace {

// Takes the events of one JSON object apart into its members. Every handler returns false to stop.
class MemberSink {
 public:
  bool null() { return scalar("null", "null"); }
  bool boolean(bool value) { return scalar("boolean", value ? "true" : "false"); }
  bool number_integer(Json::number_integer_t value) { return scalar("number", std::to_string(value)); }
  bool number_unsigned(Json::number_unsigned_t value) { return scalar("number", std::to_string(value)); }
  bool number_float(Json::number_float_t, const std::string& spelling) { return scalar("number", spelling); }
  bool string(std::string& value) { return scalar("string", depth_ == 1 ? value : json_quote(value)); }
  bool binary(Json::binary_t&) { return false; }
  bool start_object(std::size_t) { return start("object", "{"); }
  bool end_object() { return end("}"); }
  bool start_array(std::size_t) { return start("array", "["); }
  bool end_array() { return end("]"); }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) { return false; }

  bool key(std::string& name) {
    if (depth_ == 1) {
      members_.push_back({name, "", ""});
      return keys_.insert(name).second;
    }
    separate();
    value() += json_quote(name) + ": ";
    after_key_ = true;
    return true;
  }

  std::vector<Argument>& members() { return members_; }

 private:
  std::string& value() { return members_.back().value; }

  // Between the members of a nested object or array; a value after its key needs none.
  void separate() {
    if (after_key_) {
      after_key_ = false;
    } else if (depth_ > 1) {
      if (!first_) value() += ", ";
    }
    first_ = false;
  }

  bool scalar(std::string_view type, std::string_view text) {
    if (depth_ == 0) return false;  // the document is no object
    separate();
    if (depth_ == 1) members_.back().type = type;
    value() += text;
    return true;
  }

  bool start(std::string_view type, std::string_view bracket) {
    if (depth_ == 0) {
      ++depth_;
      return type == "object";
    }
    separate();
    if (depth_ == 1) members_.back().type = type;
    value() += bracket;
    ++depth_;
    first_ = true;
    return true;
  }

  bool end(std::string_view bracket) {
    if (--depth_ > 0) value() += bracket;
    first_ = false;
    return true;
  }

  std::vector<Argument> members_;
  std::set<std::string> keys_;
  int depth_ = 0;
  bool first_ = true;       // nothing stands yet in the nested object or array
  bool after_key_ = false;  // a nested key was written, its value comes next
};

}  // namespace

std::optional<std::vector<Argument>> split_arguments(std::string_view json) {
  if (json_depth(json) > JsonLimits{}.depth) return std::nullopt;
  if (json.find('\0') != std::string_view::npos) return std::nullopt;  // the library takes one for the end of the text
  MemberSink sink;
  if (!Json::sax_parse(json.begin(), json.end(), &sink)) return std::nullopt;
  return std::move(sink.members());
}

std::string join_arguments(std::span<const Argument> arguments) {
  std::string json = "{";
  for (const Argument& argument : arguments) {
    if (json.size() > 1) json += ", ";
    json += json_quote(argument.key) + ": ";
    json += argument.type == "string" ? json_quote(argument.value) : argument.value;
  }
  return json + "}";
}

std::optional<Argument> read_value(std::string_view json) {
  // As the only member of an object; text that closes the object itself adds a member or does not parse.
  auto members = split_arguments("{\"\": " + std::string(json) + "}");
  if (!members || members->size() != 1) return std::nullopt;
  return std::move(members->front());
}

}  // namespace tidelock::model
