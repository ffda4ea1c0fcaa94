// The K3 chat protocol (XTML): conversations to prompt tokens.
//
//   open(tag, k=v ...)  <|open|> tag { " k" `="` v `"` } <|sep|>        in v, & is &amp; and then " is &quot;
//   close(tag)          <|close|> tag <|sep|>
//   message             open(message, role=.. ...) body close(message) <|end_of_msg|>
//   assistant body      open(think) reasoning close(think) open(response) content close(response)
//                       [open(tools) calls close(tools)]
//   call                open(call, tool=NAME, index=1..) arguments close(call)
//   argument            open(argument, key=KEY, type=TYPE) value close(argument)   strings raw, other types JSON
//
// A prompt is: tool declarations, the thinking effort, the conversation, the notes on tool choice and response format,
// the generation prompt. The four specials come from here alone: every tag name, attribute part and text is a segment
// of its own, encoded as plain text, so nothing that a user or a tool writes can close or open an element, and no merge
// crosses a segment. toolcall.hpp reads what the model answers.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "model/tokenizer.hpp"

namespace tidelock::model {

struct ToolCall {
  std::string id = {};  // links a result to its call; not part of the tokens
  std::string name = {};
  std::string arguments_json = {};  // a JSON object; any other text is carried as one raw block
  friend bool operator==(const ToolCall&, const ToolCall&) = default;
};

// A function as the OpenAI API describes it: {"type": "function", "function": {"name", "description", "parameters"}}.
struct ToolSpec {
  std::string json = {};
};

struct Message {
  std::string role = {};  // "system", "user", "assistant" or "tool"
  std::string content = {};
  std::string reasoning = {};             // assistant: rendered when thinking is on, unless blank
  std::vector<ToolCall> tool_calls = {};  // assistant
  std::string tool_call_id = {};          // tool: the call that this is the result of
  std::string name = {};                  // tool: the tool's name; other roles: an optional name attribute
  std::vector<ToolSpec> tools = {};  // system: declares tools in mid-conversation; the content is not rendered then
};

struct ChatOptions {
  bool thinking = true;                  // off: no think channel, no thinking effort
  std::string thinking_effort = "max";   // "low", "high", "max"; empty: no such message
  std::string tool_choice = "auto";      // "auto", "required", "none"
  std::string response_format = "text";  // "text", "json_object", "json_schema"
  std::string response_schema = {};      // for json_schema: the JSON Schema
};

// The prompt. Results of tools that stand together are put into the order of their calls when each names its call; the
// tool's name is taken from the call, from `name`, or from the call at the same place, in this order. Throws
// Error{invalid_argument} for unknown roles and options, tool JSON that does not parse and results without a name,
// Error{not_found} for a vocabulary without the protocol's special tokens.
std::vector<TokenId> render_chat(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::span<const ToolSpec> tools, const ChatOptions& options,
                                 bool add_generation_prompt);

// What the model would have to generate after a generation prompt to say `message`, up to and with <|end_of_msg|>: the
// target of supervised training. Appended to the prompt it is what render_chat makes of the longer conversation, when
// that has no notes.
std::vector<TokenId> render_completion(const Tokenizer& tokenizer, const Message& message, const ChatOptions& options);

// The tokens that follow an assistant turn that ended with <|end_of_msg|> when these results come back; `calls` are
// that turn's. The notes and the generation prompt follow when asked for. Tokens already in the context stay as they
// are: a rollout never turns text into tokens twice.
std::vector<TokenId> render_tool_results(const Tokenizer& tokenizer, std::span<const Message> tool_messages,
                                         const ChatOptions& options, bool add_generation_prompt,
                                         std::span<const ToolCall> calls = {});

}  // namespace tidelock::model
