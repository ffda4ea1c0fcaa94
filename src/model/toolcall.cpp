#include "model/toolcall.hpp"

#include "base/error.hpp"
#include "model/toolcall_reader.hpp"

namespace tidelock::model {

AssistantParser::AssistantParser(const Tokenizer& tokenizer, bool thinking)
    : vocabulary_(tokenizer.vocab_size()),
      reader_(chat_protocol(tokenizer) == ChatProtocol::k2 ? make_k2_reader(tokenizer, thinking)
                                                           : make_k3_reader(tokenizer, thinking)) {}
AssistantParser::~AssistantParser() = default;
AssistantParser::AssistantParser(AssistantParser&&) noexcept = default;
AssistantParser& AssistantParser::operator=(AssistantParser&&) noexcept = default;

std::optional<TurnEvent> AssistantParser::feed(TokenId token) {
  if (done()) return std::nullopt;
  if (token < 0 || token >= vocabulary_)
    return reader_->malformed(fmt::format("token {} is not in the vocabulary", token));
  return reader_->feed(token);
}

const AssistantTurn& AssistantParser::turn() const {
  return reader_->turn();
}

bool AssistantParser::done() const {
  return reader_->done();
}

AssistantTurn AssistantParser::finish() const {
  AssistantTurn turn = reader_->turn();
  if (!done()) turn.problem = "the output ends " + reader_->where();
  return turn;
}

AssistantTurn parse_assistant(const Tokenizer& tokenizer, std::span<const TokenId> tokens, bool thinking) {
  AssistantParser parser(tokenizer, thinking);
  for (const TokenId token : tokens) parser.feed(token);
  return parser.finish();
}

}  // namespace tidelock::model
