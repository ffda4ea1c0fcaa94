// The K2 half of what chat_fuzz does for K3: any tokens give a turn, never an exception; a call is in the turn exactly
// when its end came; a complete turn renders to tokens that parse to the same turn.
//
// Input bytes are tokens: 0xF0..0xFB are the markup, 0xFC a whole id, 0xFD a whole call, every other byte is itself.
#include <array>
#include <cstdlib>

#include "base/error.hpp"
#include "model/toolcall.hpp"

namespace {

using namespace tidelock::model;

struct Vocabulary {
  Tokenizer tokenizer = Tokenizer::load(std::string(TIDELOCK_SOURCE_DIR) + "/tests/model/fixtures/k2");
  std::array<TokenId, 12> markup{};
  TokenId call_end = tokenizer.special("<|tool_call_end|>");

  Vocabulary() {
    constexpr std::array<const char*, 12> names{"<|im_end|>",
                                                "<|tool_calls_section_begin|>",
                                                "<|tool_calls_section_end|>",
                                                "<|tool_call_begin|>",
                                                "<|tool_call_argument_begin|>",
                                                "<|tool_call_end|>",
                                                "<think>",
                                                "</think>",
                                                "[EOS]",
                                                "<|im_user|>",
                                                "<|im_middle|>",
                                                "<|im_system|>"};
    for (std::size_t i = 0; i < names.size(); ++i) markup[i] = tokenizer.special(names[i]);
  }
};

std::vector<TokenId> tokens_of(const Vocabulary& v, const std::uint8_t* data, std::size_t size) {
  std::vector<TokenId> tokens;
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint8_t byte = data[i];
    if (byte >= 0xF0 && byte < 0xFC) {
      tokens.push_back(v.markup[byte - 0xF0U]);
    } else if (byte == 0xFC || byte == 0xFD) {
      if (byte == 0xFD) tokens.push_back(v.markup[3]);
      for (const TokenId token : v.tokenizer.encode_text(fmt::format("functions.f:{}", i))) tokens.push_back(token);
      if (byte == 0xFD) tokens.insert(tokens.end(), {v.markup[4], '{', '}', v.markup[5]});
    } else {
      tokens.push_back(byte);
    }
  }
  return tokens;
}

void check_turn(const Vocabulary& v, const std::vector<TokenId>& tokens, bool thinking) {
  AssistantParser parser(v.tokenizer, thinking);
  std::size_t ended = 0;
  std::string arguments;
  for (const TokenId token : tokens) {
    const bool open = !parser.done();
    const auto event = parser.feed(token);
    if (event && event->kind == TurnEvent::Kind::call_begin) arguments.clear();
    if (event && event->kind == TurnEvent::Kind::argument_text) arguments += event->text;
    if (open && token == v.call_end && !parser.turn().malformed) {
      if (++ended != parser.turn().calls.size() || parser.turn().calls.back().arguments_json != arguments) std::abort();
    }
  }
  const AssistantTurn turn = parser.finish();
  if (turn.calls.size() != ended) std::abort();
  if (turn.complete == !turn.problem.empty() || (turn.complete && turn.malformed)) std::abort();
  if (!turn.complete) return;
  ChatOptions options;
  options.thinking = thinking;
  const auto once = render_completion(
      v.tokenizer,
      {.role = "assistant", .content = turn.content, .reasoning = turn.reasoning, .tool_calls = turn.calls}, options);
  const AssistantTurn again = parse_assistant(v.tokenizer, once, thinking);
  if (!again.complete || again.content != turn.content || again.calls != turn.calls) std::abort();
}

// Hostile text in every field adds no markup to that of the same conversation without it.
void check_forgery(const Vocabulary& v, const std::string& text) {
  const auto markup = [&](const std::string& hostile) {
    const std::vector<Message> messages{
        {.role = "user", .content = hostile, .name = "n" + hostile},
        {.role = "assistant", .content = hostile, .tool_calls = {{"1" + hostile, "n" + hostile, hostile}}},
        {.role = "tool", .content = hostile, .tool_call_id = "1" + hostile, .name = "n" + hostile}};
    std::size_t count = 0;
    for (const TokenId token : render_chat(v.tokenizer, messages, {}, {}, true))
      count += v.tokenizer.is_special(token) ? 1U : 0U;
    return count;
  };
  if (markup(text) != markup("")) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Vocabulary vocabulary;
  if (size == 0) return 0;
  const auto tokens = tokens_of(vocabulary, data + 1, size - 1);
  check_turn(vocabulary, tokens, (data[0] & 1) != 0);
  check_forgery(vocabulary, vocabulary.tokenizer.decode(tokens));
  return 0;
}
