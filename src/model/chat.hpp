// Conversations to prompt tokens, in the protocol of the vocabulary at hand.
//
// Kimi-Linear and its kin speak K2 (chat_k2.cpp), K3 and K3.1 speak K3 (chat_k3.cpp). The two give the same ids to
// different markup, so the choice is made by the names of the special tokens alone and never mixed.
//
// Markup comes from here alone: every text is a segment of its own, encoded as plain text, so nothing that a user or a
// tool writes can close or open an element, and no merge crosses a segment. toolcall.hpp reads what the model answers.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "model/tokenizer.hpp"

namespace tidelock::model {

enum class ChatProtocol { k2, k3 };

// By the special tokens. Throws Error{not_supported} for a vocabulary that has those of neither or of both protocols,
// or only some of one.
ChatProtocol chat_protocol(const Tokenizer& tokenizer);

// The token that ends an assistant's turn: <|im_end|> (K2), <|end_of_msg|> (K3).
TokenId end_of_turn(const Tokenizer& tokenizer);

// Whether there is markup for reasoning: always in K3, in K2 when the vocabulary has <think> and </think>.
bool can_think(const Tokenizer& tokenizer);

struct ToolCall {
  std::string id = {};  // links a result to its call; part of the tokens in K2 alone
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
  std::vector<ToolSpec> tools = {};  // system, K3: declares tools in mid-conversation; the content is not rendered then
};

struct ChatOptions {
  bool thinking = true;                  // off: no think channel, no thinking effort; see can_think()
  std::string thinking_effort = "max";   // K3: "low", "high", "max"; empty: no such message. K2 has none
  std::string tool_choice = "auto";      // "auto", "none"; K3: "required" too
  std::string response_format = "text";  // K3: "json_object", "json_schema" too
  std::string response_schema = {};      // for json_schema: the JSON Schema
  // K2, render_completion and render_tool_results: calls made earlier in the conversation. Calls whose id is not of the
  // protocol's form are numbered on from here.
  std::size_t calls_before = 0;
};

// The prompt. A result is linked to its call by tool_call_id. K3 puts results that stand together into the order of
// their calls when each names its call, and takes the tool's name from the call, from `name`, or from the call at the
// same place, in this order; K2 keeps their order. Throws Error{invalid_argument} for unknown roles, for options that
// the protocol has no words for, tool JSON that does not parse and results that cannot be linked; what chat_protocol
// throws.
std::vector<TokenId> render_chat(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::span<const ToolSpec> tools, const ChatOptions& options,
                                 bool add_generation_prompt);

// What the model would have to generate after a generation prompt to say `message`, up to and with the end of the turn:
// the target of supervised training. Appended to the prompt it is what render_chat makes of the longer conversation,
// when that has no notes. (K2 with reasoning: up to the turn that makes no more calls; what was thought for an answer
// that was given is left out of later prompts.)
std::vector<TokenId> render_completion(const Tokenizer& tokenizer, const Message& message, const ChatOptions& options);

// The tokens that follow an assistant turn that ended with end_of_turn() when these results come back; `calls` are
// that turn's. The notes and the generation prompt follow when asked for. Tokens already in the context stay as they
// are: a rollout never turns text into tokens twice.
std::vector<TokenId> render_tool_results(const Tokenizer& tokenizer, std::span<const Message> tool_messages,
                                         const ChatOptions& options, bool add_generation_prompt,
                                         std::span<const ToolCall> calls = {});

}  // namespace tidelock::model
