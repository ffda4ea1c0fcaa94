#include "serve/answer_format.hpp"

#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/base.hpp"

namespace tidelock::serve {
namespace {

using model::TokenId;

constexpr std::int64_t kCacheBytes = 64 << 20;
constexpr int kMostSpaces = 16;  // in one place, where JSON lets white space stand: a model must not say nothing else

// The protocol's tokens around an answer's content.
struct Frame {
  std::vector<TokenId> opens;   // behind reasoning, up to the content; empty without reasoning
  std::vector<TokenId> closes;  // behind the content, up to the end of the turn
  TokenId calls;                // what stands in the content's place when tools are called
};

// As render_completion writes them around two texts.
Frame frame_of(const model::Tokenizer& tokenizer, const model::ChatOptions& options) {
  const std::string reasoning = "reasoning", content = "content";
  model::ChatOptions plain;
  plain.thinking = options.thinking;
  const auto turn =
      model::render_completion(tokenizer, {.role = "assistant", .content = content, .reasoning = reasoning}, plain);
  const auto thought = tokenizer.encode_text(reasoning), said = tokenizer.encode_text(content);
  auto after_thought = turn.begin();
  if (options.thinking)
    after_thought = std::search(turn.begin(), turn.end(), thought.begin(), thought.end()) +
                    static_cast<std::ptrdiff_t>(thought.size());
  const auto begins = std::find_end(after_thought, turn.end(), said.begin(), said.end());
  if (begins == turn.end()) fail(ErrorCode::internal, "an assistant's turn does not hold its content");
  Frame frame;
  frame.opens.assign(after_thought, begins);
  frame.closes.assign(begins + std::ssize(said), turn.end());
  frame.calls = model::chat_protocol(tokenizer) == model::ChatProtocol::k2
                    ? tokenizer.special("<|tool_calls_section_begin|>")
                    : frame.closes.front();  // K3: an empty content, and the calls behind it
  return frame;
}

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

using Mask = std::vector<std::uint32_t>;  // as of engine::TokenConstraint

void set(Mask& mask, TokenId token) {
  mask[static_cast<std::size_t>(token) / 32] |= 1U << (token % 32);
}

class ContentConstraint final : public engine::TokenConstraint {
 public:
  // `text`: the tokens that are not special.
  ContentConstraint(const xgrammar::CompiledGrammar& grammar, Frame frame, bool may_call, const Mask& text)
      : frame_(std::move(frame)),
        may_call_(may_call),
        phase_(frame_.opens.empty() ? Phase::content : Phase::reasoning),
        matcher_(grammar),
        mask_(text.size()) {
    if (phase_ != Phase::reasoning) return;
    reasoning_ = text;
    set(reasoning_, frame_.opens.front());
  }

  std::span<const std::uint32_t> allowed() override {
    switch (phase_) {
      case Phase::reasoning:
        return reasoning_;
      case Phase::opening:
        return only(frame_.opens[at_]);
      case Phase::content:
        return content();
      case Phase::closing:
        return only(frame_.closes[at_]);
      case Phase::free:
        return {};
    }
    return {};
  }

  void accept(TokenId token) override {
    switch (phase_) {
      case Phase::reasoning:
        if (token == frame_.opens.front()) go_on(Phase::opening, frame_.opens, Phase::content, 1);
        return;
      case Phase::opening:
        return go_on(Phase::opening, frame_.opens, Phase::content, at_ + 1);
      case Phase::content:
        return accept_content(token);
      case Phase::closing:
        return go_on(Phase::closing, frame_.closes, Phase::free, at_ + 1);
      case Phase::free:
        return;
    }
  }

 private:
  enum class Phase { reasoning, opening, content, closing, free };
  std::span<const std::uint32_t> only(TokenId token) {
    std::ranges::fill(mask_, 0);
    set(mask_, token);
    return mask_;
  }
  // `now` while there are tokens of `forced` left, else `next`.
  void go_on(Phase now, const std::vector<TokenId>& forced, Phase next, std::size_t at) {
    phase_ = at < forced.size() ? now : next;
    at_ = at;
  }

  std::span<const std::uint32_t> content() {
    try {
      std::int64_t shape = std::ssize(mask_);
      DLTensor tensor{mask_.data(), {kDLCPU, 0}, 1, {kDLInt, 32, 1}, &shape, nullptr, 0};
      matcher_.FillNextTokenBitmask(&tensor);
    } catch (const std::exception& error) {  // nothing of one request may end the engine's step
      spdlog::error("response_format: {}", error.what());
      return only(frame_.closes.front());
    }
    if (may_call_ && first_) set(mask_, frame_.calls);
    if (std::ranges::all_of(mask_, [](std::uint32_t word) { return word == 0; })) return only(frame_.closes.front());
    return mask_;
  }

  void accept_content(TokenId token) {
    const bool first = std::exchange(first_, false);
    if (may_call_ && first && token == frame_.calls) {
      phase_ = Phase::free;
    } else if (token == frame_.closes.front()) {
      // With tools the model decides whether calls follow.
      go_on(Phase::closing, frame_.closes, Phase::free, may_call_ ? frame_.closes.size() : 1);
    } else {
      matcher_.AcceptToken(token);
    }
  }

  const Frame frame_;
  const bool may_call_;
  Phase phase_;
  bool first_ = true;   // of the content
  std::size_t at_ = 0;  // of the forced tokens
  xgrammar::GrammarMatcher matcher_;
  Mask mask_, reasoning_;
};

}  // namespace

struct AnswerGrammars::Compiler {
  xgrammar::TokenizerInfo vocabulary;
  xgrammar::GrammarCompiler compiler;
  Mask text;  // the tokens that are not special

  Compiler(const model::Tokenizer& tokenizer, std::int64_t vocab, TokenId closer)
      : vocabulary(tokens_of(tokenizer), xgrammar::VocabType::RAW, static_cast<int>(vocab),
                   std::vector<std::int32_t>{closer}),
        compiler(vocabulary, 1, true, kCacheBytes, true),
        text(static_cast<std::size_t>((vocab + 31) / 32)) {
    for (TokenId token = 0; token < std::min<std::int64_t>(vocab, tokenizer.vocab_size()); ++token)
      if (!tokenizer.is_special(token)) set(text, token);
  }
};

AnswerGrammars::AnswerGrammars(const model::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
AnswerGrammars::~AnswerGrammars() = default;

std::shared_ptr<engine::TokenConstraint> AnswerGrammars::constrain(const AnswerFormat& format,
                                                                   const model::ChatOptions& options, bool may_call,
                                                                   std::int64_t vocab) {
  if (format.kind == AnswerFormat::Kind::text) return nullptr;
  Frame frame = frame_of(tokenizer_, options);
  const bool any_object = format.kind == AnswerFormat::Kind::json_object;
  const std::lock_guard lock(mutex_);
  try {
    if (!compiler_) compiler_ = std::make_unique<Compiler>(tokenizer_, vocab, frame.closes.front());
    // Strict: objects have the properties that they are described with, unless the schema allows others by itself.
    const auto grammar =
        compiler_->compiler.CompileJSONSchema(any_object ? R"({"type": "object"})" : format.schema, true, std::nullopt,
                                              std::nullopt, !any_object, kMostSpaces);
    return std::make_shared<ContentConstraint>(grammar, std::move(frame), may_call, compiler_->text);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorCode::invalid_argument, "the schema cannot be made into a grammar: {}", error.what());
  }
}

}  // namespace tidelock::serve
