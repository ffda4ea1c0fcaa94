// The learner: the comparison by bits that every step makes, and what an update does.
#include "rl/learner.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <numeric>

#include "rl/support.hpp"

namespace tidelock::rl {
namespace learner_test {

using testing::random_model;

Trajectory with_logprobs(std::vector<float> logprobs) {
  Trajectory t;
  t.task_id = "calc-5";
  t.group = 2;
  t.member = 3;
  t.append_prompt(std::vector<std::int32_t>{1, 2});
  t.append_sampled(std::vector<std::int32_t>(logprobs.size(), 9), logprobs, 1);
  return t;
}

TEST(CompareBits, CountsEveryTokenAndFindsOneBit) {
  const std::vector<float> logprobs{-0.5F, -0.0F, -1.25F};
  const Trajectory t = with_logprobs(logprobs);
  Comparison c;
  compare_bits(t, 1, logprobs, c);
  EXPECT_EQ(c.compared, 3);
  EXPECT_EQ(c.mismatched, 0);
  for (std::size_t token = 0; token < logprobs.size(); ++token)
    for (int bit = 0; bit < 32; ++bit) {
      std::vector<float> trainer = logprobs;
      trainer[token] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(trainer[token]) ^ (1U << bit));
      Comparison flipped;
      compare_bits(t, 1, trainer, flipped);
      EXPECT_EQ(flipped.compared, 3);
      EXPECT_EQ(flipped.mismatched, 1) << "token " << token << ", bit " << bit;
      EXPECT_NE(flipped.first.find("trajectory 2/3 of calc-5, sampled token " + std::to_string(token)),
                std::string::npos);
    }
}

TEST(CompareBits, AddsUpAndKeepsTheLargest) {
  const Trajectory t = with_logprobs({-1, -2});
  Comparison c;
  compare_bits(t, 1, std::vector<float>{-1, -2.5F}, c);
  compare_bits(t, 1, std::vector<float>{-1.25F, -2}, c);
  EXPECT_EQ(c.compared, 4);
  EXPECT_EQ(c.mismatched, 2);
  EXPECT_EQ(c.max_abs, 0.5);
  EXPECT_THROW(compare_bits(t, 1, std::vector<float>{-1}, c), Error);
}

ErrorCode verdict(const Comparison& c, bool report_only) {
  try {
    check_comparison(c, 4, report_only);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("step 4"), std::string::npos);
    return error.code();
  }
  return ErrorCode::internal;  // accepted
}

TEST(CompareBits, NothingComparedIsAMismatch) {
  EXPECT_EQ(verdict({.compared = 0}, false), ErrorCode::mismatch);
  EXPECT_EQ(verdict({.compared = 0}, true), ErrorCode::mismatch);
  EXPECT_EQ(verdict({.compared = 5, .mismatched = 1}, false), ErrorCode::mismatch);
  EXPECT_EQ(verdict({.compared = 5, .mismatched = 1}, true), ErrorCode::internal);
  EXPECT_EQ(verdict({.compared = 5}, false), ErrorCode::internal);
}

TEST(HandOver, OneBitBetweenTrainerAndRolloutIsFound) {
  const Settings settings = testing::recipe();
  Learner learner(random_model(), solo_team(), settings);
  learner.parameters().initialize(1);
  model::AdapterValues sent = learner.adapter_values();
  const auto received = model::make_adapter(random_model(), sent);
  EXPECT_EQ(check_hand_over(sent, *received, 7), sent.sha256(random_model()));
  const auto refused = [&] {
    try {
      check_hand_over(sent, *received, 7);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("weight version 7"), std::string::npos) << error.what();
      return error.code() == ErrorCode::mismatch;
    }
    return false;
  };
  // In what the kernels read, and in what the trainer holds.
  const auto& part = *received->parts(sent.pairs.front().id);
  auto* packed = const_cast<std::byte*>(part.down.data());
  *packed ^= std::byte{1};
  EXPECT_TRUE(refused());
  *packed ^= std::byte{1};
  EXPECT_FALSE(refused());
  sent.pairs.back().a.back() += 1;
  EXPECT_TRUE(refused());
}

// A step's batch from a model that says noise, with rewards that differ.
class LearnerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    testing::ScriptedRuntime runtime({});
    Team team(2);
    const Settings settings = testing::recipe({"rollout.max_tokens=24"});
    Rollout rollout(random_model(), testing::nano_tokenizer(), runtime, team, rollout_options(settings));
    batch_ = rollout.run(draw_groups(rl_tasks(settings), Split::train, 3, 1, 3, 6), nullptr, 0).trajectories;
    // Noise earns nothing by itself: rewards are given here, so that groups have something to teach.
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      batch_[i].status = Status::completed;
      batch_[i].reward = static_cast<double>(i % 3) / 2;
    }
  }
  static void TearDownTestSuite() { batch_.clear(); }

  struct Outcome {
    Update update;
    std::vector<float> values;
  };
  static Outcome learn(const std::vector<Trajectory>& batch, const std::vector<std::string>& overrides = {},
                       int threads = 2) {
    Team team(threads);
    std::vector<std::string> all{"rollout.max_tokens=24", "rl.micro_batch_tokens=512"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    const Settings settings = testing::recipe(all);
    Learner learner(random_model(), team, settings);
    learner.parameters().initialize(1);
    const std::shared_ptr<const model::Adapter> adapter = model::make_adapter(random_model(), learner.adapter_values());
    Outcome out;
    out.update = learner.update(batch, learner.advantages(batch, 1), {{0, adapter}});
    out.values.assign(learner.parameters().values().begin(), learner.parameters().values().end());
    return out;
  }
  static std::vector<float> fresh() {
    Learner learner(random_model(), solo_team(), settings_());
    learner.parameters().initialize(1);
    return {learner.parameters().values().begin(), learner.parameters().values().end()};
  }
  static const Settings& settings_() {
    static const Settings settings = testing::recipe();
    return settings;
  }
  static std::int64_t sampled(const std::vector<Trajectory>& batch) {
    return std::accumulate(batch.begin(), batch.end(), std::int64_t{0}, [](std::int64_t n, const Trajectory& t) {
      return n + static_cast<std::int64_t>(t.logprobs.size());
    });
  }

  static inline std::vector<Trajectory> batch_;
};

