// Calls that are forced, and calls that are held to their tools: whatever a model would say, what may be sampled is a
// turn of the chat protocol that calls what it was told, with arguments that fit.
#include <set>

#include "model/json.hpp"
#include "serve/api_error.hpp"
#include "serve/argument_schema.hpp"
#include "serve/random_model.hpp"
#include "serve/schema_check.hpp"

namespace tidelock::serve {
namespace call_constraint_test {

using model::Json;
using testing::k2_context;
using testing::k3_context;
using testing::protocols;
using testing::say;

const std::string kWeather =
    R"({"type": "object", "properties": {"city": {"enum": ["Bern", "São \"P\"\\\nPaulo"]}, "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
        "unit": {"anyOf": [{"const": "C"}, {"const": "F"}, {"type": "boolean"}]}, "when": {"type": "string", "format": "date"},
        "note": {"type": "string", "minLength": 2, "maxLength": 3}, "code": {"type": "string", "pattern": "[a-c]{2}x?"},
        "place": {"$ref": "#/$defs/place"}},
        "required": ["city", "days", "unit", "when", "note", "code", "place"], "additionalProperties": false,
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "integer"}}, "required": ["lat"]}}})";

CallRules::Tool strict(const std::string& name, const std::string& schema) {
  return {name, true, checked_schema(nlohmann::ordered_json::parse(schema), "p"), "p"};
}

std::size_t characters(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80; }));
}

void expect_weather(const std::string& arguments) {
  const Json json = Json::parse(arguments);
  ASSERT_EQ(json.size(), 7U) << arguments;
  const std::string city = json.at("city");
  EXPECT_TRUE(city == "Bern" || city == "São \"P\"\\\nPaulo") << arguments;
  EXPECT_TRUE(json.at("days").is_null() || (json.at("days") >= 1 && json.at("days") <= 9)) << arguments;
  EXPECT_TRUE(json.at("unit") == "C" || json.at("unit") == "F" || json.at("unit").is_boolean()) << arguments;
  const std::string when = json.at("when"), code = json.at("code");
  EXPECT_TRUE(when.size() == 10 && when[4] == '-' && when[7] == '-') << arguments;
  EXPECT_LE(characters(json.at("note").get<std::string>()), 3U) << arguments;
  EXPECT_GE(characters(json.at("note").get<std::string>()), 2U) << arguments;
  EXPECT_TRUE(code.substr(0, 2).find_first_not_of("abc") == std::string::npos &&
              (code.size() == 2 || (code.size() == 3 && code[2] == 'x')))
      << arguments;
  EXPECT_TRUE(json.at("place").size() == 1 && json.at("place").at("lat").is_number_integer()) << arguments;
}

// ---- what must never break

TEST(CallConstraint, ARequiredCallOfAStrictToolFitsItsSchemaWhateverTheModelWouldSay) {
  std::size_t calls = 0;
  for (const auto& [name, context, thinking] : protocols()) {
    CallRules rules{
        {strict("weather", kWeather), strict("weather_2", R"({"type": "object", "additionalProperties": false})")},
        true};
    rules.calls_before = 7;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      SCOPED_TRACE(fmt::format("{}, seed {}", name, seed));
      const auto constraint = context.grammars->constrain({}, rules, thinking, context.vocab);
      const auto turn = say(context, constraint.get(), thinking, seed, true);
      ASSERT_EQ(turn.problem, "");
      EXPECT_EQ(turn.content, "");
      ASSERT_FALSE(turn.calls.empty());
      for (std::size_t i = 0; i < turn.calls.size(); ++i, ++calls) {
        if (&context == &k3_context()) {
          EXPECT_EQ(turn.calls[i].id.empty(), false);
        } else {
          EXPECT_EQ(turn.calls[i].id, fmt::format("functions.{}:{}", turn.calls[i].name, 7 + i));
        }
        if (turn.calls[i].name == "weather") {
          expect_weather(turn.calls[i].arguments_json);
        } else {
          EXPECT_EQ(turn.calls[i].name, "weather_2");
          EXPECT_EQ(Json::parse(turn.calls[i].arguments_json), Json::object());
        }
      }
      if (turn.complete) {
        EXPECT_TRUE(constraint->allowed().empty()) << "behind the turn nothing is asked";
      }
    }
  }
  EXPECT_GT(calls, 100U);
}

TEST(CallConstraint, WithoutItTheSameModelCallsNothing) {  // the twin of the test before
  for (const auto& [name, context, thinking] : protocols())
    for (std::uint64_t seed = 0; seed < 20; ++seed)
      EXPECT_TRUE(say(context, nullptr, thinking, seed).calls.empty()) << name;
}

TEST(CallConstraint, OneCallAtMostWhenCallsAreNotToBeParallel) {
  std::size_t more = 0;
  for (const auto& [name, context, thinking] : protocols())
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      CallRules rules{{strict("f", R"({"type": "object", "properties": {"a": {"const": 1}}})")}, true, false};
      const auto one =
          say(context, context.grammars->constrain({}, rules, thinking, context.vocab).get(), thinking, seed, true);
      EXPECT_EQ(one.calls.size(), 1U) << name;
      EXPECT_TRUE(one.complete) << name << ": " << one.problem;
      rules.parallel = true;
      more += say(context, context.grammars->constrain({}, rules, thinking, context.vocab).get(), thinking, seed, true)
                  .calls.size();
    }
  EXPECT_GT(more, 130U) << "the same model calls more often when it may";
}

