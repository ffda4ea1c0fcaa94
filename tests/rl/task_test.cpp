#include "rl/task.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "rl/tool.hpp"

namespace tidelock::rl {
namespace task_test {

const std::string& question(const Episode& episode) {
  return episode.messages.back().content;
}

TEST(Task, SplitIsTheHashModuloFive) {
  // Computed with another program: int(sha256(key), 16) % 5.
  EXPECT_EQ(split_of("calc:37*58"), Split::held_out);
  EXPECT_EQ(split_of("calc:12*15"), Split::held_out);
  EXPECT_EQ(split_of("calc:12*16"), Split::train);
  int held_out = 0;
  for (int i = 0; i < 5000; ++i)
    if (split_of(fmt::format("key {}", i)) == Split::held_out) ++held_out;
  EXPECT_NEAR(held_out, 1000, 120);
}

TEST(Task, NoQuestionIsOnBothSides) {
  for (const std::string& name : builtin_families()) {
    const auto family = make_family(name);
    EXPECT_TRUE(rc::check(name + ": the key decides the side, and the side is what was asked for", [&] {
      const auto seed = *rc::gen::arbitrary<std::uint64_t>();
      const auto difficulty = *rc::gen::element(1.0, 1.5, 2.0, 3.7);
      const Episode train = family->make(seed, difficulty, Split::train);
      const Episode held_out = family->make(seed, difficulty, Split::held_out);
      RC_ASSERT(split_of(train.key) == Split::train);
      RC_ASSERT(split_of(held_out.key) == Split::held_out);
      RC_ASSERT(train.key != held_out.key);
    }));
  }
}

TEST(Task, CalcSplitsTheQuestionNotItsWording) {
  // 1-digit products are few, so the whole of both sides is seen. a*b and b*a must be on one side.
  const auto family = make_family("calc");
  std::set<std::string> train, held_out;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    train.insert(question(family->make(seed, 1, Split::train)));
    held_out.insert(question(family->make(seed, 1, Split::held_out)));
  }
  EXPECT_EQ(train.size() + held_out.size(), 81U);
  for (const std::string& asked : held_out) {
    EXPECT_EQ(train.count(asked), 0U) << asked;
    EXPECT_EQ(train.count(fmt::format("{}*{}?", asked[2], asked[0])), 0U) << asked;
  }
}

TEST(Task, MakeIsAPureFunctionAndEpisodesDiffer) {
  for (const std::string& name : builtin_families()) {
    const auto family = make_family(name);
    std::set<std::string> keys;
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
      const Episode a = family->make(seed, 2, Split::train), b = family->make(seed, 2, Split::train);
      EXPECT_EQ(a.key, b.key);
      EXPECT_EQ(a.id, b.id);
      EXPECT_EQ(question(a), question(b));
      keys.insert(a.key);
    }
    EXPECT_GT(keys.size(), 190U) << name;
  }
}

TEST(Task, VaultAndShellCannotBeGuessed) {
  // The best guess without the tool is the most frequent answer to the question.
  for (const auto& [name, difficulty] : {std::pair{"vault", 1.0}, {"vault", 2.0}, {"shell", 1.0}}) {
    const auto family = make_family(name);
    std::map<std::string, int> answers;
    constexpr int kEpisodes = 4000;
    for (std::uint64_t seed = 0; seed < kEpisodes; ++seed)
      ++answers[family->make(seed, difficulty, Split::held_out).reference_answer];
    int most = 0;
    for (const auto& [answer, count] : answers) most = std::max(most, count);
    EXPECT_LT(most, kEpisodes / 10) << name << " " << difficulty;
  }
}

TEST(Task, TextsAreShortAndFixed) {
  EXPECT_EQ(question(make_family("shell")->make(5, 1, Split::train)), "hidden?");
  const std::string vault = question(make_family("vault")->make(5, 1, Split::train));
  EXPECT_EQ(vault.size(), 4U);
  EXPECT_NE(vault[0], vault[2]);
  EXPECT_EQ(question(make_family("calc")->make(5, 2, Split::train)).size(), 6U);
}

TEST(Task, DifficultyIsChecked) {
  EXPECT_THROW(make_family("calc")->make(1, 0.5, Split::train), Error);
  EXPECT_THROW(make_family("calc")->make(1, 7, Split::train), Error);
  EXPECT_THROW(make_family("vault")->make(1, std::nan(""), Split::train), Error);
  try {
    make_family("maze");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("calc, vault, shell"), std::string::npos);
  }
}

TEST(Task, AFractionOfDifficultyMixesItsNeighbours) {
  const auto family = make_family("calc");
  int two_digits = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed)
    if (question(family->make(seed, 1.25, Split::train)).size() == 6) ++two_digits;
  EXPECT_NEAR(two_digits, 250, 60);
}

