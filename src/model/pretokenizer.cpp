#include "model/pretokenizer.hpp"

#include <unicode/uchar.h>
#include <unicode/uscript.h>
#include <unicode/utf8.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tidelock::model {
namespace {

constexpr std::size_t characters_per_chunk = 400'000;
constexpr std::size_t characters_per_run = 25'000;

// What the expression asks about a character.
enum Class : std::uint16_t {
  han = 1,         // \p{Han}
  upper = 2,       // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
  lower = 4,       // [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
  letter = 8,      // \p{L}
  number = 16,     // \p{N}
  space = 32,      // \s
  newline = 64,    // [\r\n]
  cut_space = 128  // str.isspace() of Python, which decides where long runs are cut
};

std::uint16_t classify(UChar32 c) {
  std::uint16_t result = 0;
  const std::uint32_t category = U_MASK(u_charType(c));
  UErrorCode status = U_ZERO_ERROR;
  if (uscript_getScript(c, &status) == USCRIPT_HAN) result |= han;
  if ((category & U_GC_L_MASK) != 0) result |= letter;
  if ((category & U_GC_N_MASK) != 0) result |= number;
  if ((result & han) == 0) {
    constexpr std::uint32_t both = U_GC_LM_MASK | U_GC_LO_MASK | U_GC_M_MASK;
    if ((category & (U_GC_LU_MASK | U_GC_LT_MASK | both)) != 0) result |= upper;
    if ((category & (U_GC_LL_MASK | both)) != 0) result |= lower;
  }
  if (u_isUWhiteSpace(c)) result |= space | cut_space;
  if (c == '\r' || c == '\n') result |= newline;
  if (c >= 0x1C && c <= 0x1F) result |= cut_space;
  return result;
}

std::array<std::uint16_t, 128> classify_ascii() {
  std::array<std::uint16_t, 128> table{};
  for (std::size_t c = 0; c < table.size(); ++c) table[c] = classify(static_cast<UChar32>(c));
  return table;
}

struct Character {
  std::size_t offset;  // of its first byte
  std::uint16_t classes;
  bool is(std::uint16_t any_of) const { return (classes & any_of) != 0; }
};

// Matches the expression at one place after another of one segment. `characters` has one entry more than the segment:
// its end, of no class, so that looking one ahead needs no test.
class Matcher {
 public:
  Matcher(std::string_view text, std::span<const Character> characters)
      : text_(text), characters_(characters), end_(characters.size() - 1) {}

  void split_into(std::vector<std::string_view>& pieces) const {
    for (std::size_t at = 0; at < end_;) {
      const std::size_t stop = match(at);
      pieces.push_back(text_.substr(characters_[at].offset, characters_[stop].offset - characters_[at].offset));
      at = stop;
    }
  }

 private:
  std::size_t skip(std::size_t at, std::uint16_t any_of) const {
    while (at < end_ && characters_[at].is(any_of)) ++at;
    return at;
  }
  std::size_t skip_other(std::size_t at, std::uint16_t none_of) const {
    while (at < end_ && !characters_[at].is(none_of)) ++at;
    return at;
  }

  // The end of the match that starts at `at` < end_; always beyond `at`.
  std::size_t match(std::size_t at) const {
    if (characters_[at].is(han)) return skip(at, han);
    if (const std::size_t stop = match_word(at); stop != at) return stop;
    if (characters_[at].is(number)) {
      std::size_t stop = at + 1;
      while (stop < end_ && stop < at + 3 && characters_[stop].is(number)) ++stop;
      return stop;
    }
    constexpr std::uint16_t not_symbol = space | letter | number;
    const std::size_t symbol = at + (byte_at(at) == ' ' ? 1 : 0);
    if (const std::size_t stop = skip_other(symbol, not_symbol); stop != symbol) return skip(stop, newline);
    return match_space(at);
  }

  // Both word alternatives, or `at` when neither matches. Order as in the expression: the first with its optional
  // leading character, the first without, the second with, the second without.
  std::size_t match_word(std::size_t at) const {
    const bool may_lead = !characters_[at].is(newline | letter | number);
    for (const bool ends_low : {true, false}) {
      for (const bool leads : {true, false}) {
        if (leads && !may_lead) continue;
        const std::size_t begin = at + (leads ? 1 : 0);
        const std::size_t stop = ends_low ? match_low_word(begin) : match_capital_word(begin);
        if (stop != begin) return skip_contraction(stop);
      }
    }
    return at;
  }

