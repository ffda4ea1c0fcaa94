// Answers in the K3 protocol.
#include <algorithm>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "model/json.hpp"
#include "model/toolcall_arguments.hpp"
#include "model/toolcall_reader.hpp"

namespace tidelock::model {
namespace {

using Kind = TurnEvent::Kind;
using Attributes = std::vector<std::pair<std::string, std::string>>;

TurnEvent event(Kind kind, std::string text = {}, std::string type = {}) {
  return {kind, std::move(text), std::move(type), {}};
}

// A tag or other text from the model, short enough for a message.
std::string quote(std::string_view text) {
  return json_quote(text.substr(0, 80));
}

std::string unescape_attribute(std::string_view value) {
  std::string text;
  while (!value.empty()) {
    const std::string_view entity = value.starts_with("&quot;") ? "&quot;" : value.starts_with("&amp;") ? "&amp;" : "";
    text += entity.empty() ? value.front() : entity == "&amp;" ? '&' : '"';
    value.remove_prefix(entity.empty() ? 1 : entity.size());
  }
  return text;
}

// `tag k="v" k="v"`, attributes unescaped; false when it is not of that form or repeats a key.
bool split_tag(std::string_view text, std::string& tag, Attributes& attributes) {
  const std::size_t name_end = std::min(text.find(' '), text.size());
  tag = text.substr(0, name_end);
  text.remove_prefix(name_end);
  while (!text.empty()) {
    const std::size_t equals = text.find("=\"");
    if (text.front() != ' ' || equals == std::string_view::npos || equals < 2) return false;
    const std::size_t quote_end = text.find('"', equals + 2);
    if (quote_end == std::string_view::npos) return false;
    std::string key(text.substr(1, equals - 1));
    for (const auto& [known, value] : attributes)
      if (known == key) return false;
    attributes.emplace_back(std::move(key), unescape_attribute(text.substr(equals + 2, quote_end - equals - 2)));
    text.remove_prefix(quote_end + 1);
  }
  return !tag.empty();
}

// The attributes must be these, in this order; an optional one is marked by '?'.
bool has_only(const Attributes& attributes, std::initializer_list<std::string_view> keys) {
  std::size_t at = 0;
  for (std::string_view key : keys) {
    const bool optional = key.ends_with('?');
    if (optional) key.remove_suffix(1);
    if (at < attributes.size() && attributes[at].first == key) {
      ++at;
    } else if (!optional) {
      return false;
    }
  }
  return at == attributes.size();
}

bool is_type(std::string_view type) {
  constexpr std::string_view types[] = {"string", "number", "boolean", "null", "object", "array"};
  return std::find(std::begin(types), std::end(types), type) != std::end(types);
}

class K3Reader final : public TurnReader {
 public:
  K3Reader(const Tokenizer& tokenizer, bool thinking);
  std::optional<TurnEvent> feed(TokenId token) override;
  std::string where() const override { return describe(place_) + (in_tag_ == Tag::none ? "" : ", within a tag"); }

 private:
  enum class Place {
    think,
    after_think,
    response,
    after_response,
    tools,
    call,
    argument,
    json_block,
    after_tools,
    after_message,
    end
  };

