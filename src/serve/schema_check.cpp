#include "serve/schema_check.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "base/base.hpp"
#include "serve/fields.hpp"

namespace tidelock::serve {
namespace {

using Schema = nlohmann::ordered_json;
using Keywords = std::set<std::string, std::less<>>;

constexpr std::size_t kDeepest = 32, kMostBytes = 64 << 10, kLongestPattern = 256, kMostOptions = 1024;
constexpr std::int64_t kLongest = 4096;          // minLength, maxItems and their like
constexpr std::int64_t kMostRepetitions = 1000;  // all {N} of a pattern together

const Keywords kSaysNothing = {"$schema",    "$id",      "$comment", "title",     "description", "default",
                               "deprecated", "examples", "readOnly", "writeOnly", "$defs",       "definitions"};
// What may stand beside each type.
const std::map<std::string, Keywords, std::less<>> kOfType = {
    {"null", {}},
    {"boolean", {}},
    {"string", {"minLength", "maxLength", "pattern", "format"}},
    {"integer", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
    {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
    {"array", {"items", "prefixItems", "minItems", "maxItems"}},
    {"object", {"properties", "required", "additionalProperties"}}};
const Keywords kFormats = {"date", "time", "date-time", "duration", "email", "ipv4", "ipv6", "hostname", "uuid", "uri"};
// Each says all by itself; what stands beside it would be passed over.
const std::vector<std::string_view> kAlone = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"};

class SchemaCheck {
 public:
  explicit SchemaCheck(Schema& root) : root_(root) {}

  void check(Schema& schema, const std::string& path, std::size_t depth) {
    if (depth > kDeepest) refuse(path, fmt::format("at most {} schemas in one another", kDeepest), schema);
    if (schema.is_boolean()) {
      if (!schema.get<bool>()) refuse(path, "a schema that something satisfies", schema);
      return;
    }
    if (!schema.is_object()) refuse(path, "a JSON Schema object", schema);
    for (const auto name : {"$defs", "definitions"})
      if (schema.contains(name)) each(schema.at(name), path + "." + name, depth);
    for (const auto name : kAlone)
      if (schema.contains(name)) return alone(schema, name, path, depth);
    if (schema.contains("type") && schema.at("type").is_array()) return types(schema, path, depth);
    if (schema.contains("pattern")) pattern(schema["pattern"], path + ".pattern");
    typed(schema, path, depth);
  }

 private:
  void typed(Schema& schema, const std::string& path, std::size_t depth) {
    const Schema* type = schema.contains("type") ? &schema.at("type") : nullptr;
    Keywords known = kSaysNothing;
    if (type != nullptr) {
      if (!type->is_string() || !kOfType.contains(type->get<std::string>()))
        refuse(path + ".type", "null, boolean, string, integer, number, array or object", *type);
      known.insert("type");
      const Keywords& more = kOfType.find(type->get<std::string>())->second;
      known.insert(more.begin(), more.end());
    }
    only(schema, known, path, type != nullptr ? "beside this type" : "without a type");
    if (type == nullptr) return;
    if (*type == "string") string(schema, path);
    if (*type == "integer" || *type == "number") number(schema, path);
    if (*type == "array") array(schema, path, depth);
    if (*type == "object") object(schema, path, depth);
  }

  [[noreturn]] static void refuse(const std::string& path, const std::string& expected, const Schema& found) {
    throw ApiError(400, "invalid_value", fmt::format("{} is {}, expected {}", path, shown(Json(found)), expected),
                   path);
  }
  static void only(const Schema& schema, const Keywords& known, const std::string& path, std::string_view where) {
    for (const auto& [name, value] : schema.items())
      if (!known.contains(name))
        throw ApiError(400, "unsupported_parameter",
                       fmt::format("{}.{}: answers cannot be held to this keyword {}", path, name, where), path);
  }
  static std::int64_t whole(const Schema& schema, const char* name, const std::string& path, std::int64_t otherwise) {
    if (!schema.contains(name)) return otherwise;
    const Schema& value = schema.at(name);
    if (!value.is_number_integer() || value < 0 || value > kLongest)
      refuse(path + "." + name, fmt::format("a whole number from 0 to {}", kLongest), value);
    return value.get<std::int64_t>();
  }
  static void ordered(const Schema& schema, const char* least, const char* most, const std::string& path) {
    if (whole(schema, least, path, 0) > whole(schema, most, path, kLongest))
      refuse(path + "." + most, fmt::format("at least {}", least), schema.at(most));
  }

  void each(Schema& schemas, const std::string& path, std::size_t depth) {
    if (!schemas.is_object()) refuse(path, "an object of schemas", schemas);
    for (auto& [name, schema] : schemas.items()) check(schema, fmt::format("{}.{}", path, name), depth + 1);
  }

  void types(Schema& schema, const std::string& path, std::size_t depth) {
    const Schema& list = schema.at("type");
    if (list.empty()) refuse(path + ".type", "one type or more", list);
    Keywords known = kSaysNothing;
    known.insert("type");
    for (const Schema& type : list) {
      if (!type.is_string() || !kOfType.contains(type.get<std::string>()))
        refuse(path + ".type", "names of types", type);
      const Keywords& more = kOfType.find(type.get<std::string>())->second;
      known.insert(more.begin(), more.end());
    }
    only(schema, known, path, "beside these types");
    for (const Schema& type : list) {
      Schema one = {{"type", type}};
      for (const std::string& name : kOfType.find(type.get<std::string>())->second)
        if (schema.contains(name)) one[name] = schema.at(name);
      typed(one, path, depth + 1);
    }
  }

  void alone(Schema& schema, std::string_view name, const std::string& path, std::size_t depth) {
    Keywords known = kSaysNothing;
    known.emplace(name);
    if (name == "const" || name == "enum") known.insert("type");  // which the values say themselves
    if (name == "oneOf") known.insert("discriminator");
    only(schema, known, path, fmt::format("beside {}", name));
    Schema& value = schema.at(std::string(name));
    const std::string place = fmt::format("{}.{}", path, name);
    if (name == "const") return;
    if (name == "$ref") return reference(value, place);
    if (!value.is_array() || value.empty() || value.size() > kMostOptions)
      refuse(place, fmt::format("a list of 1 to {}", kMostOptions), value);
    if (name == "enum") return;
    if (name == "allOf" && value.size() > 1) refuse(place, "one schema: several are not joined", value);
    for (std::size_t i = 0; i < value.size(); ++i) check(value[i], fmt::format("{}[{}]", place, i), depth + 1);
    if (name != "oneOf") return;
    disjoint(value, place);
    Schema either = Schema::object();
    for (auto& [key, kept] : schema.items()) either[key == "oneOf" ? "anyOf" : key] = kept;
    schema = std::move(either);
  }

  // Options of oneOf are written as those of anyOf; that is the same when no value fits two.
  void disjoint(const Schema& options, const std::string& path) const {
    for (std::size_t i = 0; i < options.size(); ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (!differ(resolved(options[i]), resolved(options[j])))
          throw ApiError(400, "unsupported_value",
                         fmt::format("{}: the options {} and {} must differ in their type, or in a required property's "
                                     "const; or use anyOf",
                                     path, j, i),
                         path);
  }
  const Schema& resolved(const Schema& schema) const {
    return schema.is_object() && schema.contains("$ref") ? root_.at(pointer(schema.at("$ref"))) : schema;
  }
  static bool differ(const Schema& a, const Schema& b) {
    if (!a.is_object() || !b.is_object()) return false;
    const std::string one = a.value("type", Schema()).is_string() ? a.at("type") : "",
                      other = b.value("type", Schema()).is_string() ? b.at("type") : "";
    const bool numbers = (one == "integer" && other == "number") || (one == "number" && other == "integer");
    if (!one.empty() && !other.empty() && one != other) return !numbers;
    if (one != "object" || other != "object") return false;
    const Json mine = a.value("properties", Schema::object()), theirs = b.value("properties", Schema::object());
    const auto needs = [](const Schema& schema, const std::string& name) {
      const Json list = schema.value("required", Schema::array());
      return std::any_of(list.begin(), list.end(), [&](const Schema& needed) {
        return needed.is_string() && needed.get_ref<const std::string&>() == name;
      });
    };
    return std::any_of(mine.items().begin(), mine.items().end(), [&](const auto& property) {
      const std::string& name = property.key();
      return property.value().contains("const") && needs(a, name) && needs(b, name) && theirs.contains(name) &&
             theirs.at(name).contains("const") && theirs.at(name).at("const") != property.value().at("const");
    });
  }

  static Schema::json_pointer pointer(const Schema& reference) {
    return Schema::json_pointer(reference.get<std::string>().substr(1));
  }
  void reference(const Schema& value, const std::string& path) const {
    const bool local = value.is_string() && value.get<std::string>().starts_with("#/");
    if (!local && value != "#") refuse(path, "\"#\" or \"#/...\": a place in this schema", value);
    if (value == "#") return;
    try {
      if (root_.contains(pointer(value))) return;
    } catch (const Schema::exception&) {  // not a pointer
    }
    refuse(path, "a place in this schema", value);
  }

  static void string(const Schema& schema, const std::string& path) {
    ordered(schema, "minLength", "maxLength", path);
    const int kinds = (schema.contains("pattern") ? 1 : 0) + (schema.contains("format") ? 1 : 0) +
                      (schema.contains("minLength") || schema.contains("maxLength") ? 1 : 0);
    if (kinds > 1) refuse(path, "one of pattern, format and lengths", schema);
    if (schema.contains("format") &&
        (!schema.at("format").is_string() || !kFormats.contains(schema.at("format").get<std::string>())))
      refuse(path + ".format", fmt::format("one of {}", fmt::join(kFormats, ", ")), schema.at("format"));
  }
  static void pattern(Schema& value, const std::string& path) {
    if (!value.is_string() || value.get_ref<const std::string&>().size() > kLongestPattern)
      refuse(path, fmt::format("a regular expression of at most {} bytes", kLongestPattern), value);
    const std::string& text = value.get_ref<const std::string&>();
    std::int64_t repetitions = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      std::int64_t number = 0;
      while (i < text.size() && text[i] >= '0' && text[i] <= '9' && number <= kMostRepetitions)
        number = number * 10 + (text[i++] - '0');
      repetitions += number;
    }
    if (repetitions > kMostRepetitions)
      refuse(path, fmt::format("numbers that add up to at most {}", kMostRepetitions), value);
    try {
      value = json_safe_pattern(text);
    } catch (const Error& error) {
      refuse(path, error.what(), value);
    }
  }

  static void number(const Schema& schema, const std::string& path) {
    const bool integers = schema.at("type") == "integer";
    for (const auto name : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
      if (!schema.contains(name)) continue;
      const Schema& value = schema.at(name);
      if (!value.is_number() || (integers && !value.is_number_integer()))
        refuse(fmt::format("{}.{}", path, name), integers ? "a whole number" : "a number", value);
    }
  }

  void array(Schema& schema, const std::string& path, std::size_t depth) {
    ordered(schema, "minItems", "maxItems", path);
    if (schema.contains("items")) check(schema.at("items"), path + ".items", depth + 1);
    if (!schema.contains("prefixItems")) return;
    Schema& list = schema.at("prefixItems");
    if (!list.is_array() || list.size() > kMostOptions) refuse(path + ".prefixItems", "a list of schemas", list);
    for (std::size_t i = 0; i < list.size(); ++i) check(list[i], fmt::format("{}.prefixItems[{}]", path, i), depth + 1);
  }

  void object(Schema& schema, const std::string& path, std::size_t depth) {
    Schema* properties = schema.contains("properties") ? &schema.at("properties") : nullptr;
    if (properties != nullptr) each(*properties, path + ".properties", depth);
    if (schema.contains("additionalProperties"))
      check_additional(schema.at("additionalProperties"), path + ".additionalProperties", depth);
    if (!schema.contains("required")) return;
    const Schema& names = schema.at("required");
    if (!names.is_array()) refuse(path + ".required", "a list of names", names);
    for (const Schema& name : names)
      if (!name.is_string() || properties == nullptr || !properties->contains(name.get<std::string>()))
        refuse(path + ".required", "names that stand in properties", name);
  }
  void check_additional(Schema& value, const std::string& path, std::size_t depth) {
    if (!value.is_boolean()) check(value, path, depth + 1);
  }

  Schema& root_;
};

}  // namespace

std::string checked_schema(nlohmann::ordered_json schema, const std::string& path) {
  if (schema.dump().size() > kMostBytes)
    throw ApiError(400, "invalid_value", fmt::format("{} has more than {} bytes", path, kMostBytes), path);
  SchemaCheck(schema).check(schema, path, 0);
  return schema.dump();
}

}  // namespace tidelock::serve
