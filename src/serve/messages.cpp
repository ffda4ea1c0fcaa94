#include "serve/messages.hpp"

#include <algorithm>
#include <array>

#include "serve/schema_check.hpp"

namespace tidelock::serve {
namespace {

// A string, or parts of type "text", which are joined.
std::string read_content(Fields& fields, bool required) {
  const Json* content = required ? &fields.require("content") : fields.find("content");
  if (content == nullptr) return "";
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) fields.refuse("content", "a string or a list of text parts", *content);
  std::string text;
  for (std::size_t i = 0; i < content->size(); ++i) {
    Fields part((*content)[i], fmt::format("{}[{}]", fields.path_of("content"), i));
    if (part.require_text("type") != "text")
      part.refuse("type", "\"text\": this server reads text only", part.require("type"));
    text += part.require_text("text");
    part.finish();
  }
  return text;
}

std::vector<model::ToolCall> read_calls(Fields& fields) {
  std::vector<model::ToolCall> calls;
  const Json* list = fields.find("tool_calls");
  if (list == nullptr) return calls;
  if (!list->is_array()) fields.refuse("tool_calls", "a list", *list);
  for (std::size_t i = 0; i < list->size(); ++i) {
    Fields call((*list)[i], fmt::format("{}[{}]", fields.path_of("tool_calls"), i));
    call.only("type", "function", "there is no other kind of call");
    call.integer("index", 0, INT64_MAX);  // of streamed calls that a client sends back; the place says it
    Fields function(call.require("function"), call.path_of("function"));
    calls.push_back({call.require_text("id"), function.require_text("name"), function.require_text("arguments")});
    if (calls.back().name.empty()) function.refuse("name", "a name", "");
    function.finish();
    call.finish();
  }
  return calls;
}

model::Message read_message(const Json& value, const std::string& path) {
  Fields fields(value, path);
  model::Message message;
  const auto role = fields.choice("role", {"system", "developer", "user", "assistant", "tool"});
  if (!role) fields.require("role");
  message.role = *role == "developer" ? "system" : *role;
  message.name = fields.text("name").value_or("");
  if (message.role == "assistant") {
    message.tool_calls = read_calls(fields);
    message.content = read_content(fields, message.tool_calls.empty());
    message.reasoning = fields.text("reasoning_content").value_or("");
  } else {
    message.content = read_content(fields, true);
  }
  if (message.role == "tool") message.tool_call_id = fields.require_text("tool_call_id");
  fields.finish();
  return message;
}

struct Tools {
  std::vector<model::ToolSpec> specs;
  std::vector<CallRules::Tool> rules;
};

// What a strict tool's calls are held to.
std::string read_parameters(const nlohmann::ordered_json& function, const std::string& path) {
  return checked_schema(function.value("parameters", nlohmann::ordered_json{{"type", "object"}}), path);
}

Tools read_tools(Fields& fields, std::string_view body) {
  Tools tools;
  const Json* list = fields.find("tools");
  if (list == nullptr) return tools;
  if (!list->is_array()) fields.refuse("tools", "a list", *list);
  // The sorted copy is for the checks, this one for the prompt.
  const nlohmann::ordered_json ordered = nlohmann::ordered_json::parse(body).at("tools");
  for (std::size_t i = 0; i < list->size(); ++i) {
    Fields tool((*list)[i], fmt::format("tools[{}]", i));
    if (tool.require_text("type") != "function") tool.refuse("type", "\"function\"", tool.require("type"));
    Fields function(tool.require("function"), tool.path_of("function"));
    const std::string name = function.require_text("name");
    if (name.empty()) function.refuse("name", "a name", "");
    function.text("description");
    if (const Json* parameters = function.find("parameters"); parameters != nullptr && !parameters->is_object())
      function.refuse("parameters", "a JSON Schema object", *parameters);
    CallRules::Tool rule{name, function.flag("strict").value_or(false)};
    if (rule.strict) {
      rule.path = function.path_of("parameters");
      rule.schema = read_parameters(ordered[i].at("function"), rule.path);
    }
    function.finish();
    tool.finish();
    if (std::ranges::find(tools.rules, name, &CallRules::Tool::name) != tools.rules.end())
      function.refuse("name", "a name that no tool before it has", name);
    tools.rules.push_back(std::move(rule));
    tools.specs.push_back({ordered[i].dump()});
  }
  return tools;
}

// "auto", "none", "required", or one function: then the model is told of that one alone, and must call it.
void read_tool_choice(Fields& fields, Tools& tools, ChatPrompt& prompt, const RequestContext& context) {
  model::ChatOptions& options = prompt.options;
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) return;
  if (choice->is_object()) {
    Fields chosen(*choice, "tool_choice");
    if (chosen.require_text("type") != "function") chosen.refuse("type", "\"function\"", chosen.require("type"));
    Fields function(chosen.require("function"), "tool_choice.function");
    const std::string name = function.require_text("name");
    function.finish();
    chosen.finish();
    const auto found = std::ranges::find(tools.rules, name, &CallRules::Tool::name);
    if (found == tools.rules.end()) function.refuse("name", "the name of one of the tools", name);
    tools.specs = {tools.specs[static_cast<std::size_t>(found - tools.rules.begin())]};
    tools.rules = {CallRules::Tool(*found)};
    options.tool_choice = "required";
  } else {
    options.tool_choice = *fields.choice("tool_choice", {"auto", "none", "required"});
  }
  if (options.tool_choice == "none") tools.rules.clear();
  if (options.tool_choice != "required") return;
  if (tools.specs.empty())
    throw ApiError(400, "invalid_value", "tool_choice asks for a call, and there are no tools", "tool_choice");
  prompt.calls.required = true;
  // K2 has no words for it: the model is held to it all the same.
  if (model::chat_protocol(context.tokenizer) == model::ChatProtocol::k2) options.tool_choice = "auto";
}

