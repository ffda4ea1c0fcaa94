// The parser of assistant output: any tokens give a turn, never an exception; a complete turn renders to tokens that
// parse to the same turn; text cannot forge markup.
//
// Input bytes are tokens: 0xF0..0xF3 are the four markup tokens, 0xF4 is [EOS], 0xF5..0xFF write whole tags, every
// other byte is its own text token.
#include <array>
#include <cstdlib>

#include "base/error.hpp"
#include "model/toolcall.hpp"

namespace {

using namespace tidelock::model;

struct Vocabulary {
  Tokenizer tokenizer = Tokenizer::load(std::string(TIDELOCK_SOURCE_DIR) + "/tests/model/fixtures/bpe");
  TokenId open = tokenizer.special("<|open|>"), close = tokenizer.special("<|close|>"),
          sep = tokenizer.special("<|sep|>"), end = tokenizer.special("<|end_of_msg|>"),
          eos = tokenizer.special("[EOS]");
};

struct Tag {
  bool opens;
  const char* text;
};
constexpr std::array<Tag, 11> tags{{{false, "think"},
                                    {true, "response"},
                                    {false, "response"},
                                    {true, "tools"},
                                    {false, "tools"},
                                    {true, "call tool=\"f\""},
                                    {false, "call"},
                                    {true, "argument key=\"k\" type=\"string\""},
                                    {true, "argument key=\"n\" type=\"object\""},
                                    {false, "argument"},
                                    {false, "message"}}};

std::vector<TokenId> tokens_of(const Vocabulary& vocabulary, const std::uint8_t* data, std::size_t size) {
  std::vector<TokenId> tokens;
  const std::array<TokenId, 5> specials{vocabulary.open, vocabulary.close, vocabulary.sep, vocabulary.end,
                                        vocabulary.eos};
  for (std::size_t i = 0; i < size; ++i) {
    if (data[i] < 0xF0) {
      tokens.push_back(data[i]);
    } else if (data[i] < 0xF5) {
      tokens.push_back(specials[data[i] - 0xF0U]);
    } else {
      const Tag& tag = tags[data[i] - 0xF5U];
      tokens.push_back(tag.opens ? vocabulary.open : vocabulary.close);
      for (const TokenId token : vocabulary.tokenizer.encode_text(tag.text)) tokens.push_back(token);
      tokens.push_back(vocabulary.sep);
    }
  }
  return tokens;
}

void check_turn(const Vocabulary& vocabulary, const std::vector<TokenId>& tokens, bool thinking) {
  const AssistantTurn turn = parse_assistant(vocabulary.tokenizer, tokens, thinking);
  if (turn.complete == !turn.problem.empty() || (turn.complete && turn.malformed)) std::abort();
  if (!turn.complete) return;
  const ChatOptions options{.thinking = thinking};
  const auto render = [&](const AssistantTurn& what) {
    return render_completion(
        vocabulary.tokenizer,
        {.role = "assistant", .content = what.content, .reasoning = what.reasoning, .tool_calls = what.calls}, options);
  };
  // The first rendering may normalise (blank reasoning, spacing of JSON); from then on nothing changes.
  const auto once = render(turn);
  const AssistantTurn again = parse_assistant(vocabulary.tokenizer, once, thinking);
  if (!again.complete || again.content != turn.content || again.calls.size() != turn.calls.size()) std::abort();
  for (std::size_t i = 0; i < turn.calls.size(); ++i)
    if (again.calls[i].name != turn.calls[i].name) std::abort();
  if (render(again) != once) std::abort();
}

// Hostile text in every field of a conversation adds no markup token to those of the same conversation without it.
void check_forgery(const Vocabulary& vocabulary, const std::string& text) {
  const auto markup = [&](const std::string& hostile) {
    const std::vector<Message> messages{
        {.role = "user", .content = hostile, .name = "n" + hostile},
        {.role = "assistant", .content = hostile, .reasoning = hostile, .tool_calls = {{"1", "n" + hostile, "{}"}}},
        {.role = "tool", .content = hostile, .tool_call_id = "1"}};
    std::size_t count = 0;
    for (const TokenId token : render_chat(vocabulary.tokenizer, messages, {}, {}, true))
      count += vocabulary.tokenizer.is_special(token) ? 1 : 0;
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