  static std::string describe(Place place);
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
};

K3Reader::K3Reader(const Tokenizer& tokenizer, bool thinking)
    : tokenizer_(tokenizer),
      open_(tokenizer.special("<|open|>")),
      close_(tokenizer.special("<|close|>")),
      sep_(tokenizer.special("<|sep|>")),
      end_of_message_(tokenizer.special("<|end_of_msg|>")),
      place_(thinking ? Place::think : Place::response) {}

std::string K3Reader::describe(Place place) {
  switch (place) {
    case Place::think:
      return "inside think";
    case Place::after_think:
      return "after think, before response";
    case Place::response:
      return "inside response";
    case Place::after_response:
      return "after response";
    case Place::tools:
      return "inside tools";
    case Place::call:
      return "inside a call";
    case Place::argument:
      return "inside an argument";
    case Place::json_block:
      return "inside a json block";
    case Place::after_tools:
      return "after tools";
    case Place::after_message:
      return "after the message, before <|end_of_msg|>";
    case Place::end:
      return "after the end";
  }
  return "";
}

std::optional<TurnEvent> K3Reader::feed(TokenId token) {
  if (!tokenizer_.is_special(token)) {
    const std::string_view bytes = tokenizer_.token_bytes(token);
    if (in_tag_ == Tag::none) return feed_text(bytes);
    tag_text_ += bytes;
    return std::nullopt;
  }
  if (token == sep_ && in_tag_ != Tag::none) return feed_tag();
  if (in_tag_ != Tag::none)
    return malformed(
        fmt::format("{} inside the tag {}, {}", tokenizer_.token_bytes(token), quote(tag_text_), describe(place_)));
  if (token == open_ || token == close_) {
    in_tag_ = token == open_ ? Tag::open : Tag::close;
    tag_text_.clear();
    return std::nullopt;
  }
  if (token == end_of_message_ && place_ == Place::after_message) {
    place_ = Place::end;
    turn_.complete = true;
    return event(Kind::end);
  }
  return malformed(fmt::format("{} {}", tokenizer_.token_bytes(token), describe(place_)));
}

std::optional<TurnEvent> K3Reader::feed_text(std::string_view bytes) {
  const std::string text(bytes);
  switch (place_) {
    case Place::think:
      turn_.reasoning += text;
      return event(Kind::reasoning, text);
    case Place::response:
      turn_.content += text;
      return event(Kind::content, text);
    case Place::argument:
      arguments_.back().value += text;
      return event(Kind::argument_text, text);
    case Place::json_block:
      *raw_ += text;
      return event(Kind::argument_text, text);
    default:
      if (text.find_first_not_of(" \t\r\n") == std::string::npos) return std::nullopt;
      return malformed(fmt::format("text {} {}", quote(text), describe(place_)));
  }
}

std::optional<TurnEvent> K3Reader::feed_tag() {
  const bool opens = in_tag_ == Tag::open;
  in_tag_ = Tag::none;
  std::string tag;
  Attributes attributes;
  if (!split_tag(tag_text_, tag, attributes))
    return malformed(fmt::format("tag {} {}: expected NAME KEY=\"VALUE\" ...", quote(tag_text_), describe(place_)));
  if (opens) return open_tag(tag, attributes);
  if (!attributes.empty()) return malformed(fmt::format("a closing tag with attributes, {}", quote(tag_text_)));
  return close_tag(tag);
}

std::optional<TurnEvent> K3Reader::open_tag(const std::string& tag, const Attributes& attributes) {
  const bool plain = attributes.empty();
  if (tag == "response" && place_ == Place::after_think && plain) {
    place_ = Place::response;
  } else if (tag == "tools" && (place_ == Place::after_response || place_ == Place::after_think) && plain) {
    place_ = Place::tools;
  } else if (tag == "call" && place_ == Place::tools) {
    return open_call(attributes);
  } else if (tag == "argument" && place_ == Place::call && !raw_) {
    return open_argument(attributes);
  } else if (tag == "json" && place_ == Place::call && !raw_ && arguments_.empty()) {
    if (!has_only(attributes, {"type"}) || attributes[0].second != "object")
      return malformed(fmt::format("tag {}: expected json type=\"object\"", quote(tag_text_)));
    place_ = Place::json_block;
    raw_.emplace();
    return event(Kind::argument_begin, "", "raw");
  } else {
    return malformed(fmt::format("opening tag {} {}", quote(tag_text_), describe(place_)));
  }
  return std::nullopt;
}

std::optional<TurnEvent> K3Reader::close_tag(const std::string& tag) {
  const auto closes = [&](std::string_view name, Place from, Place to) {
    if (tag != name || place_ != from) return false;
    place_ = to;
    return true;
  };
  if (closes("think", Place::think, Place::after_think) || closes("response", Place::response, Place::after_response) ||
      closes("tools", Place::tools, Place::after_tools) ||
      closes("message", Place::after_response, Place::after_message) ||
      closes("message", Place::after_tools, Place::after_message))
    return std::nullopt;
  if (closes("argument", Place::argument, Place::call)) return close_argument();
  if (closes("json", Place::json_block, Place::call)) return event(Kind::argument_end);
  if (closes("call", Place::call, Place::tools)) return close_call();
  return malformed(fmt::format("closing tag {} {}", quote(tag), describe(place_)));
}

std::optional<TurnEvent> K3Reader::open_call(const Attributes& attributes) {
  if (!has_only(attributes, {"tool", "index?"}) || attributes[0].second.empty())
    return malformed(fmt::format("tag {}: expected call tool=\"NAME\" index=\"N\"", quote(tag_text_)));
  const std::string index = std::to_string(turn_.calls.size() + 1);
  if (attributes.size() > 1 && attributes[1].second != index)
    return malformed(fmt::format("call index {}, expected {}", quote(attributes[1].second), index));
  call_ = {fmt::format("call_{}", index), attributes[0].second, ""};
  arguments_.clear();
  keys_.clear();
  raw_.reset();
  place_ = Place::call;
  return TurnEvent{Kind::call_begin, call_.name, {}, call_.id};
}

std::optional<TurnEvent> K3Reader::open_argument(const Attributes& attributes) {
  if (!has_only(attributes, {"key", "type"}) || !is_type(attributes[1].second))
    return malformed(fmt::format("tag {}: expected argument key=\"KEY\" type=\"TYPE\"", quote(tag_text_)));
  const std::string &key = attributes[0].second, &type = attributes[1].second;
  if (!keys_.insert(key).second) return malformed(fmt::format("argument {} stands twice in one call", quote(key)));
  arguments_.push_back({key, type, ""});
  place_ = Place::argument;
  return event(Kind::argument_begin, key, type);
}

std::optional<TurnEvent> K3Reader::close_argument() {
  Argument& argument = arguments_.back();
  if (argument.type != "string") {
    const auto value = read_value(argument.value);
    if (!value || value->type != argument.type)
      return malformed(
          fmt::format("argument {} says {} but holds {}", quote(argument.key), argument.type, quote(argument.value)));
    argument.value = value->value;
  }
  return event(Kind::argument_end);
}

std::optional<TurnEvent> K3Reader::close_call() {
  call_.arguments_json = raw_ ? *raw_ : join_arguments(arguments_);
  turn_.calls.push_back(std::move(call_));
  return event(Kind::call_end);
}

}  // namespace

std::unique_ptr<TurnReader> make_k3_reader(const Tokenizer& tokenizer, bool thinking) {
  return std::make_unique<K3Reader>(tokenizer, thinking);
}

}  // namespace tidelock::model
