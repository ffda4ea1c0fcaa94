// Partial rollouts. What must never break: with equal weights a trajectory that was cut anywhere says what an uncut one
// says; every token is compared under the weights that sampled it; what is set aside is neither lost nor handed out
// half done.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <tuple>

#include "model/expect_refused.hpp"
#include "rl/learner.hpp"
#include "rl/rollout.hpp"
#include "rl/support.hpp"
#include "rl/unfinished.hpp"

namespace tidelock::rl {
namespace partial_test {

namespace fs = std::filesystem;
using testing::nano_model;
using testing::nano_tokenizer;

constexpr std::int64_t kMembers = 4;

RolloutOptions options() {
  RolloutOptions o;
  o.max_tokens = 96;
  return o;
}

std::vector<RolloutGroup> groups(std::int64_t step = 1, std::int64_t count = 3) {
  static const Settings settings = testing::recipe();
  return draw_groups(rl_tasks(settings), Split::train, 5, step, count, kMembers);
}

// By episode and member, without times and without the number in the batch.
std::vector<Trajectory> comparable(std::vector<Trajectory> batch) {
  batch = testing::without_times(std::move(batch));
  for (Trajectory& t : batch) t.group = 0;
  std::sort(batch.begin(), batch.end(),
            [](const auto& a, const auto& b) { return std::tie(a.task_id, a.member) < std::tie(b.task_id, b.member); });
  return batch;
}

void append(std::vector<Trajectory>& all, RolloutResult& result) {
  ASSERT_FALSE(result.groups.empty());
  ASSERT_EQ(std::ssize(result.trajectories), std::ssize(result.groups) * kMembers) << "a group that is not whole";
  for (std::size_t i = 0; i < result.trajectories.size(); ++i) {
    Trajectory& t = result.trajectories[i];
    t.check();
    EXPECT_EQ(t.group, static_cast<std::int64_t>(i) / kMembers);
    EXPECT_EQ(t.task_id, result.groups[static_cast<std::size_t>(t.group)]->episode.id);
    all.push_back(std::move(t));
  }
}

class PartialTest : public ::testing::Test {
 protected:
  Team team{2};
  std::unique_ptr<sandbox::Runtime> runtime = sandbox::make_container_runtime();
  std::unique_ptr<Rollout> make(const RolloutOptions& o = options()) {
    return std::make_unique<Rollout>(nano_model(), nano_tokenizer(), *runtime, team, o);
  }
  static std::shared_ptr<const model::Adapter> policy(std::uint64_t seed) {
    train::LoraParameters parameters(nano_model(), 2, 4, {"all-linear"});
    parameters.initialize(seed);
    Random random(seed, 1);
    for (float& value : parameters.values()) value += 0.01F * random.normal();
    return model::make_adapter(nano_model(), parameters.adapter_values());
  }
  std::vector<Trajectory> uncut() { return comparable(make()->run(groups(), nullptr, 7).trajectories); }

