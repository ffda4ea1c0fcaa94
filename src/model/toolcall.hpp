// Reads what a model answers in the protocol of its vocabulary (chat.hpp), token by token.
//
// Markup is made of special tokens only. Text that looks like markup is text, because the parser sees tokens, not
// characters. Whatever the tokens are, feeding never throws: output that breaks the grammar ends in the malformed
// state, which says what was wrong; calls completed before it are kept, the call it interrupts is not.
//
// Strict on purpose. K3: elements must nest as the protocol says, a call's index must count up from 1, a value must be
// of its declared type. K2: a call's id must end in ":INDEX" and stand once in a turn; its arguments are kept as they
// are, whether or not they are JSON. Lenient where nothing is lost: white space between elements; K3: a missing index,
// a missing response; K2: an id without "functions.", calls that begin before </think>, a second section of calls.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/chat.hpp"
#include "model/tokenizer.hpp"

namespace tidelock::model {

struct AssistantTurn {
  std::string reasoning, content;  // bytes as generated: not necessarily UTF-8, nor ending between characters
  // K3: ids are "call_1", "call_2", ...; arguments_json has one member per argument. K2: id and arguments as generated.
  std::vector<ToolCall> calls;
  bool complete = false;  // end_of_turn() came in its place
  bool malformed = false;
  std::string problem;  // why it is malformed, or where an incomplete turn ends; empty when complete
};

// What one token added to the turn.
struct TurnEvent {
  enum class Kind {
    reasoning,       // text
    content,         // text
    call_begin,      // text is the tool's name; type "raw" (K2): argument_text is all of the arguments, as generated
    argument_begin,  // text is the key, type its type; a raw JSON block has an empty key and type "raw"
    argument_text,   // text of the value: a string as it is, other types as JSON
    argument_end,
    call_end,  // the call is in turn().calls now
    end,
    malformed  // text is the problem
  };
  Kind kind;
  std::string text, type;
  std::string id;  // call_begin: the call's
};

class TurnReader;

class AssistantParser {
 public:
  // Starts behind the generation prompt that render_chat writes for the same `thinking`. The tokenizer must outlive
  // the parser. Throws what chat_protocol throws, and Error{invalid_argument} for `thinking` without can_think().
  AssistantParser(const Tokenizer& tokenizer, bool thinking);
  ~AssistantParser();
  AssistantParser(AssistantParser&&) noexcept;
  AssistantParser& operator=(AssistantParser&&) noexcept;

  // Takes the next token; at most one event comes of it. Tokens after the end or after a fault are ignored.
  std::optional<TurnEvent> feed(TokenId token);

  const AssistantTurn& turn() const;
  bool done() const;

  // The turn when no token follows: an incomplete one says in `problem` where it ends.
  AssistantTurn finish() const;

 private:
  std::int32_t vocabulary_;
  std::unique_ptr<TurnReader> reader_;
};

// All tokens of one completion at once.
AssistantTurn parse_assistant(const Tokenizer& tokenizer, std::span<const TokenId> tokens, bool thinking);

}  // namespace tidelock::model
