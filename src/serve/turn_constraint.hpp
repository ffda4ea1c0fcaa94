// An assistant's turn that is held to a form, step by step: some steps are the protocol's markup, some are text of the
// model's own, some are held to a grammar. Private to serve/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.hpp"
#include "model/tokenizer.hpp"

namespace xgrammar {
class CompiledGrammar;
}

namespace tidelock::serve {

using model::TokenId;
using Tokens = std::vector<TokenId>;
using TokenMask = std::vector<std::uint32_t>;  // as of engine::TokenConstraint

// What texts may be said. Null: any.
struct TextGrammar {
  std::shared_ptr<const xgrammar::CompiledGrammar> compiled;
  bool quoted = false;  // it is of a JSON string, and what is said is the text between its quotes
};

struct TurnStep {
  enum class Kind {
    choice,   // one of `choices`, which are not empty and none of which another begins with
    text,     // text, up to one of `closers`
    grammar,  // text of `grammar`, up to closers[0]; or in its place at once another one of `closers`
    watch,    // anything, until choices[0] has been said
    free      // anything, for good
  } kind = Kind::free;
  std::vector<Tokens> choices = {};
  Tokens closers = {};
  TextGrammar grammar = {};
};

// One turn's steps.
class TurnScript {
 public:
  virtual ~TurnScript() = default;
  virtual TurnStep first() = 0;
  // What comes behind the last step, which ended with this one of its choices or closers.
  virtual TurnStep next(std::size_t taken) = 0;
};

// What is the same for all turns of a vocabulary.
struct TurnVocabulary {
  TokenMask text;    // the tokens that are not special
  TokenMask quotes;  // those whose bytes hold a quotation mark
  TokenId stop = 0;  // what grammars call their end
  TokenId quote = 0;
};

std::shared_ptr<engine::TokenConstraint> constrain_turn(std::unique_ptr<TurnScript> script,
                                                        std::shared_ptr<const TurnVocabulary> vocabulary);

}  // namespace tidelock::serve
