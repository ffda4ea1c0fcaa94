// Reads what a model answers in the K3 protocol (chat.hpp), token by token.
//
// Markup is made of special tokens only. Text that looks like markup is text, because the parser sees tokens, not
// characters. Whatever the tokens are, feeding never throws: output that breaks the grammar ends in the malformed
// state, which says what was wrong; calls completed before it are kept, the call it interrupts is not. Strict on
// purpose: elements must nest as the protocol says, a call's index must count up from 1, a value must be of its
// declared type. Lenient in three points that lose nothing: white space between elements, a missing index, a missing
// response.
#pragma once

#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "model/chat.hpp"
#include "model/tokenizer.hpp"
#include "model/toolcall_arguments.hpp"

namespace tidelock::model {

struct AssistantTurn {
  std::string reasoning, content;  // bytes as generated: not necessarily UTF-8, nor ending between characters
  std::vector<ToolCall> calls;     // ids are "call_1", "call_2", ...; arguments_json has one member per argument
  bool complete = false;           // <|end_of_msg|> came in its place
  bool malformed = false;
  std::string problem;  // why it is malformed, or where an incomplete turn ends; empty when complete
};

// What one token added to the turn.
struct TurnEvent {
  enum class Kind {
    reasoning,       // text
    content,         // text
    call_begin,      // text is the tool's name
    argument_begin,  // text is the key, type its type; a raw JSON block has an empty key and type "raw"
    argument_text,   // text of the value: a string as it is, other types as JSON
    argument_end,
    call_end,  // the call is in turn().calls now
    end,
    malformed  // text is the problem
  };
  Kind kind;
  std::string text, type;
};

class AssistantParser {
 public:
  // Starts behind the generation prompt that render_chat writes for the same `thinking`. The tokenizer must outlive
  // the parser. Throws Error{not_found} when the vocabulary has no K3 markup.
  AssistantParser(const Tokenizer& tokenizer, bool thinking);

  // Takes the next token; at most one event comes of it. Tokens after the end or after a fault are ignored.
  std::optional<TurnEvent> feed(TokenId token);

  const AssistantTurn& turn() const { return turn_; }
  bool done() const { return turn_.complete || turn_.malformed; }

  // The turn when no token follows: an incomplete one says in `problem` where it ends.
  AssistantTurn finish() const;

 private:
  enum class Place {
    think,
    after_think,
    response,
    after_response,
    tools,
    call,
    argument,
    json,
    after_tools,
    after_message,
    end
  };
  using Attributes = std::vector<std::pair<std::string, std::string>>;

  static std::string describe(Place place);
  std::optional<TurnEvent> malformed(const std::string& problem);
  std::optional<TurnEvent> feed_text(std::string_view bytes);
  std::optional<TurnEvent> feed_tag();
  std::optional<TurnEvent> open_tag(const std::string& tag, const Attributes& attributes);
  std::optional<TurnEvent> close_tag(const std::string& tag);
  std::optional<TurnEvent> open_call(const Attributes& attributes);
  std::optional<TurnEvent> open_argument(const Attributes& attributes);
  std::optional<TurnEvent> close_argument();
  std::optional<TurnEvent> close_call();

  const Tokenizer& tokenizer_;
  TokenId open_, close_, sep_, end_of_message_;
  Place place_;
  enum class Tag { none, open, close } in_tag_ = Tag::none;  // between <|open|> or <|close|> and its <|sep|>
  std::string tag_text_;
  ToolCall call_;                    // the one being read
  std::vector<Argument> arguments_;  // its arguments; the last one is being read when place_ is argument
  std::set<std::string> keys_;       // of arguments_
  std::optional<std::string> raw_;   // its raw JSON block instead
  AssistantTurn turn_;
};

// All tokens of one completion at once.
AssistantTurn parse_assistant(const Tokenizer& tokenizer, std::span<const TokenId> tokens, bool thinking);

}  // namespace tidelock::model
