// Answers held to JSON: whatever a model would say, what may be sampled is a whole turn of the chat protocol with a
// content that fits the schema.
#include "serve/answer_format.hpp"

#include <gtest/gtest.h>

#include "model/json.hpp"
#include "model/toolcall.hpp"
#include "serve/api_error.hpp"
#include "serve/random_model.hpp"
#include "serve/schema_check.hpp"

namespace tidelock::serve {
namespace answer_format_test {

using model::Json;
using testing::is_allowed;
using testing::k2_context;
using testing::k3_context;
using testing::protocols;
using testing::say;

AnswerFormat with_schema(const std::string& schema) {
  return {AnswerFormat::Kind::json_schema, schema};
}

const std::string kPerson =
    R"({"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}}, "required": ["name", "age"], "additionalProperties": false})";

void expect_person(const std::string& content) {
  const Json person = Json::parse(content);
  ASSERT_TRUE(person.is_object() && person.contains("name") && person.contains("age")) << content;
  for (const auto& [name, value] : person.items()) {
    if (name == "name") {
      std::size_t characters = 0;
      for (const char c : value.get<std::string>()) characters += (static_cast<unsigned char>(c) & 0xC0U) != 0x80;
      EXPECT_LE(characters, 5U);
    } else if (name == "age") {
      EXPECT_TRUE(value.is_number_integer() && value >= 0 && value <= 150) << content;
    } else {
      ASSERT_EQ(name, "tags");
      EXPECT_LE(value.size(), 3U);
      for (const Json& tag : value) EXPECT_TRUE(tag == "a" || tag == "b") << content;
    }
  }
}

TEST(AnswerFormat, AnyModelSaysAWholeTurnThatFitsTheSchema) {
  for (const auto& [name, context, thinking] : protocols()) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const auto constraint = context.grammars->constrain(with_schema(kPerson), {}, thinking, context.vocab);
      const auto turn = say(context, constraint.get(), thinking, seed);
      ASSERT_TRUE(turn.complete) << name << ": " << turn.problem;
      EXPECT_TRUE(turn.calls.empty());
      expect_person(turn.content);
      EXPECT_TRUE(constraint->allowed().empty()) << "behind the turn nothing is asked";
    }
  }
}

TEST(AnswerFormat, WithoutTheConstraintTheSameModelSaysSomethingElse) {  // the twin of the test before
  int held = 0;
  for (const auto& [name, context, thinking] : protocols())
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const auto turn = say(context, nullptr, thinking, seed);
      held += turn.complete && Json::accept(turn.content) ? 1 : 0;
    }
  EXPECT_LT(held, 10);
}

TEST(AnswerFormat, AnObjectIsAnyObject) {
  for (const auto& [name, context, thinking] : protocols()) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      const auto constraint =
          context.grammars->constrain({AnswerFormat::Kind::json_object, ""}, {}, thinking, context.vocab);
      const auto turn = say(context, constraint.get(), thinking, seed);
      if (!turn.complete) continue;  // objects may be longer than this test's patience
      EXPECT_TRUE(Json::parse(turn.content).is_object()) << name << " " << turn.content;
    }
  }
}

TEST(AnswerFormat, WithToolsTheModelMayCallInstead) {
  for (const auto& [name, context, thinking] : protocols()) {
    if (thinking) continue;
    const CallRules may_call{{{"f"}}};
    const bool k2 = model::chat_protocol(context.tokenizer) == model::ChatProtocol::k2;
    const auto calls = context.tokenizer.special(k2 ? "<|tool_calls_section_begin|>" : "<|close|>");
    const auto plain = context.grammars->constrain(with_schema(R"({"type": "null"})"), {}, false, context.vocab);
    EXPECT_FALSE(is_allowed(plain->allowed(), calls)) << name;
    const auto either = context.grammars->constrain(with_schema(R"({"type": "null"})"), may_call, false, context.vocab);
    EXPECT_TRUE(is_allowed(either->allowed(), calls)) << name;
    either->accept(calls);
    const auto content =
        context.grammars->constrain(with_schema(R"({"type": "null"})"), may_call, false, context.vocab);
    content->accept(context.tokenizer.encode_text("n").front());
    EXPECT_FALSE(is_allowed(content->allowed(), calls)) << name << ": content has begun";
  }
}

TEST(AnswerFormat, PropertiesComeInTheOrderOfTheSchema) {
  const std::string body =
      R"({"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema":
          {"name": "n", "schema": {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["a", "z"]}}}})";
  const auto request = read_chat_request(body, k2_context(false));
  const auto turn = say(k2_context(false), request.choices.at(0).constraint.get(), false, 1);
  EXPECT_LT(turn.content.find("\"z\""), turn.content.find("\"a\"")) << turn.content;
}

TEST(AnswerFormat, ChoicesHaveConstraintsOfTheirOwn) {
  const std::string body =
      R"({"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 3, "response_format": {"type": "json_object"}})";
  const auto request = read_chat_request(body, k3_context());
  ASSERT_EQ(request.choices.size(), 3U);
  EXPECT_NE(request.choices[0].constraint, request.choices[1].constraint);
  EXPECT_NE(request.choices[1].constraint, request.choices[2].constraint);
}

std::string refusal(const std::string& schema) {
  try {
    checked_schema(nlohmann::ordered_json::parse(schema), "s");
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status(), 400);
    return error.param();
  }
  return "";
}

