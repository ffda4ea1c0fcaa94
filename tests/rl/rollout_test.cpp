// Rollouts: what trajectories hold, whatever the model says and the sandboxes do.
#include "rl/rollout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "model/toolcall.hpp"
#include "rl/conversation.hpp"
#include "rl/support.hpp"

namespace tidelock::rl {
namespace rollout_test {

using testing::nano_model;
using testing::nano_tokenizer;
using testing::random_model;
using testing::without_times;

RolloutOptions options(std::int64_t max_tokens = 24) {
  RolloutOptions o;
  o.max_tokens = max_tokens;
  o.concurrent = 64;
  return o;
}

std::vector<RolloutGroup> groups(std::int64_t count, std::int64_t members, std::uint64_t seed = 5) {
  const Settings settings = testing::recipe();
  return draw_groups(rl_tasks(settings), Split::train, seed, 1, count, members);
}

std::vector<Trajectory> roll(const model::Model& model, sandbox::Runtime& runtime, const RolloutOptions& o,
                             const std::vector<RolloutGroup>& batch, int threads = 2) {
  Team team(threads);
  Rollout rollout(model, nano_tokenizer(), runtime, team, o);
  auto result = rollout.run(batch, nullptr, 7);
  EXPECT_EQ(result.trajectories.size(), batch.size() * batch.front().seeds.size());
  for (const Trajectory& t : result.trajectories) t.check();
  return std::move(result.trajectories);
}

int count(const std::vector<Trajectory>& batch, Status status) {
  return static_cast<int>(
      std::count_if(batch.begin(), batch.end(), [&](const Trajectory& t) { return t.status == status; }));
}

TEST(Rollout, NoiseIsMalformedOrTruncatedAndKeepsItsRecord) {
  const auto runtime = sandbox::make_container_runtime();
  const auto batch = groups(4, 8);
  const auto trajectories = roll(random_model(), *runtime, options(), batch);
  EXPECT_GT(count(trajectories, Status::malformed), 0);
  EXPECT_GT(count(trajectories, Status::truncated), 0);
  EXPECT_EQ(count(trajectories, Status::failed), 0);
  for (std::size_t i = 0; i < trajectories.size(); ++i) {
    const Trajectory& t = trajectories[i];
    const RolloutGroup& group = batch[i / 8];
    EXPECT_EQ(t.group, group.group);
    EXPECT_EQ(t.member, static_cast<std::int64_t>(i % 8));
    EXPECT_EQ(t.seed, group.seeds[i % 8]);
    EXPECT_EQ(t.task_id, group.episode.id);
    const auto prompt = episode_prompt(nano_tokenizer(), group.episode, false);
    ASSERT_GE(t.tokens.size(), prompt.size());
    EXPECT_TRUE(std::equal(prompt.begin(), prompt.end(), t.tokens.begin()));
    EXPECT_LE(t.logprobs.size(), 24U);
    EXPECT_GT(t.logprobs.size(), 0U);
    EXPECT_EQ(t.spans.back().weight_version, 7U);
    EXPECT_TRUE(t.status != Status::truncated || t.logprobs.size() == 24U);
    if (t.status != Status::malformed) continue;
    EXPECT_EQ(t.reward, 0);
    EXPECT_NE(t.failure, "");
  }
}

TEST(Rollout, TrajectoriesDoNotDependOnHowTheyAreRun) {
  const auto runtime = sandbox::make_container_runtime();
  const auto batch = groups(3, 4);
  const auto expected = without_times(roll(nano_model(), *runtime, options(96), batch));
  RolloutOptions narrow = options(96);
  narrow.concurrent = 1;
  narrow.hands = 1;
  narrow.freeze = false;
  EXPECT_EQ(without_times(roll(nano_model(), *runtime, narrow, batch, 1)), expected);
  auto other = batch;
  other[1].seeds[2] ^= 1;
  const auto changed = without_times(roll(nano_model(), *runtime, options(96), other));
  for (std::size_t i = 0; i < changed.size(); ++i) EXPECT_EQ(changed[i] == expected[i], i != 6) << i;
}

TEST(Rollout, CallsAreActedOutAndWhatComesBackIsTheToolsText) {
  const auto runtime = sandbox::make_container_runtime();
  const auto trajectories = roll(nano_model(), *runtime, options(192), groups(6, 8));
  int calls = 0, rewarded = 0;
  for (const Trajectory& t : trajectories) {
    rewarded += t.reward == 1 ? 1 : 0;
    std::size_t turn = 0;
    for (std::size_t s = 0; s < t.spans.size(); ++s) {
      const Span& span = t.spans[s];
      const std::span<const std::int32_t> tokens(t.tokens.data() + span.begin, t.tokens.data() + span.end);
      if (span.source == Source::tool) {
        const Turn& before = t.turns.at(turn - 1);
        std::vector<model::Message> messages;
        std::vector<model::ToolCall> made;
        for (const ToolUse& use : before.calls) {
          messages.push_back({.role = "tool", .content = use.output, .tool_call_id = use.id, .name = use.name});
          made.push_back({use.id, use.name, use.arguments});
        }
        const auto shown = model::render_tool_results(nano_tokenizer(), messages, agent_chat(false), true, made);
        EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), shown.begin(), shown.end())) << t.task_id;
      } else if (span.source == Source::sampled) {
        const auto said = model::parse_assistant(nano_tokenizer(), tokens, false);
        EXPECT_EQ(said.content, t.turns.at(turn).text);
        for (std::size_t i = 0; i < t.turns[turn].calls.size(); ++i) {
          EXPECT_EQ(said.calls.at(i).arguments_json, t.turns[turn].calls[i].arguments);
          ++calls;
        }
        ++turn;
      }
    }
  }
  EXPECT_GT(calls, 10);
  EXPECT_GT(rewarded, 0);
  EXPECT_LT(rewarded, 48);
}

