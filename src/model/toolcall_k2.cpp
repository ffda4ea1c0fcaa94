// Answers in the K2 protocol.
#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "model/chat_protocols.hpp"
#include "model/json.hpp"
#include "model/toolcall_reader.hpp"

namespace tidelock::model {
namespace {

using Kind = TurnEvent::Kind;

class K2Reader final : public TurnReader {
 public:
  K2Reader(const Tokenizer& tokenizer, bool thinking);
  std::optional<TurnEvent> feed(TokenId token) override;
  std::string where() const override;

 private:
  enum class Place { think, content, section, call_id, arguments, after_section, end };
  std::optional<TurnEvent> feed_text(std::string_view bytes);
  std::optional<TurnEvent> begin_arguments();

  const Tokenizer& tokenizer_;
  std::optional<TokenId> think_end_;
  TokenId section_begin_, section_end_, call_begin_, argument_begin_, call_end_, end_;
  Place place_;
  std::string id_text_;  // as it comes, before it is taken apart
  ToolCall call_;        // the one being read
};

K2Reader::K2Reader(const Tokenizer& tokenizer, bool thinking)
    : tokenizer_(tokenizer),
      think_end_(thinking ? std::optional(tokenizer.special("</think>")) : std::nullopt),
      section_begin_(tokenizer.special("<|tool_calls_section_begin|>")),
      section_end_(tokenizer.special("<|tool_calls_section_end|>")),
      call_begin_(tokenizer.special("<|tool_call_begin|>")),
      argument_begin_(tokenizer.special("<|tool_call_argument_begin|>")),
      call_end_(tokenizer.special("<|tool_call_end|>")),
      end_(tokenizer.special("<|im_end|>")),
      place_(thinking ? Place::think : Place::content) {}

std::string K2Reader::where() const {
  switch (place_) {
    case Place::think:
      return "inside think";
    case Place::content:
      return "inside the content";
    case Place::section:
      return "between tool calls";
    case Place::call_id:
      return "inside a call's id";
    case Place::arguments:
      return "inside a call's arguments";
    case Place::after_section:
      return "after the tool calls, before <|im_end|>";
    case Place::end:
      return "after the end";
  }
  return "";
}

std::optional<TurnEvent> K2Reader::feed(TokenId token) {
  if (!tokenizer_.is_special(token)) return feed_text(tokenizer_.token_bytes(token));
  const auto moves = [&](TokenId mark, Place from, Place to) {
    if (token != mark || place_ != from) return false;
    place_ = to;
    return true;
  };
  if (think_end_ && moves(*think_end_, Place::think, Place::content)) return std::nullopt;
  for (const Place from : {Place::think, Place::content, Place::after_section})
    if (moves(section_begin_, from, Place::section)) return std::nullopt;
  if (moves(call_begin_, Place::section, Place::call_id)) {
    id_text_.clear();
    return std::nullopt;
  }
  if (moves(argument_begin_, Place::call_id, Place::arguments)) return begin_arguments();
  if (moves(call_end_, Place::arguments, Place::section)) {
    turn_.calls.push_back(std::move(call_));
    return TurnEvent{Kind::call_end, {}, {}, {}};
  }
  if (moves(section_end_, Place::section, Place::after_section)) return std::nullopt;
  if (moves(end_, Place::content, Place::end) || moves(end_, Place::after_section, Place::end)) {
    turn_.complete = true;
    return TurnEvent{Kind::end, {}, {}, {}};
  }
  return malformed(fmt::format("{} {}", tokenizer_.token_bytes(token), where()));
}

std::optional<TurnEvent> K2Reader::feed_text(std::string_view bytes) {
  const std::string text(bytes);
  switch (place_) {
    case Place::think:
      turn_.reasoning += text;
      return TurnEvent{Kind::reasoning, text, {}, {}};
    case Place::content:
      turn_.content += text;
      return TurnEvent{Kind::content, text, {}, {}};
    case Place::call_id:
      id_text_ += text;
      return std::nullopt;
    case Place::arguments:
      call_.arguments_json += text;
      return TurnEvent{Kind::argument_text, text, {}, {}};
    default:
      if (text.find_first_not_of(" \t\r\n") == std::string::npos) return std::nullopt;
      return malformed(fmt::format("text {} {}", json_quote(text.substr(0, 80)), where()));
  }
}

std::optional<TurnEvent> K2Reader::begin_arguments() {
  k2::CallId parts;
  if (!k2::split_call_id(id_text_, parts))
    return malformed(fmt::format("call id {}: expected functions.NAME:INDEX", json_quote(id_text_.substr(0, 80))));
  // Results are linked to calls by id alone.
  if (std::any_of(turn_.calls.begin(), turn_.calls.end(), [&](const ToolCall& c) { return c.id == parts.id; }))
    return malformed(fmt::format("call id {} stands twice in one turn", json_quote(parts.id)));
  call_ = {parts.id, parts.name, ""};
  return TurnEvent{Kind::call_begin, parts.name, "raw", parts.id};
}

}  // namespace

std::unique_ptr<TurnReader> make_k2_reader(const Tokenizer& tokenizer, bool thinking) {
  if (thinking && !can_think(tokenizer))
    fail(ErrorCode::invalid_argument, "thinking: {} has no <think> and </think> tokens", tokenizer.name());
  return std::make_unique<K2Reader>(tokenizer, thinking);
}

}  // namespace tidelock::model