TEST(AnswerSchema, WhatCanBeHeldIsAccepted) {
  for (
      const char* schema :
      {"true", "{}", R"({"type": "null", "description": "d", "title": "t"})",
       R"({"type": ["string", "null"], "maxLength": 3})", R"({"enum": [1, "a", null]})", R"({"const": {"a": 1}})",
       R"({"type": "string", "pattern": "^a{2,5}$"})", R"({"type": "string", "format": "date-time"})",
       R"({"type": "number", "exclusiveMinimum": 0.5})",
       R"({"type": "array", "prefixItems": [{"type": "null"}], "items": false, "minItems": 1})",
       R"({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}})",
       R"({"oneOf": [{"type": "string"}, {"type": "null"}]})",
       R"({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}, {"$ref": "#/$defs/b"}],
            "$defs": {"b": {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}}, "discriminator": {"propertyName": "k"}})",
       R"({"allOf": [{"type": "null"}]})"}) {
    if (std::string_view(schema).find("\"items\": false") != std::string_view::npos) {
      EXPECT_EQ(refusal(schema), "s.items") << "nothing satisfies false";
      continue;
    }
    EXPECT_EQ(refusal(schema), "") << schema;
    const std::string checked = checked_schema(nlohmann::ordered_json::parse(schema), "s");
    k2_context(false).grammars->constrain(with_schema(checked), {}, false, k2_context(false).vocab);
  }
}

TEST(AnswerSchema, WhatCannotIsNamedByItsPlace) {
  const std::vector<std::pair<std::string, std::string>> refused{
      {"5", "s"},
      {"false", "s"},
      {R"({"type": "text"})", "s.type"},
      {R"({"type": []})", "s.type"},
      {R"({"not": {}})", "s"},
      {R"({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}})", "s.properties.a"},
      {R"({"type": "array", "items": {"type": "array", "uniqueItems": true}})", "s.items"},
      {R"({"type": "string", "minLength": 5, "maxLength": 4})", "s.maxLength"},
      {R"({"type": "string", "maxLength": 1000000000})", "s.maxLength"},
      {R"({"type": "string", "maxLength": -1})", "s.maxLength"},
      {R"({"type": "string", "pattern": "a", "maxLength": 3})", "s"},
      {R"({"type": "string", "pattern": "(a{900}){900}"})", "s.pattern"},
      {R"({"type": "string", "format": "regex"})", "s.format"},
      {R"({"type": "integer", "minimum": 0.5})", "s.minimum"},
      {R"({"$ref": "#/$defs/none"})", "s.$ref"},
      {R"({"$ref": "other.json"})", "s.$ref"},
      {R"({"$ref": "#", "type": "null"})", "s"},
      {R"({"enum": []})", "s.enum"},
      {R"({"anyOf": [{"type": "null"}, {"type": "nil"}]})", "s.anyOf[1].type"},
      {R"({"allOf": [{}, {}]})", "s.allOf"},
      {R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})", "s.oneOf"},
      {R"({"oneOf": [{"type": "object"}, {"type": "object"}]})", "s.oneOf"},
      {R"({"type": "object", "required": ["a"]})", "s.required"},
      {R"({"type": "object", "properties": []})", "s.properties"},
  };
  for (const auto& [schema, place] : refused) EXPECT_EQ(refusal(schema), place) << schema;
  std::string deep = "{}";
  for (int i = 0; i < 40; ++i) deep = R"({"type": "array", "items": )" + deep + "}";
  EXPECT_TRUE(refusal(deep).starts_with("s.items.items"));
  EXPECT_EQ(refusal(R"({"const": ")" + std::string(70000, 'x') + R"("})"), "s");
}

TEST(AnswerSchema, PatternsMatchNothingThatJsonEscapes) {
  const auto refused = [](std::string_view pattern) {
    try {
      json_safe_pattern(pattern);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  for (const char* pattern :
       {"\"",     "a\\\\b", "[\"x]",   "[\\\\]", "[A-z]", "[!-~]", "\\n",  "\\x41",  "\\u0041",     "\\b",
        "(a)\\1", "(?=a)",  "(?<n>a)", "[",      "[]",    "a\\",   "\x01", "[\x01]", "[[:alpha:]]", "[z-a]",
        "a^b",    "a$b",    "a**",     "+a",     "(|*)",  "a{x}",  "a{2",  "a{1}{2}"})
    EXPECT_TRUE(refused(pattern)) << pattern;
  for (const char* pattern : {"^.{3}$", "[^a]{4}", "\\S\\D\\W{2}", "[\\w.-]+@x", "(?:a|b)?", "^a+?b{2,3}$", "^a|b$",
                              "a\\.b\\/c", "[a-z0-9_\\]]{2}", "\u00fc+"}) {
    ASSERT_FALSE(refused(pattern)) << pattern;
    nlohmann::ordered_json schema{{"type", "string"}, {"pattern", pattern}};
    const auto& context = k2_context(false);
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const auto constraint =
          context.grammars->constrain(with_schema(checked_schema(schema, "s")), {}, false, context.vocab);
      const auto turn = say(context, constraint.get(), false, seed);
      EXPECT_TRUE(!turn.complete || Json::accept(turn.content)) << pattern << ": " << turn.content;
    }
  }
}

TEST(AnswerSchema, PointersThatGoAroundInCirclesAreRefusedOrFinite) {
  for (const char* schema :
       {R"({"$ref": "#"})", R"({"anyOf": [{"$ref": "#"}, {"type": "null"}]})",
        R"({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})"}) {
    SCOPED_TRACE(schema);
    try {
      const std::string checked = checked_schema(nlohmann::ordered_json::parse(schema), "s");
      const auto& context = k2_context(false);
      const auto constraint = context.grammars->constrain(with_schema(checked), {}, false, context.vocab);
      say(context, constraint.get(), false, 3);  // ends: by the turn, or by the test's patience
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status(), 400);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    }
  }
}

}  // namespace answer_format_test
}  // namespace tidelock::serve
