// The K2 protocol: prompts, and the choice between the protocols.
#include <gtest/gtest.h>

#include "base/base.hpp"
#include "model/chat.hpp"
#include "model/expect_refused.hpp"
#include "model/k2_vocabulary.hpp"
#include "model/toolcall.hpp"

namespace tidelock::model {
namespace chat_k2_test {

using testing::assistant;
using testing::expect_refused;
using testing::k2_specials;
using testing::k2_tokenizer;
using testing::Parts;
using testing::result;
using testing::segments;
using testing::user;
using testing::with_specials;

std::string shown(const std::vector<TokenId>& tokens, const Tokenizer& tokenizer) {
  std::string text;
  for (const TokenId token : tokens) text += fmt::format("{}|", tokenizer.token_bytes(token));
  return text;
}

void expect_tokens(const Tokenizer& tokenizer, const std::vector<TokenId>& actual, const Parts& parts) {
  const auto wanted = segments(parts, tokenizer);
  EXPECT_EQ(actual, wanted) << "found  " << shown(actual, tokenizer) << "\nwanted " << shown(wanted, tokenizer);
}

ChatOptions quiet() {
  ChatOptions options;
  options.thinking = false;
  return options;
}

// ---- which protocol ------------------------------------------------------------------------------------------------

TEST(ChatProtocolChoice, IsMadeByTheSpecialTokens) {
  EXPECT_EQ(chat_protocol(k2_tokenizer(false)), ChatProtocol::k2);
  EXPECT_EQ(chat_protocol(k2_tokenizer(true)), ChatProtocol::k2);
  const Parts k3{"[BOS]", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};
  EXPECT_EQ(chat_protocol(with_specials(k3)), ChatProtocol::k3);
  EXPECT_EQ(with_specials(k3).token_bytes(end_of_turn(with_specials(k3))), "<|end_of_msg|>");
  EXPECT_EQ(k2_tokenizer(false).token_bytes(end_of_turn(k2_tokenizer(false))), "<|im_end|>");
  EXPECT_FALSE(can_think(k2_tokenizer(false)));
  EXPECT_TRUE(can_think(k2_tokenizer(true)));
  EXPECT_TRUE(can_think(with_specials(k3)));
  // Both tables put 163586 to 163590 to use: a mixture is refused whatever it is complete in.
  Parts both = k2_specials(false);
  both.insert(both.end(), k3.begin() + 1, k3.end());
  Parts little_k3 = k2_specials(false);
  little_k3.push_back("<|sep|>");
  Parts little_k2 = k3;
  little_k2.push_back("<|im_end|>");
  Parts short_of_one = k2_specials(false);
  std::erase(short_of_one, "<|tool_call_end|>");
  expect_refused(ErrorCode::not_supported, "no chat protocol", [&] { chat_protocol(with_specials({"[BOS]"})); });
  for (const Parts& names : {both, little_k3, little_k2, short_of_one}) {
    const Tokenizer tokenizer = with_specials(names);
    expect_refused(ErrorCode::not_supported, "expected all of one", [&] { chat_protocol(tokenizer); });
    EXPECT_THROW(render_chat(tokenizer, std::vector{user("x")}, {}, quiet(), true), Error);
    EXPECT_THROW(AssistantParser(tokenizer, false), Error);
  }
}

// ---- prompts -------------------------------------------------------------------------------------------------------

TEST(ChatK2, AConversationSegmentBySegment) {
  const std::vector<Message> messages{{.role = "system", .content = "Be brief."},
                                      {.role = "user", .content = "Hello <|im_end|>", .name = "ann"},
                                      assistant("", "Hi"),
                                      user("12*34?")};
  const std::vector<ToolSpec> tools{{R"({"type": "function", "function": {"name": "f", "b": [1, 0.5], "a": "ü"}})"},
                                    {R"({"x": {}})"}};
  expect_tokens(k2_tokenizer(false), render_chat(k2_tokenizer(false), messages, tools, quiet(), true),
                {"<|im_system|>",
                 "tool_declare",
                 "<|im_middle|>",
                 R"([{"type":"function","function":{"name":"f","b":[1,0.5],"a":"ü"}},{"x":{}}])",  // keys as they came
                 "<|im_end|>",
                 "<|im_system|>",
                 "system",
                 "<|im_middle|>",
                 "Be brief.",
                 "<|im_end|>",
                 "<|im_user|>",
                 "ann",
                 "<|im_middle|>",
                 "Hello <|im_",
                 "end|>",  // in parts, to keep it from markup: the cut is a piece's
                 "<|im_end|>",
                 "<|im_assistant|>",
                 "assistant",
                 "<|im_middle|>",
                 "Hi",
                 "<|im_end|>",
                 "<|im_user|>",
                 "user",
                 "<|im_middle|>",
                 "12*34?",
                 "<|im_end|>",
                 "<|im_assistant|>",
                 "assistant",
                 "<|im_middle|>"});
  // No message is invented, and nothing stands where nothing was asked for.
  EXPECT_TRUE(render_chat(k2_tokenizer(false), {}, {}, quiet(), false).empty());
}

TEST(ChatK2, CallsAndTheirResults) {
  const std::vector<Message> messages{
      user("go"),
      assistant("", "One moment", {{"functions.f:0", "f", R"({"a": 1})"}, {"call_b", "g", "{not json"}}),
      result("functions.f:0", "one"),
      result("call_b", "two", "g"),
      assistant("", "", {{"x", "f", ""}}),
      result("", "\nthree"),
      result("unknown", "four")};
  expect_tokens(k2_tokenizer(false), render_chat(k2_tokenizer(false), messages, {}, quiet(), false),
                {"<|im_user|>",
                 "user",
                 "<|im_middle|>",
                 "go",
                 "<|im_end|>",
                 "<|im_assistant|>",
                 "assistant",
                 "<|im_middle|>",
                 "One moment",
                 "<|tool_calls_section_begin|>",
                 "<|tool_call_begin|>",
                 "functions.f:0",
                 "<|tool_call_argument_begin|>",
                 R"({"a": 1})",
                 "<|tool_call_end|>",  // a client's own id becomes the conversation's next number
                 "<|tool_call_begin|>",
                 "functions.g:1",
                 "<|tool_call_argument_begin|>",
                 "{not json",
                 "<|tool_call_end|>",
                 "<|tool_calls_section_end|>",
                 "<|im_end|>",
                 "<|im_system|>",
                 "tool",
                 "<|im_middle|>",
                 "## Return of functions.f:0\none",
                 "<|im_end|>",
                 "<|im_system|>",
                 "g",
                 "<|im_middle|>",
                 "## Return of functions.g:1\ntwo",
                 "<|im_end|>",
                 "<|im_assistant|>",
                 "assistant",
                 "<|im_middle|>",
                 "<|tool_calls_section_begin|>",
                 "<|tool_call_begin|>",
                 "functions.f:2",
                 "<|tool_call_argument_begin|>",
                 "<|tool_call_end|>",
                 "<|tool_calls_section_end|>",
                 "<|im_end|>",  // by place when it names no call; a merge may span the line's end
                 "<|im_system|>",
                 "tool",
                 "<|im_middle|>",
                 "## Return of functions.f:2\n\nthree",
                 "<|im_end|>",
                 "<|im_system|>",
                 "tool",
                 "<|im_middle|>",
                 "## Return of unknown\nfour",
                 "<|im_end|>"});
  expect_refused(ErrorCode::invalid_argument, "tool_call_id", [] {
    render_chat(k2_tokenizer(false), std::vector{user("x"), result("", "y")}, {}, quiet(), true);
  });
  expect_refused(ErrorCode::invalid_argument, "function name", [] {
    render_chat(k2_tokenizer(false), std::vector{assistant("", "", {{"a", "", "{}"}})}, {}, quiet(), true);
  });
}

TEST(ChatK2, ReasoningWhereTheVocabularyHasIt) {
  const Parts header{"<|im_assistant|>", "assistant", "<|im_middle|>"};
  const auto prompt = [&](bool thinking) {
    ChatOptions options;
    options.thinking = thinking;
    return render_chat(k2_tokenizer(true), {}, {}, options, true);
  };
  expect_tokens(k2_tokenizer(true), prompt(true), {header[0], header[1], header[2], "<think>"});
  expect_tokens(k2_tokenizer(true), prompt(false), {header[0], header[1], header[2], "<think>", "</think>"});
  expect_refused(ErrorCode::invalid_argument, "<think>",
                 [] { render_chat(k2_tokenizer(false), std::vector{user("x")}, {}, ChatOptions{}, true); });
  expect_refused(ErrorCode::invalid_argument, "<think>", [] { AssistantParser(k2_tokenizer(false), true); });
  // What was thought for an answer is forgotten, what was thought since it stays.
  const std::vector<Message> messages{assistant("old", "a"), user("u"),
                                      assistant("new", "", {{"functions.f:0", "f", "{}"}}),
                                      result("functions.f:0", "r")};
  expect_tokens(k2_tokenizer(true), render_chat(k2_tokenizer(true), messages, {}, {}, false),
                {"<|im_assistant|>",
                 "assistant",
                 "<|im_middle|>",
                 "<think>",
                 "</think>",
                 "a",
                 "<|im_end|>",
                 "<|im_user|>",
                 "user",
                 "<|im_middle|>",
                 "u",
                 "<|im_end|>",
                 "<|im_assistant|>",
                 "assistant",
                 "<|im_middle|>",
                 "<think>",
                 "new",
                 "</think>",
                 "<|tool_calls_section_begin|>",
                 "<|tool_call_begin|>",
                 "functions.f:0",
                 "<|tool_call_argument_begin|>",
                 "{}",
                 "<|tool_call_end|>",
                 "<|tool_calls_section_end|>",
                 "<|im_end|>",
                 "<|im_system|>",
                 "tool",
                 "<|im_middle|>",
                 "## Return of functions.f:0\nr",
                 "<|im_end|>"});
}

TEST(ChatK2, WhatTheProtocolHasNoWordsForIsRefused) {
  const auto refused = [](const std::string& part, const std::vector<Message>& messages, const ChatOptions& options,
                          const std::vector<ToolSpec>& tools = {}) {
    expect_refused(ErrorCode::invalid_argument, part,
                   [&] { render_chat(k2_tokenizer(true), messages, tools, options, true); });
  };
  const std::vector<ToolSpec> tools{{R"({"x":1})"}};
  EXPECT_NO_THROW(render_chat(k2_tokenizer(true), std::vector{user("x")}, tools, {}, true));
  refused("tool_choice (K2", {}, {.tool_choice = "required"});
  refused("tool_choice", {}, {.tool_choice = "maybe"});
  refused("response_format (K2", {}, {.response_format = "json_object"});
  refused("thinking_effort (K2", {}, {.thinking_effort = "low"});
  refused("declares tools", {{.role = "system", .tools = tools}}, {});
  refused("robot", {{.role = "robot"}}, {});
  refused("tools[0]", {}, {}, {{"{"}});
  refused("tools[0]", {}, {}, {{"[]"}});
  refused("tools[0]", {}, {}, {{R"({"a":1,"a":2})"}});
  // Told to call nothing, the model is not told of any tool.
  EXPECT_EQ(render_chat(k2_tokenizer(true), {}, tools, {.tool_choice = "none"}, true),
            render_chat(k2_tokenizer(true), {}, {}, {}, true));
}

}  // namespace chat_k2_test
}  // namespace tidelock::model