  // Iterations of `tokens` each until nothing is left; every one in a process of its own, as it were, if `restored`.
  std::vector<Trajectory> in_pieces(std::int64_t tokens, bool restored = false, const RolloutOptions& o = options()) {
    auto rollout = make(o);
    std::vector<Trajectory> all;
    auto fresh = groups();
    do {
      auto result = rollout->run_iteration(std::move(fresh), nullptr, 7, {tokens});
      fresh.clear();
      append(all, result);
      set_aside += result.stats.set_aside;
      continued += result.stats.continued;
      if (restored) {
        auto left = rollout->unfinished();
        rollout = make(o);
        rollout->restore(std::move(left));
      }
    } while (!rollout->unfinished().empty());
    return comparable(std::move(all));
  }
  std::int64_t set_aside = 0, continued = 0;
};

TEST_F(PartialTest, CutAnywhereSaysTheSame) {
  const auto expected = uncut();
  EXPECT_TRUE(std::any_of(expected.begin(), expected.end(), [](const auto& t) { return t.tool_calls > 0; }));
  for (const std::int64_t tokens : {1, 7, 24, 60}) {
    EXPECT_EQ(in_pieces(tokens), expected) << tokens;
    EXPECT_GT(continued, 0) << tokens;
    continued = 0;
  }
  EXPECT_GT(set_aside, 0);
  RolloutOptions narrow = options();
  narrow.concurrent = 1;
  narrow.freeze = false;
  EXPECT_EQ(in_pieces(24, false, narrow), expected);
}

TEST_F(PartialTest, WhatIsRestoredGoesOnAsIfNothingHadHappened) {
  EXPECT_EQ(in_pieces(24, true), uncut());
  EXPECT_GT(set_aside, 0);
}

TEST_F(PartialTest, RunsBetweenIterationsTouchNothing) {
  const auto expected = uncut();
  auto rollout = make();
  std::vector<Trajectory> all;
  auto first = rollout->run_iteration(groups(), nullptr, 7, {24});
  append(all, first);
  const auto left = rollout->unfinished().size();
  ASSERT_GT(left, 0U);
  EXPECT_EQ(comparable(rollout->run(groups(), nullptr, 8).trajectories).size(), expected.size());
  EXPECT_EQ(rollout->unfinished().size(), left);
  auto rest = rollout->run_iteration({}, nullptr, 7, {0});
  append(all, rest);
  EXPECT_EQ(comparable(std::move(all)), expected);
  EXPECT_THROW(rollout->run_iteration({}, nullptr, 7, {-1}), Error);
}

TEST_F(PartialTest, ASandboxThatCannotBeOpenedFailsWhatWasSetAside) {
  for (const bool at_once : {true, false}) {
    testing::ScriptedRuntime works({}), broken({.fail_create = "no room for it"});
    Rollout first(nano_model(), nano_tokenizer(), works, team, options());
    Rollout rollout(nano_model(), nano_tokenizer(), broken, team, options());
    std::vector<Trajectory> all;
    if (at_once) {
      auto result = rollout.run_iteration(groups(), nullptr, 7, {1});
      append(all, result);
      ASSERT_EQ(all.size(), 12U);
    } else {
      auto result = first.run_iteration(groups(), nullptr, 7, {24});
      append(all, result);
      all.clear();
      rollout.restore(first.unfinished());
      auto rest = rollout.run_iteration({}, nullptr, 7, {24});
      append(all, rest);
    }
    EXPECT_TRUE(rollout.unfinished().empty());
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const auto& t) { return t.status == Status::failed; }));
  }
}

// ---- weights that change between iterations

class TwoWeights : public PartialTest {
 protected:
  const std::shared_ptr<const model::Adapter> one = policy(1), two = policy(2);
  std::vector<Trajectory> batch;

  void SetUp() override {
    auto rollout = make();
    auto first = rollout->run_iteration(groups(), one, 1, {24});
    append(batch, first);
    auto rest = rollout->run_iteration(groups(2), two, 2, {0});
    append(batch, rest);
  }
  Update learn(const Policies& policies) {
    const Settings settings = testing::recipe({"rollout.max_tokens=96"});
    Learner learner(nano_model(), team, settings);
    learner.parameters().initialize(1);
    for (std::size_t i = 0; i < batch.size(); ++i) {  // noise earns nothing by itself
      batch[i].status = Status::completed;
      batch[i].reward = static_cast<double>(i % 3) / 2;
      batch[i].group = static_cast<std::int64_t>(i) / kMembers;
    }
    return learner.update(batch, learner.advantages(batch, 1), policies);
  }
};

TEST_F(TwoWeights, EveryTokenIsComparedUnderItsOwn) {
  std::int64_t sampled = 0, mixed = 0;
  Trajectory* both = nullptr;
  for (Trajectory& t : batch) {
    sampled += std::ssize(t.logprobs);
    if (versions_of(t).size() < 2) continue;
    ++mixed;
    both = &t;
  }
  ASSERT_GT(mixed, 0);
  const Update update = learn({{1, one}, {2, two}});
  EXPECT_EQ(update.compared.compared, sampled);
  EXPECT_EQ(update.compared.mismatched, 0) << update.compared.first;
  EXPECT_GT(update.older_tokens, 0);
  EXPECT_LT(update.older_tokens, sampled);
  // Sabotage: a bit of the first token, which is of the older weights; the weights exchanged; weights that are gone.
  float& logprob = both->logprobs.front();
  logprob = std::bit_cast<float>(std::bit_cast<std::uint32_t>(logprob) ^ 1U);
  EXPECT_EQ(learn({{1, one}, {2, two}}).compared.mismatched, 1);
  EXPECT_GT(learn({{1, two}, {2, one}}).compared.mismatched, sampled / 10);
  EXPECT_THROW(learn({{2, two}}), Error);
}

