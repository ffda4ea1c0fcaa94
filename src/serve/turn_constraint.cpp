#include "serve/turn_constraint.hpp"

#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>

#include "base/base.hpp"

namespace tidelock::serve {
namespace {

using Kind = TurnStep::Kind;

void set(TokenMask& mask, TokenId token) {
  mask[static_cast<std::size_t>(token) / 32] |= 1U << (token % 32);
}

// Whether it was set.
bool take(TokenMask& mask, TokenId token) {
  std::uint32_t& word = mask[static_cast<std::size_t>(token) / 32];
  const std::uint32_t bit = 1U << (token % 32);
  const bool was = (word & bit) != 0;
  word &= ~bit;
  return was;
}

class TurnConstraint final : public engine::TokenConstraint {
 public:
  TurnConstraint(std::unique_ptr<TurnScript> script, std::shared_ptr<const TurnVocabulary> vocabulary)
      : script_(std::move(script)), vocabulary_(std::move(vocabulary)), mask_(vocabulary_->text.size()) {
    enter(script_->first());
  }

  std::span<const std::uint32_t> allowed() override {
    switch (step_.kind) {
      case Kind::choice:
        std::ranges::fill(mask_, 0);
        for (const std::size_t one : alive_) set(mask_, step_.choices[one][at_]);
        return mask_;
      case Kind::text:
        mask_ = vocabulary_->text;
        for (const TokenId closer : step_.closers) set(mask_, closer);
        return mask_;
      case Kind::grammar:
        return by_grammar();
      case Kind::watch:
      case Kind::free:
        return {};
    }
    return {};
  }

  void accept(TokenId token) override {
    switch (step_.kind) {
      case Kind::choice:
        return accept_choice(token);
      case Kind::text:
        if (const auto found = std::ranges::find(step_.closers, token); found != step_.closers.end())
          go_on(static_cast<std::size_t>(found - step_.closers.begin()));
        return;
      case Kind::grammar:
        return accept_grammar(token);
      case Kind::watch:
        return accept_watched(token);
      case Kind::free:
        return;
    }
  }

 private:
  void enter(TurnStep step) {
    step_ = std::move(step);
    at_ = 0;
    first_ = true;
    alive_.resize(step_.choices.size());
    for (std::size_t i = 0; i < alive_.size(); ++i) alive_[i] = i;
    matcher_.reset();
    if (step_.kind != Kind::grammar) return;
    matcher_.emplace(*step_.grammar.compiled);
    if (step_.grammar.quoted && !matcher_->AcceptString("\"")) fail(ErrorCode::internal, "a string has no beginning");
  }
  void go_on(std::size_t taken) { enter(script_->next(taken)); }

  std::span<const std::uint32_t> only(TokenId token) {
    std::ranges::fill(mask_, 0);
    set(mask_, token);
    return mask_;
  }

  std::span<const std::uint32_t> by_grammar() {
    try {
      std::int64_t shape = std::ssize(mask_);
      DLTensor tensor{mask_.data(), {kDLCPU, 0}, 1, {kDLInt, 32, 1}, &shape, nullptr, 0};
      matcher_->FillNextTokenBitmask(&tensor);
    } catch (const std::exception& error) {  // nothing of one request may end the engine's step
      spdlog::error("an answer's grammar: {}", error.what());
      return only(step_.closers.front());
    }
    bool may_end = take(mask_, vocabulary_->stop);
    if (step_.grammar.quoted) {
      may_end = take(mask_, vocabulary_->quote);
      for (std::size_t i = 0; i < mask_.size(); ++i) mask_[i] &= ~vocabulary_->quotes[i];
    }
    if (may_end) set(mask_, step_.closers.front());
    if (first_)
      for (std::size_t i = 1; i < step_.closers.size(); ++i) set(mask_, step_.closers[i]);
    if (std::ranges::all_of(mask_, [](std::uint32_t word) { return word == 0; })) return only(step_.closers.front());
    return mask_;
  }

  void accept_choice(TokenId token) {
    std::erase_if(alive_, [&](std::size_t one) { return step_.choices[one][at_] != token; });
    ++at_;
    if (alive_.empty()) return enter({});  // never of what was allowed
    if (step_.choices[alive_.front()].size() == at_) go_on(alive_.front());
  }

  void accept_grammar(TokenId token) {
    for (std::size_t i = step_.closers.size(); i-- > 0;)  // the last ones first: they may be the same token
      if (token == step_.closers[i] && (i == 0 || first_)) return go_on(i);
    first_ = false;
    matcher_->AcceptToken(token);
  }

  void accept_watched(TokenId token) {
    const Tokens& wanted = step_.choices.front();  // its first token stands nowhere else in it
    at_ = wanted[at_] == token ? at_ + 1 : wanted[0] == token ? 1 : 0;
    if (at_ == wanted.size()) go_on(0);
  }

  std::unique_ptr<TurnScript> script_;
  std::shared_ptr<const TurnVocabulary> vocabulary_;
  TurnStep step_;
  std::vector<std::size_t> alive_;  // choices that what was said may still become
  std::size_t at_ = 0;              // tokens of the choice that were said
  bool first_ = true;               // nothing was said in this step
  std::optional<xgrammar::GrammarMatcher> matcher_;
  TokenMask mask_;
};

}  // namespace

std::shared_ptr<engine::TokenConstraint> constrain_turn(std::unique_ptr<TurnScript> script,
                                                        std::shared_ptr<const TurnVocabulary> vocabulary) {
  return std::make_shared<TurnConstraint>(std::move(script), std::move(vocabulary));
}

}  // namespace tidelock::serve
