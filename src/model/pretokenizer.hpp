// The Kimi pre-tokenizer: cuts text into the pieces inside which byte pairs may merge.
//
// It does by hand what this regular expression does (first alternative that matches wins, each is greedy):
//   [\p{Han}]+
//   [^\r\n\p{L}\p{N}]? U* W+ (?i:'s|'t|'re|'ve|'m|'ll|'d)?      U = Lu Lt Lm Lo M, without Han
//   [^\r\n\p{L}\p{N}]? U+ W* (?i:'s|'t|'re|'ve|'m|'ll|'d)?      W = Ll Lm Lo M, without Han
//   \p{N}{1,3}
//    ?[^\s\p{L}\p{N}]+[\r\n]*
//   \s*[\r\n]+
//   \s+(?!\S)
//   \s+
// Class intersection is not in common regex libraries, and backtracking ones are not linear in time; this is.
// Properties come from ICU. A byte that is not part of valid UTF-8 counts as one character that is neither letter,
// number nor space, so that any bytes survive a round trip.
#pragma once

#include <string_view>
#include <vector>

namespace tidelock::model {

// The pieces in order; together they are `text`, into which they point. Like the reference tokenizer, first cuts the
// text after every 400,000 characters and inside every run of more than 25,000 (non-)space characters.
std::vector<std::string_view> split_pieces(std::string_view text);

}  // namespace tidelock::model
