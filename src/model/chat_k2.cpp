// The K2 chat protocol (Kimi-Linear): conversations to prompt tokens.
//
//   message      <|im_user|> NAME <|im_middle|> text <|im_end|>        NAME: the message's name, else its role;
//                                                                      <|im_system|>, <|im_assistant|> likewise
//   tools        <|im_system|> tool_declare <|im_middle|> JSON list <|im_end|>   first of all; keys keep their order
//   calls        content <|tool_calls_section_begin|> { call } <|tool_calls_section_end|> <|im_end|>
//   call         <|tool_call_begin|> functions.NAME:INDEX <|tool_call_argument_begin|> JSON <|tool_call_end|>
//   tool result  <|im_system|> NAME <|im_middle|> "## Return of ID\n" text <|im_end|>
//   reasoning    <think> text </think> at an assistant's start, only where the vocabulary has these tokens
//
// INDEX counts the conversation's calls from 0. An id of this form is kept as it is, since the model wrote it; others
// (a client's own) are replaced by the call's number. Reasoning is kept for the turns since the last one that made no
// call, and empty before it. No system message is invented when the conversation has none.
#include <algorithm>
#include <map>

#include "base/error.hpp"
#include "model/chat_markup.hpp"
#include "model/chat_protocols.hpp"
#include "model/json.hpp"

namespace tidelock::model::k2 {
namespace {

constexpr std::string_view function_prefix = "functions.";

std::string call_id(std::string_view name, std::size_t number) {
  return fmt::format("{}{}:{}", function_prefix, name, number);
}

class PromptWriter {
 public:
  explicit PromptWriter(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void text(std::string_view segment) {
    const auto tokens = tokenizer_.encode_text(segment);
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  }
  void mark(std::string_view name) { tokens_.push_back(tokenizer_.special(name)); }
  void begin(std::string_view role_mark, std::string_view name) {
    mark(role_mark);
    text(name);
    mark("<|im_middle|>");
  }
  void open_call(std::string_view id) {
    mark("<|tool_call_begin|>");
    text(id);
    mark("<|tool_call_argument_begin|>");
  }
  void message(std::string_view role_mark, std::string_view name, std::string_view body) {
    begin(role_mark, name);
    text(body);
    mark("<|im_end|>");
  }
  std::vector<TokenId> take() { return std::move(tokens_); }

 private:
  const Tokenizer& tokenizer_;
  std::vector<TokenId> tokens_;
};

std::string ordered_json(std::string_view text, const std::string& what) {
  if (!parse_json(text, what, {.code = ErrorCode::invalid_argument}).is_object())  // the checks; it sorts keys
    fail(ErrorCode::invalid_argument, "{} is not a JSON object", what);
  return nlohmann::ordered_json::parse(text).dump();
}

// The ids that calls have in the tokens, and which result belongs to which.
class CallIds {
 public:
  explicit CallIds(std::size_t calls_before) : made_(calls_before) {}

  // The calls of one assistant's turn.
  void start_turn(std::span<const ToolCall> calls) {
    turn_.clear();
    results_ = 0;
    for (const ToolCall& call : calls) {
      if (call.name.empty()) fail(ErrorCode::invalid_argument, "tool call {} has no function name", turn_.size() + 1);
      CallId parts;
      const bool own = split_call_id(call.id, parts) && parts.id == call.id && parts.name == call.name;
      turn_.push_back(own ? call.id : call_id(call.name, made_));
      if (!call.id.empty()) by_id_[call.id] = turn_.back();
      ++made_;
    }
  }
  const std::vector<std::string>& turn() const { return turn_; }

  std::string of_result(const Message& result) {
    const std::size_t place = results_++;
    if (const auto found = by_id_.find(result.tool_call_id); found != by_id_.end()) return found->second;
    if (!result.tool_call_id.empty()) return result.tool_call_id;
    if (place < turn_.size()) return turn_[place];
    fail(ErrorCode::invalid_argument, "tool result {} has no tool_call_id, and {} calls stand before it", place + 1,
         turn_.size());
  }

