// From bytes that come in pieces to text that may be sent: whole characters only, and nothing of a stop string. Private
// to serve/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tidelock::serve {

// Whole UTF-8 characters out of any bytes. What can no longer become a character is replaced by U+FFFD, one for each
// maximal part of one, as browsers do.
class Utf8Stream {
 public:
  // The text that is complete now; the rest is kept.
  std::string feed(std::string_view bytes);
  // The end: what is left is no character any more.
  std::string finish();

 private:
  std::string left_;
};

// Looks for stop strings in text that comes in pieces and holds back what may be the beginning of one.
class StopFinder {
 public:
  // Stop strings are not empty.
  explicit StopFinder(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // The text that certainly stands before any stop string. Nothing more comes after one was found.
  std::string feed(std::string_view text);
  // The end: what was held back is text after all.
  std::string finish();
  bool found() const { return found_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool found_ = false;
};

}  // namespace tidelock::serve
