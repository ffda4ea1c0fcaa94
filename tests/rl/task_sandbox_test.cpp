// Tasks in real containers: what demonstrations claim, and what grading accepts.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "rl/task.hpp"
#include "rl/tool.hpp"

namespace tidelock::rl {
namespace task_sandbox_test {

class InSandbox : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { runtime_ = sandbox::make_container_runtime(); }
  static void TearDownTestSuite() { runtime_.reset(); }
  static Episode episode(const std::string& family, std::uint64_t seed) {
    return make_family(family)->make(seed, 2, Split::train);
  }
  static inline std::unique_ptr<sandbox::Runtime> runtime_;
};

TEST_F(InSandbox, DemonstrationsPrintWhatTheSandboxPrints) {
  int commands = 0;
  for (const std::string& name : builtin_families()) {
    const auto family = make_family(name);
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      const Episode one = family->make(seed, 1 + 0.25 * static_cast<double>(seed), Split::train);
      const auto box = open_sandbox(*runtime_, one);
      Random random(seed, 3);
      Skill skill;
      skill.use_tool = 1;
      skill.wrong_command = 0.5;
      for (const DemoTurn& turn : family->demonstrate(one, random, skill)) {
        if (turn.command.empty()) continue;
        EXPECT_EQ(run_shell_tool(*box, one, shell_arguments(turn.command)).text, turn.output) << turn.command;
        ++commands;
      }
    }
  }
  EXPECT_GE(commands, 50);
}

TEST_F(InSandbox, GradesRightAndWrongAnswers) {
  for (const std::string& name : builtin_families()) {
    const Episode one = episode(name, 7);
    const auto box = open_sandbox(*runtime_, one);
    const auto reward = [&](const std::string& answer) {
      const GradeResult result = grade(*box, one, answer);
      EXPECT_TRUE(result.graded) << result.reason;
      return result.reward;
    };
    const std::string right = one.reference_answer;
    EXPECT_EQ(reward(right), 1);
    EXPECT_EQ(reward(" " + right + " \n"), 1);
    EXPECT_EQ(reward("0"), 0);
    EXPECT_EQ(reward(""), 0);
    EXPECT_EQ(reward(right + "\n5"), 0);  // several answers are none
    EXPECT_EQ(reward("5\n" + right), 0);
    EXPECT_EQ(reward(right + "0"), 0);
    EXPECT_EQ(reward("$(echo " + right + ")"), 0);  // an answer is data
    EXPECT_EQ(reward("*"), 0);
  }
}

TEST_F(InSandbox, NothingOfTheVerifierIsThereWhileTheAgentWorks) {
  const Episode one = episode("shell", 3);
  const auto box = open_sandbox(*runtime_, one);
  const auto run = [&](const std::string& command) { return run_shell_tool(*box, one, shell_arguments(command)).text; };
  EXPECT_EQ(run("ls -d /tests /solution /logs 2>/dev/null | wc -l"), "0");
  EXPECT_EQ(run("ls /data | wc -l"), "4");
  grade(*box, one, "1");
  EXPECT_EQ(run("ls /tests"), "test.sh");  // and after: the look above was able to see it
  Episode leaking = one;
  leaking.files.push_back({"/tests/test.sh", "echo"});
  EXPECT_THROW(open_sandbox(*runtime_, leaking), Error);
}

TEST_F(InSandbox, WhatTheAgentLeftDoesNotGradeIt) {
  const Episode one = episode("vault", 4);
  const auto box = open_sandbox(*runtime_, one);
  const auto run = [&](const std::string& command) { return run_shell_tool(*box, one, shell_arguments(command)); };
  // Where the verifier will stand, the agent cannot put anything ...
  EXPECT_NE(run("mkdir /tests").exit_code, 0);
  EXPECT_NE(run("mkdir /logs").exit_code, 0);
  // ... but it can leave a process that waits for the verifier, to write a reward and to read the answer.
  run("setsid sh -c 'while :; do echo 1 >/logs/verifier/reward.json; cp /tests/test.sh /root/stolen; done' "
      ">/dev/null 2>&1 &");
  // Wait until it runs: only then can grading show that it ends it.
  EXPECT_EQ(run("until ps | grep -q '[s]tolen'; do :; done; echo there").text, "there");
  EXPECT_EQ(grade(*box, one, "wrong").reward, 0);
  EXPECT_EQ(run("ls /root/stolen 2>/dev/null").text, "exit 1");
  EXPECT_EQ(run("ps | grep '[s]tolen'").text, "exit 1");
}

