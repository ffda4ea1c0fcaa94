#include "rl/advantage.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/error.hpp"

namespace tidelock::rl {
namespace advantage_test {

const std::vector<double> kRewards{1, 0, 0, 0, /**/ 1, 1, 1, 1, /**/ 0.5, 0, 1, 0};
const std::vector<std::int64_t> kGroups{7, 7, 7, 7, 2, 2, 2, 2, 5, 5, 5, 5};
const std::vector<std::uint8_t> kGraded(12, 1);

TEST(Advantage, DrGrpoSubtractsTheMean) {
  const auto a = compute_advantages(kRewards, kGroups, kGraded, {.kind = AdvantageKind::dr_grpo});
  EXPECT_EQ(a.values, (std::vector<float>{.75F, -.25F, -.25F, -.25F, 0, 0, 0, 0, .125F, -.375F, .625F, -.375F}));
  EXPECT_EQ(a.kept, kGraded);
  EXPECT_EQ(a.groups, 3);
  EXPECT_EQ(a.alive, 2);
}

TEST(Advantage, GrpoDividesByTheSampleDeviation) {
  const auto a = compute_advantages(kRewards, kGroups, kGraded, {.kind = AdvantageKind::grpo, .epsilon = 0});
  EXPECT_NEAR(a.values[0], .75 / .5, 1e-6);  // deviation of {1,0,0,0} over n - 1 is .5
  EXPECT_NEAR(a.values[1], -.25 / .5, 1e-6);
  EXPECT_FALSE(std::any_of(a.values.begin(), a.values.end(), [](float x) { return std::isnan(x); }))
      << "0 / 0 in dead groups";
  double squares = 0;
  for (int i = 8; i < 12; ++i) squares += a.values[i] * a.values[i];
  EXPECT_NEAR(squares / 3, 1, 1e-6);
}

TEST(Advantage, DapoFiltersGroupsThatTeachNothing) {
  const auto a = compute_advantages(kRewards, kGroups, kGraded, {.kind = AdvantageKind::dapo});
  EXPECT_EQ(a.kept, (std::vector<std::uint8_t>{1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1}));
  // Equal rewards whose mean rounds are still a dead group.
  const std::vector<double> tenth(3, 0.1);
  const auto b = compute_advantages(tenth, std::vector<std::int64_t>(3, 0), std::vector<std::uint8_t>(3, 1),
                                    {.kind = AdvantageKind::grpo});
  EXPECT_EQ(b.alive, 0);
  EXPECT_EQ(b.values, std::vector<float>(3, 0.0F));
}

TEST(Advantage, FailedTrajectoriesEnterNoMean) {
  std::vector<std::uint8_t> graded = kGraded;
  graded[0] = 0;
  std::vector<double> rewards = kRewards;
  rewards[0] = std::nan("");  // what a failed grading leaves must not matter
  const auto a = compute_advantages(rewards, kGroups, graded, {});
  EXPECT_EQ(a.kept[0], 0);
  EXPECT_EQ(a.values[0], 0);
  EXPECT_EQ(a.values[1], 0);  // the rest of the group is all zeros
  EXPECT_EQ(a.alive, 1);
  graded[0] = 1;
  EXPECT_THROW(compute_advantages(rewards, kGroups, graded, {}), Error);
}

TEST(Advantage, GroupOfOneLearnsNothing) {
  for (const auto kind : {AdvantageKind::grpo, AdvantageKind::dr_grpo}) {
    const auto a = compute_advantages(std::vector<double>{1}, std::vector<std::int64_t>{0},
                                      std::vector<std::uint8_t>{1}, {.kind = kind});
    EXPECT_EQ(a.values, std::vector<float>{0});
  }
}

TEST(Advantage, ShuffledRewardsKeepTheRewardsButNotTheirOwners) {
  std::vector<double> rewards(64);
  std::vector<std::int64_t> groups(64);
  for (std::size_t i = 0; i < 64; ++i) {
    rewards[i] = static_cast<double>(i) / 64;  // all different, so the permutation shows
    groups[i] = 0;
  }
  const std::vector<std::uint8_t> graded(64, 1);
  const AdvantageOptions options{.control = Control::shuffled_rewards, .seed = 9};
  auto straight = compute_advantages(rewards, groups, graded, {}).values;
  auto shuffled = compute_advantages(rewards, groups, graded, options).values;
  EXPECT_EQ(shuffled, compute_advantages(rewards, groups, graded, options).values);
  EXPECT_NE(shuffled, straight);
  const auto fixed = std::inner_product(straight.begin(), straight.end(), shuffled.begin(), 0, std::plus<>{},
                                        [](float a, float b) { return a == b ? 1 : 0; });
  EXPECT_LT(fixed, 8);
  std::sort(straight.begin(), straight.end());
  std::sort(shuffled.begin(), shuffled.end());
  EXPECT_EQ(shuffled, straight);
}

TEST(Advantage, ZeroAdvantageIsZero) {
  const auto a = compute_advantages(kRewards, kGroups, kGraded, {.control = Control::zero_advantage});
  EXPECT_EQ(a.values, std::vector<float>(12, 0.0F));
  EXPECT_EQ(a.alive, 2);  // still reported as it was
}

TEST(Advantage, NamesAreListedWhenUnknown) {
  try {
    parse_advantage("ppo");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("grpo, dr_grpo, dapo"), std::string::npos);
  }
  EXPECT_THROW(parse_control("shuffle"), Error);
  EXPECT_EQ(parse_control("shuffled_rewards"), Control::shuffled_rewards);
}

TEST(Advantage, OverlongPenaltyIsDaposRamp) {
  EXPECT_EQ(overlong_penalty(80, 100, 20), 0);
  EXPECT_EQ(overlong_penalty(85, 100, 20), -0.25);
  EXPECT_EQ(overlong_penalty(100, 100, 20), -1);
  EXPECT_EQ(overlong_penalty(500, 100, 20), -1);
  EXPECT_THROW(overlong_penalty(5, 10, 11), Error);
}

}  // namespace advantage_test
}  // namespace tidelock::rl