TEST_F(LearnerTest, ComparesEverySampledTokenByBits) {
  const Outcome one = learn(batch_);
  EXPECT_GT(sampled(batch_), 100);
  EXPECT_EQ(one.update.compared.compared, sampled(batch_));
  EXPECT_EQ(one.update.compared.mismatched, 0) << one.update.compared.first;
  EXPECT_GT(one.update.grad_norm, 0);
  EXPECT_NE(one.values, fresh());
}

TEST_F(LearnerTest, OneBitOfTheRolloutIsFound) {
  for (const std::size_t at : {std::size_t{0}, batch_.size() - 1}) {
    auto batch = batch_;
    float& logprob = batch[at].logprobs.back();
    logprob = std::bit_cast<float>(std::bit_cast<std::uint32_t>(logprob) ^ 1U);
    EXPECT_EQ(learn(batch).update.compared.mismatched, 1);
    // Trajectories that teach nothing are scored, and compared, too.
    EXPECT_EQ(learn(batch, {"rl.control=zero_advantage"}).update.compared.mismatched, 1);
  }
}

TEST_F(LearnerTest, AnotherTokenInTheContextIsFound) {
  auto batch = batch_;
  batch[2].tokens[3] = batch[2].tokens[3] == 40 ? 41 : 40;
  EXPECT_GT(learn(batch).update.compared.mismatched, 0);
}

TEST_F(LearnerTest, WithoutAdvantageNothingMovesAndAllIsCompared) {
  const Outcome zero = learn(batch_, {"rl.control=zero_advantage"});
  EXPECT_EQ(zero.update.compared.compared, sampled(batch_));
  EXPECT_EQ(zero.update.compared.mismatched, 0);
  EXPECT_EQ(zero.values, fresh());
}

TEST_F(LearnerTest, NothingSampledComparesNothing) {
  std::vector<Trajectory> empty(2);
  for (auto& t : empty) {
    t.append_prompt(std::vector<std::int32_t>{1, 2, 3});
    t.status = Status::failed;
  }
  EXPECT_EQ(learn(empty).update.compared.compared, 0);
}

TEST_F(LearnerTest, FailedTrajectoriesTeachNothing) {
  auto batch = batch_;
  batch[1].status = Status::failed;
  batch[1].reward = 0;
  const auto with = learn(batch);
  EXPECT_EQ(with.update.compared.compared, sampled(batch));
  batch.erase(batch.begin() + 1);
  EXPECT_EQ(learn(batch).values, with.values);
  EXPECT_NE(learn(batch_).values, with.values);
}

TEST_F(LearnerTest, ThreadsAndRecomputationChangeNoBit) {
  const auto expected = learn(batch_);
  EXPECT_EQ(learn(batch_, {}, 1).values, expected.values);
  EXPECT_EQ(learn(batch_, {"rl.recompute=true"}).values, expected.values);
  EXPECT_NE(learn(batch_, {"rl.learning_rate=1e-4"}).values, expected.values);
}

TEST_F(LearnerTest, EpochsAndKlAndLossesChangeTheUpdate) {
  const auto one = learn(batch_);
  std::vector<std::vector<float>> all{one.values};
  for (const char* setting : {"rl.epochs=2", "rl.loss=grpo", "rl.loss=dapo"}) {
    const auto other = learn(batch_, {setting});
    EXPECT_EQ(other.update.compared.compared, sampled(batch_)) << setting;  // each token once, whatever the epochs
    EXPECT_EQ(other.update.compared.mismatched, 0) << setting;
    for (const auto& values : all) EXPECT_NE(other.values, values) << setting;
    all.push_back(other.values);
  }
  // A fresh adapter is the identity: no divergence from the base in the first epoch, some in the second.
  EXPECT_EQ(learn(batch_, {"rl.kl_coefficient=0.1"}).update.kl, 0);
  EXPECT_GT(learn(batch_, {"rl.kl_coefficient=0.1", "rl.epochs=2"}).update.kl, 0);
}

TEST_F(LearnerTest, WhatWasRewardedBecomesMoreLikely) {
  std::vector<Trajectory> pair{batch_[0], batch_[1]};
  pair[0].reward = 1;
  pair[1].reward = 0;
  const auto mean_logprobs = [&](const std::vector<float>& values) {
    Learner learner(random_model(), solo_team(), settings_());
    std::copy(values.begin(), values.end(), learner.parameters().values().begin());
    const auto adapter = model::make_adapter(random_model(), learner.adapter_values());
    train::GradientWorker worker(random_model(), solo_team());
    std::vector<train::TrainSequence> sequences;
    for (const auto& t : pair) sequences.push_back({t.tokens, t.mask, adapter.get()});
    std::vector<double> sums;
    for (const auto& logprobs : worker.score(sequences, {}))
      sums.push_back(std::accumulate(logprobs.begin(), logprobs.end(), 0.0));
    return sums;
  };
  const auto before = mean_logprobs(fresh()), after = mean_logprobs(learn(pair, {"rl.learning_rate=1e-3"}).values);
  EXPECT_GT(after[0] - after[1], before[0] - before[1]);
}

}  // namespace learner_test
}  // namespace tidelock::rl
