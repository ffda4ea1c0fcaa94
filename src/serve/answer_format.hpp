// Answers that are held to JSON and calls that are held to their tools: response_format, tool_choice, strict and
// parallel_tool_calls of the OpenAI API. A JSON Schema becomes a grammar over bytes (XGrammar), the grammar the tokens
// that may come next; the chat protocol's own tokens around it are forced, reasoning before it stays free. Private to
// serve/.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "model/chat.hpp"
#include "model/tokenizer.hpp"
#include "serve/turn_script.hpp"

namespace tidelock::serve {

// What response_format asks for.
struct AnswerFormat {
  enum class Kind { text, json_object, json_schema } kind = Kind::text;
  std::string schema = {};  // of json_schema: what checked_schema() made of the client's
};

// What a request says of calls.
struct CallRules {
  struct Tool {
    std::string name;
    bool strict = false;      // its calls are held to
    std::string schema = {};  // what checked_schema() made of its parameters, which stand at
    std::string path = {};    // this place in the request
  };
  std::vector<Tool> tools = {};  // that may be called
  bool required = false;         // the answer is a call or more, and nothing else
  bool parallel = true;          // false: one call at most
  std::size_t calls_before = 0;  // in the conversation: K2 numbers them
};

// The grammars of one vocabulary. Thread-safe; what is compiled is kept, up to 64 MB of it.
class AnswerGrammars {
 public:
  explicit AnswerGrammars(const model::Tokenizer& tokenizer);
  ~AnswerGrammars();

  // A constraint for one answer of a chat that was asked to think or not; `vocab` is the model's. Null when neither the
  // format nor the rules ask for anything. The first call for a vocabulary sorts it. Throws Error{invalid_argument} for
  // a schema that the library cannot compile, ApiError{400} for one that the chat protocol cannot hold calls to.
  std::shared_ptr<engine::TokenConstraint> constrain(const AnswerFormat& format, const CallRules& rules, bool thinking,
                                                     std::int64_t vocab);

 private:
  struct Compiler;
  TurnForm form_of(const AnswerFormat& format, const CallRules& rules, bool thinking);
  ToolForm tool_of(const CallRules::Tool& tool);
  const model::Tokenizer& tokenizer_;
  std::mutex mutex_;
  std::unique_ptr<Compiler> compiler_;
};

}  // namespace tidelock::serve
