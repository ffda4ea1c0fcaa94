#include "model/chat.hpp"

#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>

#include "base/error.hpp"
#include "model/chat_protocols.hpp"
#include "model/json.hpp"

namespace tidelock::model {
namespace {

constexpr std::string_view k2_markup[] = {"<|im_end|>",
                                          "<|im_user|>",
                                          "<|im_assistant|>",
                                          "<|im_system|>",
                                          "<|im_middle|>",
                                          "<|tool_calls_section_begin|>",
                                          "<|tool_calls_section_end|>",
                                          "<|tool_call_begin|>",
                                          "<|tool_call_argument_begin|>",
                                          "<|tool_call_end|>"};
constexpr std::string_view k3_markup[] = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};

std::vector<std::string_view> found(const Tokenizer& tokenizer, std::span<const std::string_view> names) {
  std::vector<std::string_view> present;
  for (const std::string_view name : names)
    if (tokenizer.find_special(name)) present.push_back(name);
  return present;
}

void check_options(const ChatOptions& options) {
  check_choice("tool_choice", options.tool_choice, {"auto", "required", "none"});
  check_choice("response_format", options.response_format, {"text", "json_object", "json_schema"});
}

}  // namespace

void check_choice(std::string_view field, std::string_view value, std::initializer_list<std::string_view> allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
  std::string list;
  for (const std::string_view choice : allowed) list += fmt::format("{}\"{}\"", list.empty() ? "" : ", ", choice);
  fail(ErrorCode::invalid_argument, "{} is {}, expected one of {}", field, json_quote(value), list);
}

bool is_blank(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view next = text.substr(at, 4);
    UChar32 c = 0;
    std::int32_t read = 0;
    U8_NEXT(next.data(), read, static_cast<std::int32_t>(next.size()), c);
    if (c < 0 || !u_isUWhiteSpace(c)) return false;
    at += static_cast<std::size_t>(read);
  }
  return true;
}

ChatProtocol chat_protocol(const Tokenizer& tokenizer) {
  const auto k2 = found(tokenizer, k2_markup), k3 = found(tokenizer, k3_markup);
  if (k2.size() == std::size(k2_markup) && k3.empty()) return ChatProtocol::k2;
  if (k3.size() == std::size(k3_markup) && k2.empty()) return ChatProtocol::k3;
  if (k2.empty() && k3.empty())
    throw Error(ErrorCode::not_supported,
                fmt::format("{} has the special tokens of no chat protocol: expected <|im_end|>, <|im_user|>, ... "
                            "(K2) or <|open|>, <|end_of_msg|>, ... (K3)",
                            tokenizer.name()),
                "give plain text or token ids instead of a chat");
  // The two families give the same ids to different markup: a table with tokens of both is of neither.
  fail(ErrorCode::not_supported,
       "{} has {} of the {} special tokens of the K2 chat protocol{} and {} of the {} of K3{}: expected all of one "
       "and none of the other",
       tokenizer.name(), k2.size(), std::size(k2_markup), k2.empty() ? "" : fmt::format(" ({}, ...)", k2[0]), k3.size(),
       std::size(k3_markup), k3.empty() ? "" : fmt::format(" ({}, ...)", k3[0]));
}

TokenId end_of_turn(const Tokenizer& tokenizer) {
  return tokenizer.special(chat_protocol(tokenizer) == ChatProtocol::k2 ? "<|im_end|>" : "<|end_of_msg|>");
}

bool can_think(const Tokenizer& tokenizer) {
  return chat_protocol(tokenizer) == ChatProtocol::k3 ||
         (tokenizer.find_special("<think>") && tokenizer.find_special("</think>"));
}

std::vector<TokenId> render_chat(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::span<const ToolSpec> tools, const ChatOptions& options,
                                 bool add_generation_prompt) {
  check_options(options);
  return (chat_protocol(tokenizer) == ChatProtocol::k2 ? k2::render_chat : k3::render_chat)(
      tokenizer, messages, tools, options, add_generation_prompt);
}

std::vector<TokenId> render_completion(const Tokenizer& tokenizer, const Message& message, const ChatOptions& options) {
  return (chat_protocol(tokenizer) == ChatProtocol::k2 ? k2::render_completion : k3::render_completion)(
      tokenizer, message, options);
}

std::vector<TokenId> render_tool_results(const Tokenizer& tokenizer, std::span<const Message> tool_messages,
                                         const ChatOptions& options, bool add_generation_prompt,
                                         std::span<const ToolCall> calls) {
  check_options(options);
  for (const Message& message : tool_messages)
    if (message.role != "tool")
      fail(ErrorCode::invalid_argument, "a tool result has role {}, expected tool", json_quote(message.role));
  return (chat_protocol(tokenizer) == ChatProtocol::k2 ? k2::render_tool_results : k3::render_tool_results)(
      tokenizer, tool_messages, options, add_generation_prompt, calls);
}

}  // namespace tidelock::model
