#include "serve/argument_schema.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "base/base.hpp"
#include "serve/fields.hpp"

namespace tidelock::serve {
namespace {

using Schema = nlohmann::ordered_json;

constexpr int kDeepest = 32;  // references and alternatives within one another

// What values of one type may be.
using Alternatives = std::map<std::string, std::vector<Schema>>;

std::string type_name(const std::string& schema_type) {
  return schema_type == "integer" ? "number" : schema_type;
}
std::string type_of(const Schema& value) {
  if (value.is_string()) return "string";
  if (value.is_number()) return "number";
  if (value.is_boolean()) return "boolean";
  if (value.is_null()) return "null";
  return value.is_array() ? "array" : "object";
}

// What grammars have no tokens for.
bool has_control(const std::string& text) {
  return std::ranges::any_of(text,
                             [](char c) { return static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r'; });
}

// A literal of XGrammar's EBNF.
std::string ebnf_literal(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += fmt::format("\\{}", c);
    else if (byte < 0x20 || byte == 0x7F)
      out += fmt::format("\\x{:02x}", byte);
    else
      out += c;
  }
  return out + "\"";
}

class Reader {
 public:
  Reader(const Schema& root, std::string path) : root_(root), path_(std::move(path)) {}

  const Schema& object() const {
    const Schema* at = &root_;
    for (int i = 0; i < kDeepest && at->is_object(); ++i) {
      if (at->contains("$ref"))
        at = &referred(at->at("$ref"));
      else if (at->contains("allOf"))
        at = &at->at("allOf").front();
      else
        break;
    }
    if (!at->is_object() || at->value("type", Schema()) != "object") refuse(path_, "the schema of one object");
    return *at;
  }

  void collect(const Schema& schema, const std::string& place, Alternatives& out, int depth = 0) const {
    if (depth > kDeepest) refuse(place, "alternatives that come to an end");
    if (schema.is_object()) {
      if (schema.contains("$ref")) return collect(referred(schema.at("$ref")), place, out, depth + 1);
      for (const char* name : {"anyOf", "allOf"})
        if (schema.contains(name)) {
          for (const Schema& one : schema.at(name)) collect(one, place, out, depth + 1);
          return;
        }
      if (schema.contains("const")) return out[type_of(schema.at("const"))].push_back({{"const", schema.at("const")}});
      if (schema.contains("enum")) {
        for (const Schema& value : schema.at("enum")) out[type_of(value)].push_back({{"const", value}});
        return;
      }
      if (schema.contains("type")) return typed(schema, out);
    }
    for (const char* type : {"string", "number", "boolean", "null", "array"}) out[type].push_back({{"type", type}});
    out["object"].push_back({{"type", "object"}, {"additionalProperties", true}});
  }

  ArgumentRule rule_of(std::size_t key, const std::string& type, const std::vector<Schema>& schemas,
                       const std::string& place) const {
    if (type == "string") return string_rule(key, schemas, place);
    Schema one = schemas.size() == 1 ? schemas.front() : Schema{{"anyOf", schemas}};
    check_references(one, place);
    for (const char* name : {"$defs", "definitions"})
      if (root_.contains(name)) one[name] = root_.at(name);
    return {key, type, ArgumentRule::Form::json, one.dump()};
  }

 private:
  [[noreturn]] static void refuse(const std::string& place, const std::string& expected) {
    throw ApiError(
        400, "unsupported_value",
        fmt::format("{}: this model's chat protocol writes arguments one by one; expected {}", place, expected), place);
  }

  const Schema& referred(const Schema& reference) const {  // checked_schema() has seen that it is there
    return reference == "#" ? root_ : root_.at(Schema::json_pointer(reference.get<std::string>().substr(1)));
  }

  static void typed(const Schema& schema, Alternatives& out) {
    const Schema types = schema.at("type").is_array() ? schema.at("type") : Schema::array({schema.at("type")});
    for (const Schema& type : types) {
      Schema one = schema;
      one["type"] = type;
      for (const char* name : {"$defs", "definitions"}) one.erase(name);
      out[type_name(type.get<std::string>())].push_back(std::move(one));
    }
  }

  // The parts of a schema are compiled beside its definitions alone.
  static void check_references(const Schema& schema, const std::string& place) {
    if (schema.is_object() && schema.contains("$ref") && schema.at("$ref").is_string()) {
      const auto& to = schema.at("$ref").get_ref<const std::string&>();
      if (!to.starts_with("#/$defs/") && !to.starts_with("#/definitions/"))
        refuse(place, "references into $defs or definitions");
    }
    if (schema.is_structured())
      for (const Schema& part : schema) check_references(part, place);
  }

  static ArgumentRule string_rule(std::size_t key, const std::vector<Schema>& schemas, const std::string& place) {
    using Form = ArgumentRule::Form;
    const auto says = [](const Schema& schema, const char* name) { return schema.contains(name); };
    const auto bare = [&](const Schema& schema) {
      return std::ranges::none_of(std::vector{"const", "pattern", "format", "minLength", "maxLength"},
                                  [&](const char* name) { return says(schema, name); });
    };
    if (std::ranges::any_of(schemas, bare)) return {key, "string"};
    if (std::ranges::all_of(schemas, [&](const Schema& schema) { return says(schema, "const"); })) {
      std::string ebnf = "root ::= ";
      for (std::size_t i = 0; i < schemas.size(); ++i) {
        if (has_control(schemas[i].at("const").get_ref<const std::string&>()))
          refuse(place, "texts without control characters");
        ebnf += fmt::format("{}{}", i == 0 ? "" : " | ", ebnf_literal(schemas[i].at("const").get<std::string>()));
      }
      return {key, "string", Form::ebnf, ebnf};
    }
    if (schemas.size() > 1) refuse(place, "strings of one form");
    const Schema& schema = schemas.front();
    if (says(schema, "pattern")) return {key, "string", Form::regex, schema.at("pattern").get<std::string>()};
    if (says(schema, "format"))
      return {key, "string", Form::quoted_json, Schema{{"type", "string"}, {"format", schema.at("format")}}.dump()};
    const std::string most = says(schema, "maxLength") ? schema.at("maxLength").dump() : "";
    return {key, "string", Form::ebnf,
            fmt::format("root ::= [^\\x00]{{{},{}}}", says(schema, "minLength") ? schema.at("minLength").dump() : "0",
                        most)};
  }

  const Schema& root_;
  std::string path_;
};

}  // namespace

ArgumentRules argument_rules(const std::string& schema, const std::string& path) {
  const Schema root = Schema::parse(schema);
  const Reader reader(root, path);
  const Schema& object = reader.object();
  ArgumentRules out;
  const Schema properties = object.value("properties", Schema::object()),
               required = object.value("required", Schema::array());
  for (const auto& [name, value] : properties.items()) {
    const std::string place = fmt::format("{}.properties.{}", path, name);
    Alternatives alternatives;
    reader.collect(value, place, alternatives);
    for (const auto& [type, schemas] : alternatives)
      out.rules.push_back(reader.rule_of(out.keys.size(), type, schemas, place));
    out.keys.push_back(name);
    out.required.push_back(std::ranges::find(required, Schema(name)) != required.end());
  }
  return out;
}

}  // namespace tidelock::serve