TEST_F(InSandbox, GradingAgainStartsClean) {
  const Episode one = episode("vault", 4);
  const auto box = open_sandbox(*runtime_, one);
  EXPECT_EQ(grade(*box, one, one.reference_answer).reward, 1);
  // After a grading /logs and /tests are there and writable: all of it must go before the next.
  run_shell_tool(*box, one,
                 shell_arguments("echo 1 >/logs/verifier/reward.json; rm /tests/test.sh; mkdir /tests/test.sh"));
  const GradeResult result = grade(*box, one, "wrong");
  EXPECT_TRUE(result.graded) << result.reason;
  EXPECT_EQ(result.reward, 0);
}

struct Case {
  const char* script;
  bool graded;
  double reward;
  const char* reason;
};

TEST_F(InSandbox, RewardFiles) {
  const std::string json = "/logs/verifier/reward.json", text = "/logs/verifier/reward.txt";
  const Case cases[] = {
      {"echo 0.5 >$J", true, 0.5, ""},
      {"echo '{\"reward\": 0.25, \"speed\": 12}' >$J", true, 0.25, ""},
      {"echo '{\"passed\": 1}' >$J", true, 1, ""},
      {"echo ' 0.75 ' >$T", true, 0.75, ""},
      {"echo 0.5 >$J; echo 1 >$T", true, 0.5, ""},  // JSON comes first
      {"echo 1 >$T; exit 3", true, 1, ""},          // the reward counts, not the exit code
      {"echo '{\"a\": 1, \"b\": 0}' >$J", false, 0, "none of them is named reward"},
      {"echo '{\"reward\": 1e999}' >$J", false, 0, "reward.json"},
      {"echo '{\"reward\": \"1\"}' >$J", false, 0, "no finite number"},
      {"echo '[1]' >$J", false, 0, "expected a number or an object"},
      {"echo '{' >$J", false, 0, "not valid JSON"},
      {"echo 2 >$T", false, 0, "the reward is 2, expected 0..1"},
      {"echo -0.5 >$T", false, 0, "expected 0..1"},
      {"echo nan >$T", false, 0, "expected 0..1"},
      {"echo yes >$T", false, 0, "found \"yes\", expected a number"},
      {"echo oh no; exit 4", false, 0, "exit code 4 and left no reward in /logs/verifier: oh no"},
      {"while :; do :; done", false, 0, "did not end within 300 ms"},
  };
  Episode one = episode("calc", 1);
  const auto box = open_sandbox(*runtime_, one);
  for (const Case& c : cases) {
    one.verifier = {};
    one.verifier.files = {{"/tests/test.sh", fmt::format("J={} T={}\n{}\n", json, text, c.script)}};
    one.verifier.command = {"sh", "/tests/test.sh"};
    const bool endless = std::string_view(c.script).starts_with("while");
    one.verifier.timeout = std::chrono::milliseconds(endless ? 300 : 30'000);
    const GradeResult result = grade(*box, one, "answer");
    EXPECT_EQ(result.graded, c.graded) << c.script << ": " << result.reason;
    EXPECT_EQ(result.reward, c.reward) << c.script;
    EXPECT_NE(result.reason.find(c.reason), std::string::npos) << c.script << ": " << result.reason;
  }
}

TEST_F(InSandbox, BadCallsRunNothing) {
  const Episode one = episode("calc", 1);
  const auto box = open_sandbox(*runtime_, one);
  for (const char* arguments : {"", "{", "[]", "{}", R"({"command": 5})", R"({"command": "touch /x", "cwd": "/"})",
                                R"({"command": "touch /x\u0000"})", R"({"cmd": "touch /x"})"}) {
    const ToolResult result = run_shell_tool(*box, one, arguments);
    EXPECT_TRUE(result.malformed) << arguments;
    EXPECT_EQ(result.text.find("bad call: "), 0U);
  }
  EXPECT_EQ(run_shell_tool(*box, one, shell_arguments("ls /x")).exit_code, 1);
}

TEST_F(InSandbox, ToolLimits) {
  Episode one = episode("calc", 1);
  const auto box = open_sandbox(*runtime_, one);
  const auto run = [&](const std::string& command) { return run_shell_tool(*box, one, shell_arguments(command), 16); };
  const auto usual = one.command_timeout;
  one.command_timeout = std::chrono::milliseconds(300);
  const ToolResult endless = run("sleep 1000");
  EXPECT_EQ(endless.text, "[no end within 0.3 s]");
  EXPECT_TRUE(endless.timed_out);
  one.command_timeout = usual;
  EXPECT_EQ(run("yes | head -c 1000000").text, "y\ny\ny\ny\ny\ny\ny\ny\n[cut at 16 bytes]");
  EXPECT_EQ(run("echo out; echo err >&2; exit 3").text, "out\nerr\nexit 3");
  EXPECT_EQ(run("pwd").text, "/root");
}

}  // namespace task_sandbox_test
}  // namespace tidelock::rl