TEST(Rollout, WithoutTheToolEveryCallSaysSo) {
  testing::ScriptedRuntime runtime({.output = "never shown"});
  RolloutOptions o = options(128);
  o.tool_enabled = false;
  int calls = 0;
  for (const Trajectory& t : roll(nano_model(), runtime, o, groups(4, 8)))
    for (const Turn& turn : t.turns)
      for (const ToolUse& call : turn.calls) {
        EXPECT_EQ(call.output, "tool disabled");
        ++calls;
      }
  EXPECT_GT(calls, 5);
}

TEST(Rollout, ACallInTheLastTurnIsNotRun) {
  testing::ScriptedRuntime runtime({.output = "never shown"});
  RolloutOptions o = options(128);
  o.max_turns = 1;
  int truncated = 0;
  for (const Trajectory& t : roll(nano_model(), runtime, o, groups(4, 8))) {
    EXPECT_EQ(t.turns.size(), 1U);
    EXPECT_EQ(t.tool_calls, 0);
    EXPECT_EQ(t.spans.size(), 2U);
    truncated += t.status == Status::truncated ? 1 : 0;
  }
  EXPECT_GT(truncated, 5);
}

TEST(Rollout, AFailingSandboxFailsItsTrajectoriesAndNotTheRun) {
  for (const auto& [script, says] :
       {std::pair{testing::Script{.fail_create = "no room for it"}, "no room for it"},
        std::pair{testing::Script{.fail_exec = "the guest is gone"}, "the guest is gone"},
        std::pair{testing::Script{.reward = [](const std::string&) { return "2"; }}, "expected 0..1"}}) {
    testing::ScriptedRuntime runtime(script);
    const auto trajectories = roll(nano_model(), runtime, options(96), groups(3, 4));
    EXPECT_GT(count(trajectories, Status::failed), 0) << says;
    for (const Trajectory& t : trajectories) {
      if (t.status != Status::failed) continue;
      EXPECT_EQ(t.reward, 0);
      EXPECT_NE(t.failure.find(says), std::string::npos) << t.failure;
    }
    EXPECT_EQ(count(trajectories, Status::failed) + count(trajectories, Status::malformed), 12) << says;
  }
}

TEST(Rollout, GroupsAreAFunctionOfSeedAndStep) {
  const Settings settings = testing::recipe();
  const TaskMixture tasks = rl_tasks(settings);
  const auto keys = [&](Split split, std::uint64_t seed, std::int64_t step) {
    std::vector<std::string> out;
    for (const auto& group : draw_groups(tasks, split, seed, step, 40, 3)) {
      out.push_back(group.episode.key);
      for (const auto member : group.seeds) out.push_back(std::to_string(member));
      EXPECT_EQ(std::set(group.seeds.begin(), group.seeds.end()).size(), 3U);
      EXPECT_EQ(split_of(group.episode.key), split);
    }
    return out;
  };
  const auto first = keys(Split::train, 1, 1);
  EXPECT_EQ(keys(Split::train, 1, 1), first);
  EXPECT_NE(keys(Split::train, 1, 2), first);
  EXPECT_NE(keys(Split::train, 2, 1), first);
  std::set<std::string> seen;
  for (std::int64_t step = 1; step < 20; ++step)
    for (const auto& group : draw_groups(tasks, Split::train, 1, step, 40, 1)) seen.insert(group.episode.key);
  for (const auto& group : draw_groups(tasks, Split::held_out, 1, 0, 200, 1))
    EXPECT_FALSE(seen.contains(group.episode.key)) << group.episode.key;
}

}  // namespace rollout_test
}  // namespace tidelock::rl
