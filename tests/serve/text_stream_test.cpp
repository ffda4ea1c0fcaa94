// Text that comes in pieces of any size is the text that comes at once.
#include "serve/text_stream.hpp"

#include <gtest/gtest.h>

#include <rapidcheck.h>

namespace tidelock::serve {
namespace text_stream_test {

std::string whole(std::string_view bytes) {
  Utf8Stream stream;
  std::string text = stream.feed(bytes);
  return text + stream.finish();
}

TEST(Utf8Stream, KeepsCharactersAndReplacesTheRest) {
  EXPECT_EQ(whole("aé中😀"), "aé中😀");
  EXPECT_EQ(whole("a\xff"), "a\xef\xbf\xbd");
  EXPECT_EQ(whole("\xe4\xb8"), "\xef\xbf\xbd");                              // cut short: one
  EXPECT_EQ(whole("\xe4\xb8x"), "\xef\xbf\xbdx");                            // interrupted
  EXPECT_EQ(whole("\xc0\xaf"), "\xef\xbf\xbd\xef\xbf\xbd");                  // overlong
  EXPECT_EQ(whole("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");  // a surrogate
  EXPECT_EQ(whole("\xf4\x90\x80\x80").size(), 12U);                          // beyond U+10FFFF
  Utf8Stream stream;
  EXPECT_EQ(stream.feed("\xf0\x9f"), "");
  EXPECT_EQ(stream.feed("\x98\x80!"), "😀!");
}

TEST(Utf8Stream, PiecesMakeNoDifference) {
  EXPECT_TRUE(rc::check("byte by byte == at once", [](const std::vector<std::uint8_t>& noise) {
    // Bytes that meet often: pieces of characters.
    static const std::string pool = "a\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\xff\xed\xa0\xf4\x90";
    std::string bytes, text;
    for (const auto b : noise) bytes += pool[b % pool.size()];
    Utf8Stream stream;
    for (const char c : bytes) text += stream.feed(std::string_view(&c, 1));
    text += stream.finish();
    RC_ASSERT(text == whole(bytes));
    RC_ASSERT(whole(text) == text);  // what comes out is valid
  }));
}

TEST(StopFinder, HoldsBackWhatMayBeAStop) {
  StopFinder finder({"END", "\n\n"});
  EXPECT_EQ(finder.feed("abc E"), "abc ");
  EXPECT_EQ(finder.feed("N"), "");
  EXPECT_EQ(finder.feed("D!"), "");
  EXPECT_TRUE(finder.found());
  EXPECT_EQ(finder.feed("more"), "");
  EXPECT_EQ(finder.finish(), "");
  StopFinder other({"END", "\n\n"});
  EXPECT_EQ(other.feed("x\n"), "x");
  EXPECT_EQ(other.feed("yEN"), "\ny");
  EXPECT_EQ(other.finish(), "EN");
  EXPECT_FALSE(other.found());
}

TEST(StopFinder, PiecesMakeNoDifference) {
  EXPECT_TRUE(rc::check("the text before the first stop string", [](const std::vector<std::uint8_t>& noise) {
    std::vector<std::string> stops{"aab", "bc", "cabca"};
    std::string text;
    for (const auto b : noise) text += "abc"[b % 3];
    // The stop string that ends first, and of those that end together the one that begins first.
    std::size_t first = text.size();
    for (std::size_t end = 1; end <= text.size() && first == text.size(); ++end)
      for (const auto& stop : stops)
        if (std::string_view(text).substr(0, end).ends_with(stop)) first = std::min(first, end - stop.size());
    StopFinder finder(stops), at_once(stops);
    std::string all = at_once.feed(text);
    all += at_once.finish();
    RC_ASSERT(all == text.substr(0, first));
    std::string out;
    std::size_t fed = 0;
    for (const char c : text) {
      out += finder.feed(std::string_view(&c, 1));
      ++fed;
      RC_ASSERT(out.size() <= std::min(first, fed));
    }
    RC_ASSERT(finder.found() == (first < text.size()));
    out += finder.finish();
    RC_ASSERT(out == text.substr(0, first));
  }));
}

}  // namespace text_stream_test
}  // namespace tidelock::serve