  // U* W+: where W+ cannot start after the longest U*, U* gives characters back, up to the last one in both classes.
  std::size_t match_low_word(std::size_t begin) const {
    std::size_t last_in_both = end_;
    std::size_t at = begin;
    for (; at < end_ && characters_[at].is(upper); ++at)
      if (characters_[at].is(lower)) last_in_both = at;
    if (at < end_ && characters_[at].is(lower)) return skip(at, lower);
    return last_in_both == end_ ? begin : last_in_both + 1;
  }

  // U+ W*
  std::size_t match_capital_word(std::size_t begin) const {
    const std::size_t stop = skip(begin, upper);
    return stop == begin ? begin : skip(stop, lower);
  }

  std::size_t skip_contraction(std::size_t at) const {
    if (byte_at(at) != '\'') return at;
    const char first = low(at + 1), second = low(at + 2);
    const bool two =
        (first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l');
    if (two) return at + 3;
    // U+017F, the long s, folds to s.
    const bool long_s = first == '\xC5' && characters_[at + 1].offset + 1 < characters_[end_].offset &&
                        text_[characters_[at + 1].offset + 1] == '\xBF';
    const bool one = first == 's' || first == 't' || first == 'm' || first == 'd' || long_s;
    return one ? at + 2 : at;
  }

  // \s*[\r\n]+ | \s+(?!\S) | \s+
  std::size_t match_space(std::size_t at) const {
    std::size_t stop = at, after_newline = at;
    for (; stop < end_ && characters_[stop].is(space); ++stop)
      if (characters_[stop].is(newline)) after_newline = stop + 1;
    if (after_newline != at) return after_newline;
    const bool before_text = stop < end_;
    return before_text && stop - at > 1 ? stop - 1 : stop;
  }

  // The first byte of a character, 0 past the end.
  char byte_at(std::size_t at) const { return at < end_ ? text_[characters_[at].offset] : '\0'; }
  char low(std::size_t at) const {
    const char c = byte_at(at);
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }

  std::string_view text_;
  std::span<const Character> characters_;
  std::size_t end_;
};

// Reads up to one chunk of characters from `at` on, which moves.
void read_characters(std::string_view text, std::size_t& at, std::vector<Character>& characters) {
  static const std::array<std::uint16_t, 128> ascii = classify_ascii();
  characters.clear();
  while (at < text.size() && characters.size() < characters_per_chunk) {
    const auto byte = static_cast<unsigned char>(text[at]);
    if (byte < 128) {
      characters.push_back({at++, ascii[byte]});
      continue;
    }
    // The longest character has four bytes; the macro counts in int32, the text may be longer.
    const std::string_view next = text.substr(at, 4);
    UChar32 c = 0;
    std::int32_t read = 0;
    U8_NEXT(next.data(), read, static_cast<std::int32_t>(next.size()), c);
    characters.push_back({at, c < 0 ? std::uint16_t{0} : classify(c)});
    at += c < 0 ? 1 : static_cast<std::size_t>(read);
  }
}

// The end of the segment that starts at `begin`: before a run of one kind grows beyond its limit.
std::size_t segment_end(std::span<const Character> characters, std::size_t begin) {
  std::size_t run = 0;
  for (std::size_t i = begin; i < characters.size(); ++i) {
    const bool same = i > begin && characters[i].is(cut_space) == characters[i - 1].is(cut_space);
    run = same ? run + 1 : 1;
    if (run > characters_per_run) return i;
  }
  return characters.size();
}

}  // namespace

std::vector<std::string_view> split_pieces(std::string_view text) {
  std::vector<std::string_view> pieces;
  std::vector<Character> characters;
  for (std::size_t at = 0; at < text.size();) {
    read_characters(text, at, characters);
    const std::size_t count = characters.size();
    characters.push_back({at, 0});
    for (std::size_t begin = 0; begin < count;) {
      const std::size_t stop = segment_end(std::span(characters).first(count), begin);
      Matcher(text, std::span(characters).subspan(begin, stop - begin + 1)).split_into(pieces);
      begin = stop;
    }
  }
  return pieces;
}

}  // namespace tidelock::model