 private:
  std::size_t made_, results_ = 0;
  std::vector<std::string> turn_;
  std::map<std::string, std::string, std::less<>> by_id_;
};

struct Thinking {
  bool available;  // the vocabulary has the markup
  bool on;
};

Thinking check_options(const Tokenizer& tokenizer, const ChatOptions& options) {
  const Thinking thinking{can_think(tokenizer), options.thinking};
  if (thinking.on && !thinking.available)
    throw Error(ErrorCode::invalid_argument,
                fmt::format("thinking: {} has no <think> and </think> tokens", tokenizer.name()),
                "switch thinking off for this model");
  if (thinking.on) check_choice("thinking_effort (K2 protocol)", options.thinking_effort, {"", "max"});
  check_choice("tool_choice (K2 protocol)", options.tool_choice, {"auto", "none"});
  check_choice("response_format (K2 protocol)", options.response_format, {"text"});
  return thinking;
}

void write_completion(PromptWriter& writer, const Message& message, const CallIds& ids, Thinking thinking) {
  if (thinking.on && !is_blank(message.reasoning)) writer.text(message.reasoning);
  if (thinking.on) writer.mark("</think>");
  writer.text(message.content);
  if (!message.tool_calls.empty()) {
    writer.mark("<|tool_calls_section_begin|>");
    for (std::size_t i = 0; i < message.tool_calls.size(); ++i) {
      writer.open_call(ids.turn()[i]);
      writer.text(message.tool_calls[i].arguments_json);
      writer.mark("<|tool_call_end|>");
    }
    writer.mark("<|tool_calls_section_end|>");
  }
  writer.mark("<|im_end|>");
}

void write_generation_prompt(PromptWriter& writer, Thinking thinking, std::string_view name = "assistant") {
  writer.begin("<|im_assistant|>", name);
  if (!thinking.available) return;
  writer.mark("<think>");
  if (!thinking.on) writer.mark("</think>");
}

void write_result(PromptWriter& writer, const Message& result, CallIds& ids) {
  // One segment: between two marks the model has seen one text.
  writer.message("<|im_system|>", result.name.empty() ? "tool" : result.name,
                 fmt::format("## Return of {}\n{}", ids.of_result(result), result.content));
}

void write_conversation(PromptWriter& writer, std::span<const Message> messages, Thinking thinking) {
  const auto answered = std::find_if(messages.rbegin(), messages.rend(),
                                     [](const Message& m) { return m.role == "assistant" && m.tool_calls.empty(); });
  const auto forgotten = static_cast<std::size_t>(messages.rend() - answered);
  CallIds ids(0);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    const std::string& name = message.name.empty() ? message.role : message.name;
    if (!message.tools.empty())
      fail(ErrorCode::invalid_argument, "messages[{}] declares tools: the K2 protocol does so only at the start", i);
    if (message.role == "user") {
      writer.message("<|im_user|>", name, message.content);
    } else if (message.role == "system") {
      writer.message("<|im_system|>", name, message.content);
    } else if (message.role == "assistant") {
      ids.start_turn(message.tool_calls);
      const Thinking shown{thinking.available, thinking.on && i >= forgotten};
      write_generation_prompt(writer, shown, name);
      write_completion(writer, message, ids, shown);
    } else if (message.role == "tool") {
      write_result(writer, message, ids);
    } else {
      fail(ErrorCode::invalid_argument, "messages[{}] has role {}, expected system, user, assistant or tool", i,
           json_quote(message.role));
    }
  }
}

}  // namespace

bool split_call_id(std::string_view text, CallId& parts) {
  constexpr std::string_view blank = " \t\r\n";
  text.remove_prefix(std::min(text.find_first_not_of(blank), text.size()));
  text = text.substr(0, text.find_last_not_of(blank) + 1);
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon + 1 == text.size() ||
      text.find_first_not_of("0123456789", colon + 1) != std::string_view::npos)
    return false;
  std::string_view name = text.substr(0, colon);
  if (name.starts_with(function_prefix)) name.remove_prefix(function_prefix.size());
  parts = {std::string(text), std::string(name)};
  return !name.empty();
}

std::vector<TokenId> open_call(const Tokenizer& tokenizer, std::string_view name, std::size_t number) {
  PromptWriter writer(tokenizer);
  writer.open_call(call_id(name, number));
  return writer.take();
}

std::vector<TokenId> render_chat(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::span<const ToolSpec> tools, const ChatOptions& options,
                                 bool add_generation_prompt) {
  const Thinking thinking = check_options(tokenizer, options);
  PromptWriter writer(tokenizer);
  std::string list;
  for (std::size_t i = 0; i < tools.size(); ++i) {
    if (i > 0) list += ',';
    list += ordered_json(tools[i].json, fmt::format("tools[{}]", i));
  }
  // The protocol has no words for "call nothing": what the model is not told of it does not call.
  if (!tools.empty() && options.tool_choice != "none")
    writer.message("<|im_system|>", "tool_declare", fmt::format("[{}]", list));
  write_conversation(writer, messages, thinking);
  if (add_generation_prompt) write_generation_prompt(writer, thinking);
  return writer.take();
}

std::vector<TokenId> render_completion(const Tokenizer& tokenizer, const Message& message, const ChatOptions& options) {
  const Thinking thinking = check_options(tokenizer, options);
  PromptWriter writer(tokenizer);
  CallIds ids(options.calls_before);
  ids.start_turn(message.tool_calls);
  write_completion(writer, message, ids, thinking);
  return writer.take();
}

std::vector<TokenId> render_tool_results(const Tokenizer& tokenizer, std::span<const Message> tool_messages,
                                         const ChatOptions& options, bool add_generation_prompt,
                                         std::span<const ToolCall> calls) {
  const Thinking thinking = check_options(tokenizer, options);
  PromptWriter writer(tokenizer);
  CallIds ids(options.calls_before);
  ids.start_turn(calls);
  for (const Message& message : tool_messages) write_result(writer, message, ids);
  if (add_generation_prompt) write_generation_prompt(writer, thinking);
  return writer.take();
}

}  // namespace tidelock::model::k2