void read_effort(Fields& fields, model::ChatOptions& options, const RequestContext& context) {
  const bool k3 = model::chat_protocol(context.tokenizer) == model::ChatProtocol::k3;
  std::vector<std::string> efforts{"none"};
  if (k3) efforts.insert(efforts.end(), {"low", "high", "max"});
  if (!k3 && model::can_think(context.tokenizer)) efforts.emplace_back("max");
  const std::string effort = fields.choice("reasoning_effort", efforts).value_or(context.reasoning_effort);
  options.thinking = effort != "none";
  options.thinking_effort = options.thinking ? effort : "";
}

AnswerFormat read_format(Fields& fields, std::string_view body) {
  AnswerFormat format;
  const Json* value = fields.find("response_format");
  if (value == nullptr) return format;
  Fields outer(*value, "response_format");
  const auto type = outer.choice("type", {"text", "json_object", "json_schema"});
  if (!type) outer.require("type");
  if (*type == "json_object") format.kind = AnswerFormat::Kind::json_object;
  if (*type == "json_schema") {
    format.kind = AnswerFormat::Kind::json_schema;
    Fields inner(outer.require("json_schema"), outer.path_of("json_schema"));
    inner.require_text("name");
    inner.text("description");
    inner.flag("strict");  // answers are held to the schema either way
    inner.require("schema");
    // Properties come in the order in which the client wrote them.
    format.schema =
        checked_schema(nlohmann::ordered_json::parse(body).at("response_format").at("json_schema").at("schema"),
                       inner.path_of("schema"));
    inner.finish();
  }
  outer.finish();
  return format;
}

}  // namespace

ChatPrompt read_chat_prompt(Fields& fields, std::string_view body, const RequestContext& context) {
  ChatPrompt prompt;
  const Json& list = fields.require("messages");
  if (!list.is_array() || list.empty()) fields.refuse("messages", "a list of one message or more", list);
  for (std::size_t i = 0; i < list.size(); ++i)
    prompt.messages.push_back(read_message(list[i], fmt::format("messages[{}]", i)));
  Tools tools = read_tools(fields, body);
  read_tool_choice(fields, tools, prompt, context);
  read_effort(fields, prompt.options, context);
  prompt.calls.parallel = fields.flag("parallel_tool_calls").value_or(true);
  for (const model::Message& message : prompt.messages) prompt.calls.calls_before += message.tool_calls.size();
  prompt.format = read_format(fields, body);
  if (model::chat_protocol(context.tokenizer) == model::ChatProtocol::k3) {  // K2 has no words for it
    constexpr std::array names{"text", "json_object", "json_schema"};
    prompt.options.response_format = names[static_cast<std::size_t>(prompt.format.kind)];
    prompt.options.response_schema = prompt.format.schema;
  }
  prompt.tools = std::move(tools.specs);
  prompt.calls.tools = std::move(tools.rules);
  return prompt;
}

}  // namespace tidelock::serve
