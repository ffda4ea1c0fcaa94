// A tool's schema taken apart for the K3 protocol, where each argument is an element of its own with a type, and
// strings are written as they are. Private to serve/. Include from .cpp files only, as model/json.hpp.
#pragma once

#include <string>
#include <vector>

#include "model/json.hpp"

namespace tidelock::serve {

struct ArgumentRule {
  std::size_t key = 0;  // index of the property
  std::string type;     // as of model::Argument
  enum class Form {
    any_text,     // a string without bounds
    json,         // `rule`: a JSON Schema of values of this type
    quoted_json,  // `rule`: a JSON Schema of strings that never need an escape; the text is what stands in the quotes
    regex,        // `rule`: of the whole text
    ebnf          // `rule`: a grammar of the text, its rule `root`
  } form = Form::any_text;
  std::string rule = {};
};

struct ArgumentRules {
  std::vector<std::string> keys;
  std::vector<bool> required;
  std::vector<ArgumentRule> rules;  // for each key one or more, of different types
};

// `schema`: what checked_schema() gives. Throws ApiError{400} naming the place below `path` for what cannot be told
// argument by argument: another schema than of one object, references to other places than definitions, and strings
// that may be of several forms.
ArgumentRules argument_rules(const std::string& schema, const std::string& path);

}  // namespace tidelock::serve
