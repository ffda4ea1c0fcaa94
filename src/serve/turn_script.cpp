#include "serve/turn_script.hpp"

#include <utility>

#include "base/base.hpp"
#include "model/chat_markup.hpp"

namespace tidelock::serve {
namespace {

using Kind = TurnStep::Kind;

Tokens joined(std::initializer_list<Tokens> parts) {
  Tokens out;
  for (const Tokens& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}
Tokens without_first(const Tokens& tokens) {
  return {tokens.begin() + 1, tokens.end()};
}
TurnStep choice_of(std::vector<Tokens> choices) {
  return {.kind = Kind::choice, .choices = std::move(choices)};
}
// Text of the grammar, or any; it ends with the first of the closers, and another may come in its place.
TurnStep content_of(const TextGrammar& grammar, Tokens closers) {
  return {.kind = grammar.compiled ? Kind::grammar : Kind::text, .closers = std::move(closers), .grammar = grammar};
}

//   [reasoning </think>] content <|im_end|>
//   [reasoning </think>] content <|tool_calls_section_begin|> { call } <|tool_calls_section_end|> <|im_end|>
class K2Script final : public TurnScript {
 public:
  K2Script(const model::Tokenizer& tokenizer, TurnForm form)
      : tokenizer_(tokenizer), form_(std::move(form)), number_(form_.calls_before) {}

  TurnStep first() override {
    if (!form_.thinking) return content();
    place_ = Place::reasoning;
    return {.kind = Kind::text, .closers = {tokenizer_.special("</think>")}};
  }

  TurnStep next(std::size_t taken) override {
    switch (place_) {
      case Place::reasoning:
        return content();
      case Place::content:
        return taken == 0 ? TurnStep{} : call({});
      case Place::call:
        return arguments(taken);
      case Place::arguments:
        ++number_;
        return behind_a_call();
      case Place::behind_a_call:
        return taken == 0 ? TurnStep{} : arguments(taken - 1);
    }
    return {};
  }

 private:
  enum class Place { reasoning, content, call, arguments, behind_a_call };

  TurnStep content() {
    const TokenId end = tokenizer_.special("<|im_end|>"), calls = tokenizer_.special("<|tool_calls_section_begin|>");
    if (form_.must_call) return call({calls});
    place_ = Place::content;
    return content_of(form_.content, form_.tools.empty() ? Tokens{end} : Tokens{end, calls});
  }
  TurnStep call(const Tokens& before) {
    place_ = Place::call;
    std::vector<Tokens> choices;
    for (const ToolForm& tool : form_.tools)
      choices.push_back(joined({before, model::k2::open_call(tokenizer_, tool.name, number_)}));
    return choice_of(std::move(choices));
  }
  TurnStep arguments(std::size_t tool) {
    place_ = Place::arguments;
    return content_of(form_.tools[tool].object, {tokenizer_.special("<|tool_call_end|>")});
  }
  TurnStep behind_a_call() {
    place_ = Place::behind_a_call;
    std::vector<Tokens> choices{{tokenizer_.special("<|tool_calls_section_end|>"), tokenizer_.special("<|im_end|>")}};
    if (form_.parallel)
      for (const ToolForm& tool : form_.tools) choices.push_back(model::k2::open_call(tokenizer_, tool.name, number_));
    return choice_of(std::move(choices));
  }

  const model::Tokenizer& tokenizer_;
  TurnForm form_;
  Place place_ = Place::content;
  std::size_t number_;  // of the next call
};

//   [reasoning close(think) open(response)] content close(response) [open(tools) calls close(tools)] close(message)
//   <|end_of_msg|>
class K3Script final : public TurnScript {
 public:
  K3Script(const model::Tokenizer& tokenizer, TurnForm form) : tokenizer_(tokenizer), form_(std::move(form)) {}

  TurnStep first() override {
    if (!form_.thinking) return content({});
    place_ = Place::reasoning;
    return {.kind = Kind::text, .closers = {tokenizer_.special("<|close|>")}};
  }

  TurnStep next(std::size_t taken) override {
    switch (place_) {
      case Place::reasoning:
        return content(joined({without_first(close("think")), open("response")}));
      case Place::opening:
        return content({});
      case Place::content:
        return behind_content(taken);
      case Place::call:
        return inside_call(taken);
      case Place::behind_content:
        return taken == 0 ? TurnStep{} : inside_call(taken - 1);
      case Place::watched:
        return behind_a_call();
      case Place::argument:
        return argument_taken(taken);
      case Place::value:
        return argument(without_first(close("argument")));
      case Place::behind_a_call:
        return taken == 0 ? TurnStep{} : inside_call(taken - 1);
    }
    return {};
  }

 private:
  enum class Place { reasoning, opening, content, behind_content, call, watched, argument, value, behind_a_call };

  Tokens open(std::string_view tag) const { return model::k3::open_tag(tokenizer_, tag); }
  Tokens close(std::string_view tag) const { return model::k3::close_tag(tokenizer_, tag); }
  Tokens end_of_turn() const { return joined({close("message"), {tokenizer_.special("<|end_of_msg|>")}}); }

  // `before`: markup that comes first.
  TurnStep content(const Tokens& before) {
    if (form_.must_call) return call(joined({before, close("response"), open("tools")}));
    if (!before.empty()) {
      place_ = Place::opening;
      return choice_of({before});
    }
    place_ = Place::content;
    const TokenId end = tokenizer_.special("<|close|>");  // in a content's place: it is empty, and calls follow
    const bool may_be_empty = !form_.tools.empty() && form_.content.compiled != nullptr;
    return content_of(form_.content, may_be_empty ? Tokens{end, end} : Tokens{end});
  }
  TurnStep behind_content(std::size_t closer) {
    const Tokens closed = without_first(close("response"));
    if (closer == 1) return call(joined({closed, open("tools")}));
    place_ = Place::behind_content;
    std::vector<Tokens> choices{joined({closed, end_of_turn()})};
    for (const ToolForm& tool : form_.tools) choices.push_back(joined({closed, open("tools"), open_call(tool)}));
    return choice_of(std::move(choices));
  }
  Tokens open_call(const ToolForm& tool) const {
    return model::k3::open_tag(tokenizer_, "call", {{"tool", tool.name}, {"index", std::to_string(calls_ + 1)}});
  }
  TurnStep call(const Tokens& before) {
    place_ = Place::call;
    std::vector<Tokens> choices;
    for (const ToolForm& tool : form_.tools) choices.push_back(joined({before, open_call(tool)}));
    return choice_of(std::move(choices));
  }
  TurnStep inside_call(std::size_t tool) {
    ++calls_;
    tool_ = tool;
    given_.assign(form_.tools[tool].keys, false);
    if (form_.tools[tool].held) return argument({});
    place_ = Place::watched;
    return {.kind = Kind::watch, .choices = {close("call")}};
  }
  // An argument that was not given yet, or the call's end when none is missing.
  TurnStep argument(const Tokens& before) {
    const ToolForm& tool = form_.tools[tool_];
    place_ = Place::argument;
    offered_.clear();
    std::vector<Tokens> choices;
    for (std::size_t i = 0; i < tool.arguments.size(); ++i) {
      if (given_[tool.arguments[i].key]) continue;
      offered_.push_back(i);
      choices.push_back(joined({before, tool.arguments[i].opening}));
    }
    bool complete = true;
    for (std::size_t key = 0; key < tool.keys; ++key) complete = complete && (given_[key] || !tool.required[key]);
    if (complete) choices.push_back(joined({before, close("call")}));
    return choice_of(std::move(choices));
  }
  TurnStep argument_taken(std::size_t taken) {
    if (taken == offered_.size()) return behind_a_call();
    const ArgumentForm& form = form_.tools[tool_].arguments[offered_[taken]];
    given_[form.key] = true;
    place_ = Place::value;
    return content_of(form.value, {tokenizer_.special("<|close|>")});
  }
  TurnStep behind_a_call() {
    place_ = Place::behind_a_call;
    std::vector<Tokens> choices{joined({close("tools"), end_of_turn()})};
    if (form_.parallel)
      for (const ToolForm& tool : form_.tools) choices.push_back(open_call(tool));
    return choice_of(std::move(choices));
  }

  const model::Tokenizer& tokenizer_;
  TurnForm form_;
  Place place_ = Place::content;
  std::size_t calls_ = 0;             // begun in this turn
  std::size_t tool_ = 0;              // of the last one,
  std::vector<bool> given_;           // its properties that were given,
  std::vector<std::size_t> offered_;  // and the arguments that the last step had as choices
};

}  // namespace

std::unique_ptr<TurnScript> k2_script(const model::Tokenizer& tokenizer, TurnForm form) {
  return std::make_unique<K2Script>(tokenizer, std::move(form));
}
std::unique_ptr<TurnScript> k3_script(const model::Tokenizer& tokenizer, TurnForm form) {
  return std::make_unique<K3Script>(tokenizer, std::move(form));
}

}  // namespace tidelock::serve
