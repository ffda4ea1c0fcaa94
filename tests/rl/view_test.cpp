#include "rl/view.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>

#include "rl/view_demo.hpp"
#include "rl/view_draw.hpp"

namespace tidelock::rl {
namespace view_test {

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += line;
    text += '\n';
  }
  return text;
}

std::string without_sgr(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      EXPECT_EQ(text.at(i + 1), '[');
      while (text.at(i) != 'm') ++i;  // at() throws when a sequence is cut
    } else {
      out += text[i];
    }
  }
  return out;
}

TEST(View, NoLineIsWiderThanTheTerminal) {
  EXPECT_TRUE(rc::check("every width, every state", [] {
    const int width = *rc::gen::inRange(0, 300);
    const int step = *rc::gen::inRange(0, 200);
    ViewState s = demo_state(step, 200);
    s.sample.question = *rc::gen::string<std::string>();
    s.sample.answer = *rc::gen::string<std::string>() + std::string(300, 'x');
    s.sample.calls = {{*rc::gen::string<std::string>(), *rc::gen::string<std::string>()}};
    s.run = *rc::gen::string<std::string>();
    const bool color = *rc::gen::arbitrary<bool>();
    for (const std::string& line : render(s, width, color))
      RC_ASSERT(display_width(line) <= std::clamp(width, 60, 200));
  }));
}

TEST(View, ColorsAreAllThatColorAdds) {
  for (const int width : {60, 80, 100, 200}) {
    const auto plain = render(demo_state(23, 60), width, false), colored = render(demo_state(23, 60), width, true);
    EXPECT_EQ(joined(plain).find('\x1b'), std::string::npos);
    EXPECT_NE(joined(colored).find('\x1b'), std::string::npos);
    ASSERT_EQ(plain.size(), colored.size());
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(without_sgr(colored[i]), plain[i]);
      const std::size_t last = colored[i].rfind('\x1b');  // nothing is left switched on at the end of a line
      if (last != std::string::npos) {
        EXPECT_EQ(colored[i].substr(last, 4), "\x1b[0m");
      }
    }
  }
}

TEST(View, ToolOutputCannotDriveTheTerminal) {
  ViewState s = demo_state(5, 10);
  s.sample.question = "a\x1b[2Jb\rc\x07";
  s.sample.calls = {{"printf '\x1b]0;owned\x07'", "x\x9b\x31mz \xC2\x9B evil\ttab\nnext"}};
  s.sample.answer = "\xE6\xBC\xA2wide";
  const std::string text = joined(render(s, 120, false));
  for (const char c : text) EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20);
  EXPECT_EQ(text.find("\xC2\x9B"), std::string::npos);
  EXPECT_EQ(text.find("\x7f"), std::string::npos);
  EXPECT_NE(text.find("tab ⏎ next"), std::string::npos);
  EXPECT_NE(text.find("·wide"), std::string::npos);
}

