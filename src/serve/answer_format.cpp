#include "serve/answer_format.hpp"

#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/base.hpp"
#include "model/chat_markup.hpp"
#include "serve/api_error.hpp"
#include "serve/argument_schema.hpp"

namespace tidelock::serve {
namespace {

using model::TokenId;

constexpr std::int64_t kCacheBytes = 64 << 20;
constexpr int kMostSpaces = 16;  // in one place, where JSON lets white space stand: a model must not say nothing else

// JSON strings have to escape these, and the library's do not all; as white space, line ends suffice.
bool has_control(std::string_view bytes) {
  return std::ranges::any_of(bytes,
                             [](char c) { return static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r'; });
}

// The bytes of each; nothing for those that may not stand in content.
std::vector<std::string> tokens_of(const model::Tokenizer& tokenizer) {
  std::vector<std::string> tokens(static_cast<std::size_t>(tokenizer.vocab_size()));
  for (TokenId token = 0; token < tokenizer.vocab_size(); ++token)
    if (!tokenizer.is_special(token) && !has_control(tokenizer.token_bytes(token)))
      tokens[static_cast<std::size_t>(token)] = tokenizer.token_bytes(token);
  return tokens;
}

TurnVocabulary vocabulary_of(const model::Tokenizer& tokenizer, std::int64_t vocab) {
  TurnVocabulary out;
  out.text.resize(static_cast<std::size_t>((vocab + 31) / 32));
  out.quotes.resize(out.text.size());
  const auto set = [](TokenMask& mask, TokenId token) {
    mask[static_cast<std::size_t>(token) / 32] |= 1U << (token % 32);
  };
  for (TokenId token = 0; token < std::min<std::int64_t>(vocab, tokenizer.vocab_size()); ++token) {
    if (tokenizer.is_special(token)) continue;
    set(out.text, token);
    if (tokenizer.token_bytes(token).find('"') == std::string_view::npos) continue;
    set(out.quotes, token);
    if (tokenizer.token_bytes(token).size() == 1) out.quote = token;
  }
  out.stop = model::end_of_turn(tokenizer);
  return out;
}

}  // namespace

struct AnswerGrammars::Compiler {
  std::shared_ptr<const TurnVocabulary> turn;
  xgrammar::TokenizerInfo vocabulary;
  xgrammar::GrammarCompiler compiler;

  Compiler(const model::Tokenizer& tokenizer, std::int64_t vocab)
      : turn(std::make_shared<TurnVocabulary>(vocabulary_of(tokenizer, vocab))),
        vocabulary(tokens_of(tokenizer), xgrammar::VocabType::RAW, static_cast<int>(vocab),
                   std::vector<std::int32_t>{turn->stop}),
        compiler(vocabulary, 1, true, kCacheBytes, true) {}

  // Objects have the properties that they are described with, unless the schema allows others by itself.
  TextGrammar json(const std::string& schema, bool quoted = false) {
    return {std::make_shared<xgrammar::CompiledGrammar>(
                compiler.CompileJSONSchema(schema, true, std::nullopt, std::nullopt, true, kMostSpaces)),
            quoted};
  }
  TextGrammar any_object() {
    return {std::make_shared<xgrammar::CompiledGrammar>(
        compiler.CompileJSONSchema(R"({"type": "object"})", true, std::nullopt, std::nullopt, false, kMostSpaces))};
  }
  TextGrammar text(const ArgumentRule& rule) {
    using Form = ArgumentRule::Form;
    switch (rule.form) {
      case Form::any_text:
        return {};
      case Form::json:
      case Form::quoted_json:
        return json(rule.rule, rule.form == Form::quoted_json);
      case Form::regex:
        return {std::make_shared<xgrammar::CompiledGrammar>(compiler.CompileRegex(rule.rule))};
      case Form::ebnf:
        return {std::make_shared<xgrammar::CompiledGrammar>(compiler.CompileGrammar(rule.rule))};
    }
    return {};
  }
};

AnswerGrammars::AnswerGrammars(const model::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
AnswerGrammars::~AnswerGrammars() = default;

ToolForm AnswerGrammars::tool_of(const CallRules::Tool& tool) {
  ToolForm out{.name = tool.name, .held = tool.strict};
  if (model::chat_protocol(tokenizer_) == model::ChatProtocol::k2) {
    out.object = tool.strict ? compiler_->json(tool.schema) : compiler_->any_object();
    return out;
  }
  if (!tool.strict) return out;
  const ArgumentRules rules = argument_rules(tool.schema, tool.path);
  out.keys = rules.keys.size();
  out.required = rules.required;
  for (const ArgumentRule& rule : rules.rules)
    out.arguments.push_back(
        {rule.key, model::k3::open_tag(tokenizer_, "argument", {{"key", rules.keys[rule.key]}, {"type", rule.type}}),
         compiler_->text(rule)});
  return out;
}

TurnForm AnswerGrammars::form_of(const AnswerFormat& format, const CallRules& rules, bool thinking) {
  TurnForm form{.thinking = thinking,
                .must_call = rules.required,
                .parallel = rules.parallel,
                .calls_before = rules.calls_before};
  if (format.kind == AnswerFormat::Kind::json_object) form.content = compiler_->any_object();
  if (format.kind == AnswerFormat::Kind::json_schema) form.content = compiler_->json(format.schema);
  for (const CallRules::Tool& tool : rules.tools) form.tools.push_back(tool_of(tool));
  return form;
}

std::shared_ptr<engine::TokenConstraint> AnswerGrammars::constrain(const AnswerFormat& format, const CallRules& rules,
                                                                   bool thinking, std::int64_t vocab) {
  const bool strict = std::ranges::any_of(rules.tools, [](const CallRules::Tool& tool) { return tool.strict; });
  const bool calls = !rules.tools.empty() && (rules.required || !rules.parallel || strict);
  if (format.kind == AnswerFormat::Kind::text && !calls) return nullptr;
  const std::lock_guard lock(mutex_);
  try {
    if (!compiler_) compiler_ = std::make_unique<Compiler>(tokenizer_, vocab);
    TurnForm form = form_of(format, rules, thinking);
    return constrain_turn(model::chat_protocol(tokenizer_) == model::ChatProtocol::k2
                              ? k2_script(tokenizer_, std::move(form))
                              : k3_script(tokenizer_, std::move(form)),
                          compiler_->turn);
  } catch (const ApiError&) {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorCode::invalid_argument, "the schema cannot be made into a grammar: {}", error.what());
  }
}

}  // namespace tidelock::serve
