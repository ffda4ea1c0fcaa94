// Answers that are held to JSON: response_format of the OpenAI API. A JSON Schema becomes a grammar over bytes
// (XGrammar), the grammar the tokens that may come next; the chat protocol's own tokens around the content are forced,
// reasoning before it stays free. Private to serve/.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/engine.hpp"
#include "model/chat.hpp"
#include "model/tokenizer.hpp"

namespace xgrammar {
class CompiledGrammar;
}

namespace tidelock::serve {

// What response_format asks for.
struct AnswerFormat {
  enum class Kind { text, json_object, json_schema } kind = Kind::text;
  std::string schema = {};  // of json_schema: what checked_schema() made of the client's
};

// The grammars of one vocabulary. Thread-safe; what is compiled is kept, up to 64 MB of it.
class AnswerGrammars {
 public:
  explicit AnswerGrammars(const model::Tokenizer& tokenizer);
  ~AnswerGrammars();

  // A constraint for one answer of a chat that is rendered with these options; `vocab` is the model's. With `may_call`
  // a call of tools may stand in the content's place. Null for text. The first call for a vocabulary sorts it. Throws
  // Error{invalid_argument} for a schema that the library cannot compile.
  std::shared_ptr<engine::TokenConstraint> constrain(const AnswerFormat& format, const model::ChatOptions& options,
                                                     bool may_call, std::int64_t vocab);

 private:
  struct Compiler;
  const model::Tokenizer& tokenizer_;
  std::mutex mutex_;
  std::unique_ptr<Compiler> compiler_;
};

}  // namespace tidelock::serve