TEST_F(TwoWeights, OnlyWhatIsNeededIsKept) {
  const Policies all{{1, one}, {2, two}, {3, one}};
  Policies none = all, some = all;
  forget_unused(none, {});
  EXPECT_EQ(none.size(), 1U);
  EXPECT_TRUE(none.contains(3));
  auto rollout = make();
  rollout->run_iteration(groups(), one, 1, {24});
  forget_unused(some, rollout->unfinished());
  EXPECT_TRUE(some.contains(1) && some.contains(3) && !some.contains(2));
}

// ---- on disk

class UnfinishedFiles : public PartialTest {
 protected:
  testing::Folder folder;
  Unfinished saved;
  void SetUp() override {
    auto rollout = make();
    const auto sampler = policy(3);
    rollout->run_iteration(groups(), sampler, 1, {24});
    saved = {rollout->unfinished(), {{1, sampler}}};
    ASSERT_FALSE(saved.groups.empty());
    save_unfinished(folder.path(), saved, nano_model(), {"run", "model", "0.1"});
  }
  Unfinished load(std::int64_t shift = 0) {
    return load_unfinished(folder.path(), nano_model(), [&](std::int64_t step) { return groups(step + shift); });
  }
  void expect_refused(ErrorCode code, const std::string& part, std::int64_t shift = 0) {
    model::testing::expect_refused(code, part, [&] { load(shift); });
  }
};

TEST_F(UnfinishedFiles, GiveBackWhatWasSaved) {
  const Unfinished loaded = load();
  ASSERT_EQ(loaded.groups.size(), saved.groups.size());
  for (std::size_t g = 0; g < saved.groups.size(); ++g) {
    EXPECT_EQ(loaded.groups[g].group->seeds, saved.groups[g].group->seeds);
    ASSERT_EQ(loaded.groups[g].members.size(), saved.groups[g].members.size());
    for (std::size_t m = 0; m < saved.groups[g].members.size(); ++m) {
      const UnfinishedMember &a = loaded.groups[g].members[m], &b = saved.groups[g].members[m];
      EXPECT_EQ(a.trajectory, b.trajectory);
      EXPECT_EQ(a.finished, b.finished);
      EXPECT_EQ(a.agent_s, b.agent_s);
    }
  }
  ASSERT_EQ(loaded.policies.size(), 1U);
  EXPECT_EQ(loaded.policies.at(1)->sha256(), saved.policies.at(1)->sha256());
  const testing::Folder other;
  save_unfinished(other.path(), {}, nano_model(), {});
  EXPECT_TRUE(fs::is_empty(other.path()));
  EXPECT_TRUE(load_unfinished(other.path(), nano_model(), nullptr).groups.empty());
}

TEST_F(UnfinishedFiles, DamageIsNamed) {
  expect_refused(ErrorCode::mismatch, "have the tasks changed", 1);
  const std::string lines = read_file(folder.path() / "unfinished.jsonl"),
                    json = read_file(folder.path() / "unfinished.json");
  write_file_atomic(folder.path() / "unfinished.jsonl", lines.substr(0, lines.rfind('\n', lines.size() - 2) + 1));
  expect_refused(ErrorCode::corrupt_data, "more members");
  write_file_atomic(folder.path() / "unfinished.jsonl", lines + lines.substr(0, lines.find('\n') + 1));
  expect_refused(ErrorCode::corrupt_data, "fewer members");
  write_file_atomic(folder.path() / "unfinished.jsonl", lines.substr(0, lines.size() / 2));
  expect_refused(ErrorCode::corrupt_data, "unfinished.jsonl:");
  write_file_atomic(folder.path() / "unfinished.jsonl", lines);
  write_file_atomic(folder.path() / "unfinished.json", json.substr(0, json.size() / 2));
  expect_refused(ErrorCode::corrupt_data, "unfinished.json");
  write_file_atomic(folder.path() / "unfinished.json", R"({"format": 1})");
  expect_refused(ErrorCode::corrupt_data, "unfinished.json");
  write_file_atomic(folder.path() / "unfinished.json", json);
  EXPECT_EQ(load().groups.size(), saved.groups.size());
}

}  // namespace partial_test
}  // namespace tidelock::rl
