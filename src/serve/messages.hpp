// Messages and tools of a chat request. Private to serve/. Include from .cpp files only, as model/json.hpp.
#pragma once

#include <string_view>
#include <vector>

#include "serve/answer_format.hpp"
#include "serve/fields.hpp"
#include "serve/request.hpp"

namespace tidelock::serve {

// What a chat's prompt is made of.
struct ChatPrompt {
  std::vector<model::Message> messages;
  std::vector<model::ToolSpec> tools;
  model::ChatOptions options;
  AnswerFormat format;
  CallRules calls;
};

// Reads messages, tools, tool_choice, parallel_tool_calls, reasoning_effort and response_format. `body` is the text of
// `fields`: tools and schemas keep their keys' order.
ChatPrompt read_chat_prompt(Fields& fields, std::string_view body, const RequestContext& context);

}  // namespace tidelock::serve
