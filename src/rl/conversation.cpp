#include "rl/conversation.hpp"

#include "rl/tool.hpp"

namespace tidelock::rl {
namespace {

void append(Conversation& c, const std::vector<model::TokenId>& tokens, std::uint8_t mask) {
  c.tokens.insert(c.tokens.end(), tokens.begin(), tokens.end());
  c.mask.insert(c.mask.end(), tokens.size(), mask);
}

}  // namespace

model::ChatOptions agent_chat(bool thinking) {
  model::ChatOptions options;
  options.thinking = thinking;
  return options;
}

std::vector<std::int32_t> episode_prompt(const model::Tokenizer& tokenizer, const Episode& episode, bool thinking) {
  return model::render_chat(tokenizer, episode.messages, episode.tools, agent_chat(thinking), true);
}

Conversation demonstration(const model::Tokenizer& tokenizer, const Episode& episode,
                           const std::vector<DemoTurn>& turns, bool thinking) {
  Conversation c;
  append(c, episode_prompt(tokenizer, episode, thinking), 0);
  model::ChatOptions options = agent_chat(thinking);
  for (const DemoTurn& turn : turns) {
    model::Message assistant{.role = "assistant", .content = turn.answer};
    if (!turn.command.empty()) assistant.tool_calls = {{"call_1", "shell", shell_arguments(turn.command)}};
    append(c, model::render_completion(tokenizer, assistant, options), 1);
    if (turn.command.empty()) break;
    const model::Message result{.role = "tool", .content = turn.output, .tool_call_id = "call_1", .name = "shell"};
    append(c, model::render_tool_results(tokenizer, std::span(&result, 1), options, true, assistant.tool_calls), 0);
    ++options.calls_before;
  }
  return c;
}

}  // namespace tidelock::rl
