// What reads an answer behind AssistantParser, one class per protocol. Private to model/.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "model/toolcall.hpp"

namespace tidelock::model {

class TurnReader {
 public:
  TurnReader() = default;
  virtual ~TurnReader() = default;
  TurnReader(const TurnReader&) = delete;
  TurnReader& operator=(const TurnReader&) = delete;

  // The next token, which is in the vocabulary; never called when done().
  virtual std::optional<TurnEvent> feed(TokenId token) = 0;
  // Where the reader stands, for messages: "inside think, within a tag".
  virtual std::string where() const = 0;

  bool done() const { return turn_.complete || turn_.malformed; }
  const AssistantTurn& turn() const { return turn_; }
  TurnEvent malformed(const std::string& problem) {
    turn_.malformed = true;
    turn_.problem = problem;
    return {TurnEvent::Kind::malformed, problem, {}, {}};
  }

 protected:
  AssistantTurn turn_;
};

std::unique_ptr<TurnReader> make_k2_reader(const Tokenizer& tokenizer, bool thinking);
std::unique_ptr<TurnReader> make_k3_reader(const Tokenizer& tokenizer, bool thinking);

}  // namespace tidelock::model
