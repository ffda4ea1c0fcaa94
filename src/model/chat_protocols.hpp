// The two protocols behind chat.hpp, and what they share. Private to model/.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/chat.hpp"

namespace tidelock::model {

namespace k2 {
std::vector<TokenId> render_chat(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::span<const ToolSpec> tools, const ChatOptions& options,
                                 bool add_generation_prompt);
std::vector<TokenId> render_completion(const Tokenizer& tokenizer, const Message& message, const ChatOptions& options);
std::vector<TokenId> render_tool_results(const Tokenizer& tokenizer, std::span<const Message> tool_messages,
                                         const ChatOptions& options, bool add_generation_prompt,
                                         std::span<const ToolCall> calls);

// "functions.NAME:INDEX" taken apart; the prefix may be missing, blanks around it are dropped. False for other text.
struct CallId {
  std::string id, name;
};
bool split_call_id(std::string_view text, CallId& parts);
}  // namespace k2

namespace k3 {
std::vector<TokenId> render_chat(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::span<const ToolSpec> tools, const ChatOptions& options,
                                 bool add_generation_prompt);
std::vector<TokenId> render_completion(const Tokenizer& tokenizer, const Message& message, const ChatOptions& options);
std::vector<TokenId> render_tool_results(const Tokenizer& tokenizer, std::span<const Message> tool_messages,
                                         const ChatOptions& options, bool add_generation_prompt,
                                         std::span<const ToolCall> calls);
}  // namespace k3

// Throws Error{invalid_argument} naming the field unless `value` is one of `allowed`.
void check_choice(std::string_view field, std::string_view value, std::initializer_list<std::string_view> allowed);

// Whether `text` is empty or white space only.
bool is_blank(std::string_view text);

}  // namespace tidelock::model
