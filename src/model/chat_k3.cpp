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
// the generation prompt.
#include <algorithm>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "model/chat_markup.hpp"
#include "model/chat_protocols.hpp"
#include "model/json.hpp"
#include "model/toolcall_arguments.hpp"

namespace tidelock::model::k3 {
namespace {

// The protocol's own words; the model was trained on them as they are.
constexpr std::string_view tools_heading =
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n";
constexpr std::string_view new_tools_heading =
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all "
    "existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n";
constexpr std::string_view effort_note =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=";
constexpr std::string_view required_note =
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.";
constexpr std::string_view none_note =
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.";
constexpr std::string_view raw_json_rule =
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.";

std::string escape_attribute(std::string_view value) {
  std::string escaped;
  for (const char c : value) {
    if (c == '&') {
      escaped += "&amp;";
    } else if (c == '"') {
      escaped += "&quot;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

// The tokens written so far, and the primitives of the protocol.
class PromptWriter {
 public:
  using Attribute = std::pair<std::string_view, std::string>;

  explicit PromptWriter(const Tokenizer& tokenizer)
      : tokenizer_(tokenizer),
        open_(tokenizer.special("<|open|>")),
        close_(tokenizer.special("<|close|>")),
        sep_(tokenizer.special("<|sep|>")),
        end_of_message_(tokenizer.special("<|end_of_msg|>")) {}

  void text(std::string_view segment) {
    const auto tokens = tokenizer_.encode_text(segment);
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  }
  void open(std::string_view tag, const std::vector<Attribute>& attributes = {}) {
    tokens_.push_back(open_);
    text(tag);
    for (const auto& [key, value] : attributes) {
      text(fmt::format(" {}", key));
      text("=\"");
      text(escape_attribute(value));
      text("\"");
    }
    tokens_.push_back(sep_);
  }
  void close(std::string_view tag) {
    tokens_.push_back(close_);
    text(tag);
    tokens_.push_back(sep_);
  }
  void element(std::string_view tag, const std::vector<Attribute>& attributes, std::string_view body) {
    open(tag, attributes);
    text(body);
    close(tag);
  }
  void end_message() {
    close("message");
    tokens_.push_back(end_of_message_);
  }
  void message(const std::vector<Attribute>& attributes, std::string_view body) {
    open("message", attributes);
    text(body);
    end_message();
  }
  void note(const std::string& type, std::string_view body) { message({{"role", "system"}, {"type", type}}, body); }

  std::vector<TokenId> take() { return std::move(tokens_); }

 private:
  const Tokenizer& tokenizer_;
  TokenId open_, close_, sep_, end_of_message_;
  std::vector<TokenId> tokens_;
};

void check_effort(const ChatOptions& options) {
  if (options.thinking) check_choice("thinking_effort", options.thinking_effort, {"", "low", "high", "max"});
}

// Compact, keys sorted at every level, non-ASCII as it is.
std::string sorted_json(std::string_view text, const std::string& what) {
  return parse_json(text, what, {.code = ErrorCode::invalid_argument}).dump();
}

void write_tools(PromptWriter& writer, std::span<const ToolSpec> tools, std::string_view heading) {
  std::string list;
  for (std::size_t i = 0; i < tools.size(); ++i) {
    const std::string json = sorted_json(tools[i].json, fmt::format("tools[{}]", i));
    if (!json.starts_with('{')) fail(ErrorCode::invalid_argument, "tools[{}] is not a JSON object", i);
    list += (i == 0 ? "" : ",") + json;
  }
  writer.note("tool-declare", fmt::format("{}[{}]\n```", heading, list));
}

void write_call(PromptWriter& writer, const ToolCall& call, std::size_t index) {
  if (call.name.empty()) fail(ErrorCode::invalid_argument, "tool call {} has no function name", index);
  writer.open("call", {{"tool", call.name}, {"index", std::to_string(index)}});
  if (!is_blank(call.arguments_json)) {
    if (const auto arguments = split_arguments(call.arguments_json)) {
      for (const Argument& argument : *arguments)
        writer.element("argument", {{"key", argument.key}, {"type", argument.type}}, argument.value);
    } else {
      writer.element("json", {{"type", "object"}}, call.arguments_json);
    }
  }
  writer.close("call");
}

// Everything of an assistant's message behind the generation prompt.
void write_completion(PromptWriter& writer, const Message& message, bool thinking) {
  if (thinking) {
    if (!is_blank(message.reasoning)) writer.text(message.reasoning);
    writer.close("think");
    writer.open("response");
  }
  writer.text(message.content);
  writer.close("response");
  if (!message.tool_calls.empty()) {
    writer.open("tools");
    std::size_t index = 0;
    for (const ToolCall& call : message.tool_calls) write_call(writer, call, ++index);
    writer.close("tools");
  }
  writer.end_message();
}

void write_generation_prompt(PromptWriter& writer, bool thinking, const std::string& name = {}) {
  std::vector<PromptWriter::Attribute> attributes{{"role", "assistant"}};
  if (!name.empty()) attributes.emplace_back("name", name);
  writer.open("message", attributes);
  writer.open(thinking ? "think" : "response");
}

void write_notes(PromptWriter& writer, const ChatOptions& options) {
  if (options.tool_choice == "required") writer.note("tool-choice", required_note);
  if (options.tool_choice == "none") writer.note("tool-choice", none_note);
  if (options.response_format == "text") return;
  std::string body =
      fmt::format("The system is invoked with `response_format={}`.\n{}", options.response_format, raw_json_rule);
  if (options.response_format == "json_schema")
    body += fmt::format("\nThe JSON data must match the following schema:\n```json\n{}\n```",
                        sorted_json(options.response_schema, "response_schema"));
  writer.note("response-format", body);
}

// Results of one assistant turn's calls, numbered on from `index`.
class ResultWriter {
 public:
  explicit ResultWriter(std::span<const ToolCall> calls) : calls_(calls) {}

  // A run of results that stand together.
  void write(PromptWriter& writer, std::span<const Message> results) {
    const bool linked = std::all_of(results.begin(), results.end(),
                                    [this](const Message& result) { return find(result.tool_call_id) != nullptr; });
    if (!linked) {
      for (const Message& result : results) write_one(writer, result, result.name);
      return;
    }
    std::set<std::string_view> written;
    for (const ToolCall& call : calls_) {
      if (!written.insert(call.id).second) continue;
      for (const Message& result : results)
        if (result.tool_call_id == call.id) write_one(writer, result, call.name);
    }
  }

 private:
  const ToolCall* find(const std::string& id) const {
    if (id.empty()) return nullptr;
    const auto found = std::find_if(calls_.begin(), calls_.end(), [&](const ToolCall& call) { return call.id == id; });
    return found == calls_.end() ? nullptr : &*found;
  }

  void write_one(PromptWriter& writer, const Message& result, std::string name) {
    if (name.empty() && index_ < calls_.size()) name = calls_[index_].name;
    ++index_;
    if (name.empty())
      fail(ErrorCode::invalid_argument,
           "tool result {} has no tool name: give it one, or the tool_call_id of a call before it", index_);
    writer.message({{"role", "tool"}, {"tool", name}, {"index", std::to_string(index_)}}, result.content);
  }

  std::span<const ToolCall> calls_;
  std::size_t index_ = 0;
};

void write_conversation(PromptWriter& writer, std::span<const Message> messages, bool thinking) {
  ResultWriter results({});
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    if (message.role == "user" || message.role == "system") {
      if (message.role == "system" && !message.tools.empty()) {
        write_tools(writer, message.tools, new_tools_heading);
        continue;
      }
      std::vector<PromptWriter::Attribute> attributes{{"role", message.role}};
      if (!message.name.empty()) attributes.emplace_back("name", message.name);
      writer.message(attributes, message.content);
    } else if (message.role == "assistant") {
      results = ResultWriter(message.tool_calls);
      write_generation_prompt(writer, thinking, message.name);
      write_completion(writer, message, thinking);
    } else if (message.role == "tool") {
      std::size_t end = i;
      while (end < messages.size() && messages[end].role == "tool") ++end;
      results.write(writer, messages.subspan(i, end - i));
      i = end - 1;
    } else {
      fail(ErrorCode::invalid_argument, "messages[{}] has role {}, expected system, user, assistant or tool", i,
           json_quote(message.role));
    }
  }
}

}  // namespace

std::vector<TokenId> open_tag(const Tokenizer& tokenizer, std::string_view tag, const Attributes& attributes) {
  PromptWriter writer(tokenizer);
  std::vector<PromptWriter::Attribute> own;
  for (const auto& [key, value] : attributes) own.emplace_back(key, value);
  writer.open(tag, own);
  return writer.take();
}

std::vector<TokenId> close_tag(const Tokenizer& tokenizer, std::string_view tag) {
  PromptWriter writer(tokenizer);
  writer.close(tag);
  return writer.take();
}

std::vector<TokenId> render_chat(const Tokenizer& tokenizer, std::span<const Message> messages,
                                 std::span<const ToolSpec> tools, const ChatOptions& options,
                                 bool add_generation_prompt) {
  check_effort(options);
  PromptWriter writer(tokenizer);
  if (!tools.empty()) write_tools(writer, tools, tools_heading);
  if (options.thinking && !options.thinking_effort.empty())
    writer.note("thinking-effort", fmt::format("{}{}`.", effort_note, options.thinking_effort));
  write_conversation(writer, messages, options.thinking);
  write_notes(writer, options);
  if (add_generation_prompt) write_generation_prompt(writer, options.thinking);
  return writer.take();
}

std::vector<TokenId> render_completion(const Tokenizer& tokenizer, const Message& message, const ChatOptions& options) {
  PromptWriter writer(tokenizer);
  write_completion(writer, message, options.thinking);
  return writer.take();
}

std::vector<TokenId> render_tool_results(const Tokenizer& tokenizer, std::span<const Message> tool_messages,
                                         const ChatOptions& options, bool add_generation_prompt,
                                         std::span<const ToolCall> calls) {
  check_effort(options);
  PromptWriter writer(tokenizer);
  ResultWriter(calls).write(writer, tool_messages);
  if (add_generation_prompt) {
    write_notes(writer, options);
    write_generation_prompt(writer, options.thinking);
  }
  return writer.take();
}

}  // namespace tidelock::model::k3
