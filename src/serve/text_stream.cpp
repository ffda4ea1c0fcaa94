#include "serve/text_stream.hpp"

#include <algorithm>
#include <utility>

namespace tidelock::serve {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// How the bytes at the front of `text` begin: `size` of them belong together; they are a character, may become one with
// the bytes that follow, or neither.
struct Front {
  std::size_t size;
  enum { whole, partial, broken } kind;
};

Front front_of(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, Front::whole};
  const std::size_t length = lead >= 0xC2 && lead < 0xE0   ? 2
                             : lead >= 0xE0 && lead < 0xF0 ? 3
                             : lead >= 0xF0 && lead < 0xF5 ? 4
                                                           : 0;
  if (length == 0) return {1, Front::broken};
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {i, Front::partial};
    unsigned char low = 0x80, high = 0xBF;
    // No overlong forms, no surrogates, nothing beyond U+10FFFF.
    if (i == 1 && lead == 0xE0) low = 0xA0;
    if (i == 1 && lead == 0xED) high = 0x9F;
    if (i == 1 && lead == 0xF0) low = 0x90;
    if (i == 1 && lead == 0xF4) high = 0x8F;
    if (byte(i) < low || byte(i) > high) return {i, Front::broken};
  }
  return {length, Front::whole};
}

}  // namespace

std::string Utf8Stream::feed(std::string_view bytes) {
  left_ += bytes;
  std::string text;
  std::size_t at = 0;
  while (at < left_.size()) {
    const Front front = front_of(std::string_view(left_).substr(at));
    if (front.kind == Front::partial) break;
    if (front.kind == Front::whole) {
      text.append(left_, at, front.size);
    } else {
      text += kReplacement;
    }
    at += front.size;
  }
  left_.erase(0, at);
  return text;
}

std::string Utf8Stream::finish() {
  const bool partial = !left_.empty();
  left_.clear();
  return partial ? std::string(kReplacement) : "";
}

std::string StopFinder::feed(std::string_view text) {
  if (found_) return "";
  held_ += text;
  // The one that is complete first, as if the text came letter by letter; of those that end together, the longest.
  std::size_t begin = 0, end = std::string::npos, keep = 0;
  for (const std::string& stop : stops_) {
    const std::size_t at = held_.find(stop);
    if (at != std::string::npos && std::pair(at + stop.size(), at) < std::pair(end, begin)) {
      begin = at;
      end = at + stop.size();
    }
    // The longest end of the text that begins this stop string.
    for (std::size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n)
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) keep = n;
  }
  found_ = end != std::string::npos;
  const std::size_t safe = found_ ? begin : held_.size() - keep;
  std::string out = held_.substr(0, safe);
  held_.erase(0, found_ ? held_.size() : safe);
  return out;
}

std::string StopFinder::finish() {
  return std::exchange(held_, {});
}

}  // namespace tidelock::serve
