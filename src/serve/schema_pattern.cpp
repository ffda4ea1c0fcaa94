// Regular expressions of a schema, made safe to stand in a JSON string: the library writes what a pattern matches
// between the quotes as it is, so a pattern must not match what JSON has to escape.
#include <algorithm>
#include <array>
#include <cctype>

#include "base/base.hpp"
#include "serve/schema_check.hpp"

namespace tidelock::serve {
namespace {

constexpr std::string_view kEscapedInJson = R"("\\\x00-\x1f)";    // as the items of a class
constexpr std::string_view kPlainEscapes = R"(/.*+?()[]{}|^$-)";  // that stand for themselves behind a backslash

class PatternReader {
 public:
  explicit PatternReader(std::string_view pattern) : rest_(pattern) {}

  // Anchors go: what stands between the quotes is matched as a whole.
  std::string safe() {
    if (rest_.starts_with("^")) take();
    std::string out;
    while (!rest_.empty() && rest_ != "$") {
      const char c = take();
      if (c == '*' || c == '+' || c == '?' || c == '{') {
        out += repetition(c);
        continue;
      }
      repeatable_ = c != '(' && c != '|';
      if (c == '\\') {
        out += escape(take());
      } else if (c == '[') {
        out += character_class();
      } else if (c == '.') {
        out += fmt::format("[^{}]", kEscapedInJson);
      } else if (c == '(' && rest_.starts_with("?")) {
        if (!rest_.starts_with("?:")) refuse("(?: ... ) and ( ... ) as groups");
        rest_.remove_prefix(2);
        out += "(?:";
      } else if (c == '^' || c == '$') {
        refuse("^ at its start and $ at its end alone");
      } else {
        out += literal(c);
      }
    }
    return out;
  }

 private:
  [[noreturn]] static void refuse(const std::string& expected) {
    fail(ErrorCode::invalid_argument, "a regular expression with {}", expected);
  }
  char take() {
    if (rest_.empty()) refuse("an end");
    const char c = rest_.front();
    rest_.remove_prefix(1);
    return c;
  }
  static char literal(char c) {
    if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20)
      refuse("characters that JSON does not have to escape");
    return c;
  }

  // Behind what can be repeated, once. A lazy one repeats the same texts.
  std::string repetition(char c) {
    if (!repeatable_) refuse("something in front of each repetition");
    repeatable_ = false;
    std::string out{c};
    while (out.front() == '{' && out.back() != '}') {
      out += take();
      if (out.back() != '}' && out.back() != ',' && std::isdigit(static_cast<unsigned char>(out.back())) == 0)
        refuse("numbers between { and }");
    }
    if (rest_.starts_with("?")) take();
    return out;
  }

  // What \d, \w and \s stand for, as the items of a class.
  static std::string_view members(char c) { return c == 'd' ? "0-9" : c == 'w' ? "a-zA-Z0-9_" : c == 's' ? " " : ""; }
  // Outside a class. A capital letter stands for all else.
  static std::string escape(char c) {
    if (!members(c).empty()) return fmt::format("[{}]", members(c));
    const char small = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (!members(small).empty()) return fmt::format("[^{}{}]", members(small), kEscapedInJson);
    return plain(c);
  }
  static std::string plain(char c) {
    if (c == '"' || c == '\\') literal(c);
    if (kPlainEscapes.find(c) == std::string_view::npos)
      refuse(R"(\d, \w, \s, \D, \W, \S and escaped punctuation as its only escapes)");
    return {'\\', c};
  }

  // Behind its opening bracket. A class that is not negated must not hold what JSON escapes, one that is gets it.
  std::string character_class() {
    const bool negated = rest_.starts_with("^");
    if (negated) take();
    std::string out = negated ? fmt::format("[^{}", kEscapedInJson) : "[";
    bool empty = true;
    for (char c = take(); c != ']'; c = take(), empty = false) {
      if (c == '\\') {
        const char escaped = take();
        out += members(escaped).empty() ? plain(escaped) : std::string(members(escaped));
        continue;
      }
      const char low = literal(c);
      out += low;
      if (low == '[') refuse(R"(\[ for a bracket in a class)");
      if (!rest_.starts_with("-") || rest_.starts_with("-]")) continue;
      take();
      const char high = literal(take());
      if (!std::isalnum(static_cast<unsigned char>(low)) || !std::isalnum(static_cast<unsigned char>(high)) ||
          high < low)
        refuse("ranges of letters or digits");
      if (low < '\\' && high > '\\') refuse("ranges that do not go across the backslash");
      out += {'-', high};
    }
    if (empty) refuse("something in its classes");
    return out + "]";
  }
  std::string_view rest_;
  bool repeatable_ = false;  // what came last
};

}  // namespace

std::string json_safe_pattern(std::string_view pattern) {
  return PatternReader(pattern).safe();
}

}  // namespace tidelock::serve