TEST(View, ShowsWhatARunIsAbout) {
  ViewState s = demo_state(38, 60);
  const std::string text = joined(render(s, 120, false));
  for (const char* part : {"quickstart",
                           "nano 2.5 M",
                           "seed 1",
                           "step 38/60",
                           "1m 21s left",
                           "│  0  │ of 202,046 sampled tokens",
                           "agree by bits",
                           "mean@8",
                           "step 30   0.809 [0.77 0.85]",
                           "rollout 4,412 tok/s",
                           "train 2,871 tok/s",
                           "█ rollout 51 %",
                           "▓ sandbox 11 %",
                           "▒ train 32 %",
                           "83 %",
                           "frozen",
                           "79 %",
                           "1.42 tool calls",
                           "56 % of groups",
                           "a+c?",
                           "$ cat /vault/a /vault/c",
                           "12 ⏎ 19",
                           "✓ reward 1"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  s.mismatch_tokens = 1234;
  s.mismatch_max_abs = 0.02;
  const std::string bad = joined(render(s, 120, true));
  EXPECT_NE(bad.find("\x1b[1;31m│  1,234  │"), std::string::npos);
  EXPECT_NE(bad.find("2.0e-02"), std::string::npos);
  EXPECT_EQ(bad.find("agree by bits"), std::string::npos);
}

TEST(View, NothingHasHappenedYet) {
  const std::string text = joined(render(ViewState{}, 80, false));
  EXPECT_NE(text.find("no sampled tokens compared yet"), std::string::npos);
  EXPECT_EQ(text.find("agree"), std::string::npos);  // nothing compared is not agreement
  EXPECT_EQ(text.find("nan"), std::string::npos);
}

TEST(View, CurveIsWhereTheRewardsAre) {
  ViewState s;
  s.steps = 40;
  s.rewards.assign(40, 1.0);
  const auto high = render(s, 80, false);
  s.rewards.assign(40, 0.0);
  const auto low = render(s, 80, false);
  const auto has_curve = [](const std::string& line) {
    return line.find("\xE2\xA0") != std::string::npos || line.find("\xE2\xA1") != std::string::npos ||
           line.find("\xE2\xA2") != std::string::npos || line.find("\xE2\xA3") != std::string::npos;
  };
  for (std::size_t i = 0; i < high.size(); ++i) {
    if (high[i].find("1.0 ┤") != std::string::npos) {
      EXPECT_TRUE(has_curve(high[i]));
      EXPECT_FALSE(has_curve(low[i]));
    }
    if (high[i].find("0.0 ┤") != std::string::npos) {
      EXPECT_FALSE(has_curve(high[i]));
      EXPECT_TRUE(has_curve(low[i]));
    }
  }
}

TEST(View, PlainLineHasTheNumbers) {
  const std::string line = plain_line(demo_state(30, 60));
  EXPECT_EQ(line.find("step 30/60  reward 0."), 0U);
  EXPECT_NE(line.find("mismatch 0 of 159510"), std::string::npos);
  EXPECT_NE(line.find("held-out mean@8 0.809 [0.769 0.849] pass@8 0.820"), std::string::npos);
  EXPECT_EQ(plain_line(demo_state(31, 60)).find("held-out"), std::string::npos);
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

TEST(Draw, SharesAddUp) {
  EXPECT_EQ(draw::share({1, 1, 1}, 10), (std::vector<int>{4, 3, 3}));
  EXPECT_EQ(draw::share({0, 0}, 10), (std::vector<int>{0, 0}));
  EXPECT_EQ(draw::share({5, 0, 5}, 7), (std::vector<int>{4, 0, 3}));
  EXPECT_TRUE(rc::check("cells add up to the width", [](std::vector<std::uint16_t> raw, std::uint8_t width) {
    std::vector<double> parts(raw.begin(), raw.end());
    int sum = 0;
    for (const int cells : draw::share(parts, width)) sum += cells;
    const bool any = std::any_of(parts.begin(), parts.end(), [](double p) { return p > 0; });
    RC_ASSERT(sum == (any ? width : 0));
  }));
}

TEST(Draw, Words) {
  EXPECT_EQ(draw::grouped(0), "0");
  EXPECT_EQ(draw::grouped(999), "999");
  EXPECT_EQ(draw::grouped(1234567), "1,234,567");
  EXPECT_EQ(draw::grouped(-1234), "-1,234");
  EXPECT_EQ(draw::duration(59.6), "1m 00s");
  EXPECT_EQ(draw::duration(3725), "1h 02m");
  EXPECT_EQ(draw::bar(0.5, 4), "██  ");
  EXPECT_EQ(draw::bar(1.0 / 32, 4), "▏   ");
  EXPECT_EQ(draw::clip("abcdef", 4), "abc…");
  EXPECT_EQ(draw::clip("\x1b[1mabcdef\x1b[0m", 4), "\x1b[1mabc…\x1b[0m");
  EXPECT_EQ(draw::spread("ab", "cd", 6), "ab  cd");
  draw::Plot plot(1, 1);
  plot.dot(0, 0);
  plot.dot(1, 3);
  EXPECT_EQ(plot.cell(0, 0), "⡈");
}

}  // namespace view_test
}  // namespace tidelock::rl