TEST(CallConstraint, AModelThatMayCallSaysContentOrCallsAsItLikes) {
  std::set<std::string> seen;
  for (const auto& [name, context, thinking] : protocols())
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      const CallRules rules{{strict("weather", kWeather)}};
      const auto turn =
          say(context, context.grammars->constrain({}, rules, thinking, context.vocab).get(), thinking, seed, true);
      ASSERT_EQ(turn.problem, "") << name;
      for (const auto& call : turn.calls) expect_weather(call.arguments_json);
      if (turn.complete) seen.insert(fmt::format("{} {}", name, turn.calls.empty() ? "says" : "calls"));
    }
  EXPECT_EQ(seen.size(), 2 * protocols().size());
}

TEST(CallConstraint, ALooseToolIsCalledWhenItMustBeAndSaysWhatItLikes) {
  std::size_t calls = 0;
  for (const auto& [name, context, thinking] : protocols())
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const auto constraint = context.grammars->constrain({}, {{{"loose"}}, true, false}, thinking, context.vocab);
      const auto turn = say(context, constraint.get(), thinking, seed, true);
      for (const auto& call : turn.calls) {
        EXPECT_EQ(call.name, "loose") << name;
        ++calls;
      }
      if (&context != &k3_context()) {
        EXPECT_EQ(turn.problem, "") << name;
      }
    }
  EXPECT_GT(calls, 40U);
}

TEST(CallConstraint, NothingIsAskedOfToolsThatAskForNothing) {
  EXPECT_EQ(k3_context().grammars->constrain({}, {{{"f"}}}, false, k3_context().vocab), nullptr);
  EXPECT_EQ(k3_context().grammars->constrain({}, {{}, true, false}, false, k3_context().vocab), nullptr);
  EXPECT_NE(k3_context().grammars->constrain({}, {{{"f"}}, true}, false, k3_context().vocab), nullptr);
}

TEST(CallConstraint, ARequestHasWhatItSays) {
  const std::string body =
      R"({"model": "m", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
           {"id": "functions.g:0", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
           {"role": "tool", "tool_call_id": "functions.g:0", "content": "y"}],
          "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g", "strict": true,
            "parameters": {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["a", "z"], "additionalProperties": false}}}],
          "tool_choice": {"type": "function", "function": {"name": "g"}}, "parallel_tool_calls": false})";
  for (const auto* context : {&k3_context(), &k2_context(false)}) {
    const auto request = read_chat_request(body, *context);
    const auto turn = say(*context, request.choices.at(0).constraint.get(), false, 3);
    ASSERT_EQ(turn.calls.size(), 1U) << turn.problem;
    EXPECT_EQ(turn.calls[0].name, "g");
    EXPECT_EQ(Json::parse(turn.calls[0].arguments_json), Json::parse(R"({"a": 2, "z": 1})"));
    if (context == &k2_context(false)) {
      EXPECT_EQ(turn.calls[0].id, "functions.g:1") << "the second of the conversation";
    }
  }
}

// ---- the rest

std::string rules_of(const std::string& properties) {
  using Form = ArgumentRule::Form;
  const std::map<Form, std::string> names{{Form::any_text, "text"},
                                          {Form::json, "json"},
                                          {Form::quoted_json, "quoted"},
                                          {Form::regex, "regex"},
                                          {Form::ebnf, "ebnf"}};
  std::string out;
  try {
    const auto checked = checked_schema(
        nlohmann::ordered_json::parse(R"({"type": "object", "properties": )" + properties +
                                      R"(, "$defs": {"n": {"type": "integer"}, "me": {"$ref": "#/$defs/me"}}})"),
        "p");
    for (const ArgumentRule& rule : argument_rules(checked, "p").rules)
      out += fmt::format("{}:{}:{}; ", rule.key, rule.type, names.at(rule.form));
  } catch (const ApiError& error) {
    return error.param();
  }
  return out;
}

TEST(ArgumentRules, EachTypeOfAPropertyIsAFormOfItsOwn) {
  EXPECT_EQ(rules_of(R"({"a": {"type": "string"}, "b": {"$ref": "#/$defs/n"}})"), "0:string:text; 1:number:json; ");
  EXPECT_EQ(rules_of(R"({"a": {"type": ["string", "null"]}})"), "0:null:json; 0:string:text; ");
  EXPECT_EQ(rules_of(R"({"a": {"enum": ["x", 1, null, "y"]}})"), "0:null:json; 0:number:json; 0:string:ebnf; ");
  EXPECT_EQ(rules_of(R"({"a": true})"),
            "0:array:json; 0:boolean:json; 0:null:json; 0:number:json; 0:object:json; 0:string:text; ");
  EXPECT_EQ(rules_of(R"({"a": {"type": "string", "format": "uuid"}, "b": {"type": "string", "pattern": "a"}})"),
            "0:string:quoted; 1:string:regex; ");
  EXPECT_EQ(rules_of(R"({"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string"}]}})"),
            "0:string:text; ");
  EXPECT_EQ(rules_of(R"({})"), "");
}

TEST(ArgumentRules, WhatCannotBeToldArgumentByArgumentIsNamed) {
  EXPECT_EQ(rules_of(R"({"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"const": "long"}]}})"), "p.properties.a");
  EXPECT_EQ(rules_of(R"({"a": {"enum": ["\u0001"]}})"), "p.properties.a");
  EXPECT_EQ(rules_of(R"({"b": {"type": "array", "items": {"$ref": "#/properties/b"}}})"), "p.properties.b");
  EXPECT_EQ(rules_of(R"({"b": {"$ref": "#/$defs/me"}})"), "p.properties.b") << "around in a circle";
  EXPECT_THROW(argument_rules(R"({"type": "string"})", "p"), ApiError);
  EXPECT_THROW(argument_rules(R"({"$ref": "#"})", "p"), ApiError);
}

}  // namespace call_constraint_test
}  // namespace tidelock::serve