TEST(Task, PerfectDemonstrationsEndInTheAnswer) {
  for (const std::string& name : builtin_families()) {
    const auto family = make_family(name);
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
      const Episode episode = family->make(seed, 2.5, Split::train);
      Random random(seed, 1);
      const auto turns = family->demonstrate(episode, random, Skill::perfect());
      ASSERT_GE(turns.size(), name == "calc" ? 2U : 3U);
      EXPECT_EQ(turns.back().answer, episode.reference_answer);
      EXPECT_TRUE(turns.back().command.empty());
      for (std::size_t i = 0; i + 1 < turns.size(); ++i) EXPECT_FALSE(turns[i].command.empty());
    }
  }
}

double share_right(const TaskFamily& family, const Skill& skill) {
  int right = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Episode episode = family.make(seed, 2, Split::train);
    Random random(seed, 2);
    if (family.demonstrate(episode, random, skill).back().answer == episode.reference_answer) ++right;
  }
  return right / 2000.0;
}

TEST(Task, SkillSetsHowOftenDemonstrationsAreRight) {
  Skill skill = Skill::perfect();
  const auto calc = make_family("calc"), vault = make_family("vault"), shell = make_family("shell");
  skill.use_tool = 0.3;
  for (const auto* family : {calc.get(), vault.get(), shell.get()})
    EXPECT_NEAR(share_right(*family, skill), 0.3, 0.04) << family->name();
  skill = Skill::perfect();
  skill.wrong_copy = 0.4;
  for (const auto* family : {calc.get(), vault.get(), shell.get()})
    EXPECT_NEAR(share_right(*family, skill), 0.6, 0.04) << family->name();
  skill = Skill::perfect();
  skill.wrong_command = 0.4;
  EXPECT_NEAR(share_right(*calc, skill), 0.6, 0.04);
  EXPECT_NEAR(share_right(*shell, skill), 0.6, 0.04);
  skill = Skill::perfect();
  skill.stop_early = 1;
  EXPECT_EQ(share_right(*shell, skill), 0);
  skill.use_tool = 0;
  EXPECT_EQ(share_right(*calc, skill), 0);  // guesses are wrong
}

TEST(Task, MixtureDrawsByWeight) {
  TaskMixture mixture;
  EXPECT_THROW(mixture.make(1, Split::train), Error);
  mixture.add(make_family("calc"), 2, 3);
  mixture.add(make_family("shell"), 1, 1);
  EXPECT_THROW(mixture.add(make_family("calc"), 2, 0), Error);
  int calc = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Episode episode = mixture.make(seed, Split::held_out);
    EXPECT_EQ(split_of(episode.key), Split::held_out);
    EXPECT_EQ(mixture.family_of(episode).name(), episode.family);
    if (episode.family == "calc") ++calc;
  }
  EXPECT_NEAR(calc, 1500, 80);
}

TEST(Tool, ObservationText) {
  using namespace std::chrono_literals;
  const auto text = [](sandbox::ExecResult result, std::uint64_t limit = 100) {
    return observation_text(result, 10s, limit);
  };
  sandbox::ExecResult result;
  result.exit_code = 0;
  result.output = "2146\n";
  EXPECT_EQ(text(result), "2146");
  result.output = "two\n\n";
  EXPECT_EQ(text(result), "two\n");  // one newline is the terminal's, the other the program's
  result.error = "cat: no\n";
  result.exit_code = 1;
  EXPECT_EQ(text(result), "two\n\ncat: no\nexit 1");
  result.output.clear();
  EXPECT_EQ(text(result), "cat: no\nexit 1");
  result.timed_out = true;
  EXPECT_EQ(text(result), "cat: no\n[no end within 10 s]");
  result = {};
  result.exit_code = 0;
  EXPECT_EQ(text(result), "");
  result.output = std::string(200, 'x');
  EXPECT_EQ(text(result, 5), "xxxxx\n[cut at 5 bytes]");
  result.output = "abcd\xC3\xA9xx";
  EXPECT_EQ(text(result, 5), "abcd\n[cut at 5 bytes]");  // not half an e with acute
  result.output = "a\xFF\xE2\x82z";
  EXPECT_EQ(text(result), "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz");
  result.output = "\xED\xA0\x80|\xF0\x9F\x8C\x8A";  // a surrogate is not UTF-8, a wave is
  EXPECT_EQ(text(result), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD|\xF0\x9F\x8C\x8A");
}

TEST(Tool, ArgumentsGoBothWays) {
  EXPECT_EQ(shell_arguments("echo \"a\"\n"), R"({"command":"echo \"a\"\n"})");
}

}  // namespace task_test
}  // namespace tidelock::rl
