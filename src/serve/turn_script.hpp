// How a turn goes in each chat protocol, when it is held to an answer's format or to rules for calls. Private to
// serve/.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serve/turn_constraint.hpp"

namespace tidelock::serve {

// One argument of a K3 call, of one type: the markup that opens it and what may stand in it.
struct ArgumentForm {
  std::size_t key = 0;  // index of the property
  Tokens opening;
  TextGrammar value;  // null: any text
};

// What a tool's calls are held to.
struct ToolForm {
  std::string name;
  bool held = false;        // to its schema
  TextGrammar object = {};  // K2: what the arguments may be, as one JSON object
  std::size_t keys = 0;     // K3, held: how many properties there are,
  std::vector<bool> required = {};
  std::vector<ArgumentForm> arguments = {};  // and how each may be given
};

struct TurnForm {
  bool thinking = false;
  TextGrammar content = {};          // null: any text
  std::vector<ToolForm> tools = {};  // that may be called; with none, what else is said of calls means nothing
  bool must_call = false;            // no content, and at least one call
  bool parallel = true;              // more than one call
  std::size_t calls_before = 0;      // K2: in the conversation
};

std::unique_ptr<TurnScript> k2_script(const model::Tokenizer& tokenizer, TurnForm form);
std::unique_ptr<TurnScript> k3_script(const model::Tokenizer& tokenizer, TurnForm form);

}  // namespace tidelock::serve
