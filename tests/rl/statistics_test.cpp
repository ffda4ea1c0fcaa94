#include "rl/statistics.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.hpp"
#include "base/random.hpp"

namespace tidelock::rl {
namespace statistics_test {

// The share of all k-subsets of n samples that hold at least one of the first c.
double pass_by_enumeration(int n, int c, int k) {
  int subsets = 0, passing = 0;
  for (unsigned set = 0; set < (1U << n); ++set) {
    if (std::popcount(set) != k) continue;
    ++subsets;
    if ((set & ((1U << c) - 1U)) != 0) ++passing;
  }
  return static_cast<double>(passing) / subsets;
}

TEST(Statistics, PassAtKEqualsTheShareOfSubsets) {
  for (int n = 1; n <= 10; ++n)
    for (int c = 0; c <= n; ++c)
      for (int k = 1; k <= n; ++k)
        EXPECT_NEAR(pass_at_k(n, c, k), pass_by_enumeration(n, c, k), 1e-12) << n << " " << c << " " << k;
}

TEST(Statistics, PassAtKIsNotTheBiasedPlugIn) {
  // 1 - (1 - c/n)^k is the usual mistake; it must be far enough away for the test above to notice.
  EXPECT_GT(std::abs(pass_at_k(8, 2, 4) - (1 - std::pow(0.75, 4))), 0.05);
}

TEST(Statistics, PassAtKRefusesImpossibleCounts) {
  EXPECT_THROW(pass_at_k(4, 5, 1), Error);
  EXPECT_THROW(pass_at_k(4, 1, 5), Error);
  EXPECT_THROW(pass_at_k(4, 1, 0), Error);
  EXPECT_THROW(pass_at_k(4, -1, 1), Error);
}

// All n^n resamples of n tasks, each once: the distribution that the bootstrap draws from.
std::vector<double> every_resample(const std::vector<double>& values) {
  const std::size_t n = values.size();
  std::size_t count = 1;
  for (std::size_t i = 0; i < n; ++i) count *= n;
  std::vector<double> means;
  for (std::size_t code = 0; code < count; ++code) {
    double sum = 0;
    for (std::size_t i = 0, rest = code; i < n; ++i, rest /= n) sum += values[rest % n];
    means.push_back(sum / static_cast<double>(n));
  }
  std::sort(means.begin(), means.end());
  return means;
}

TEST(Statistics, IntervalMatchesTheFullBootstrapDistribution) {
  const std::vector<double> values{0.0, 0.125, 0.25, 0.875, 1.0};
  const auto means = every_resample(values);
  const auto at = [&](double q) { return means[static_cast<std::size_t>(q * static_cast<double>(means.size()))]; };
  const Estimate estimate = bootstrap_mean(values, {.resamples = 20000, .seed = 3});
  EXPECT_NEAR(estimate.value, 0.45, 1e-12);
  EXPECT_NEAR(estimate.low, at(0.025), 0.03);
  EXPECT_NEAR(estimate.high, at(0.975), 0.03);
}

TEST(Statistics, IntervalCoversTheTruthAsOftenAsItSays) {
  // 200 experiments of 40 tasks whose solve rates are uniform: truth .5. Clustered: 8 samples share their task's rate.
  int covered = 0;
  for (std::uint64_t experiment = 0; experiment < 200; ++experiment) {
    Random random(experiment, 17);
    std::vector<TaskRewards> tasks(40);
    for (auto& task : tasks) {
      const float rate = random.uniform();
      for (int i = 0; i < 8; ++i) task.push_back(random.uniform() < rate ? 1.0 : 0.0);
    }
    const auto result = evaluate_rewards(tasks, 8, 1.0, {.resamples = 400, .seed = experiment});
    if (result.mean_at_k.low <= 0.5 && 0.5 <= result.mean_at_k.high) ++covered;
  }
  // Intervals over single samples (320 "independent" ones) would be too narrow and cover about 75 %.
  EXPECT_GE(covered, 178);
  EXPECT_LE(covered, 199);
}

TEST(Statistics, EvaluationByHand) {
  const std::vector<TaskRewards> tasks{{1, 0, 0, 0}, {0, 0, 0, 0}, {1, 1, 0.5, 1}};
  const auto result = evaluate_rewards(tasks, 2);
  EXPECT_EQ(result.n, 3);
  EXPECT_NEAR(result.mean_at_k.value, (0.25 + 0 + 0.875) / 3, 1e-12);
  EXPECT_NEAR(result.pass_at_k.value, (0.5 + 0 + 1) / 3, 1e-12);  // a reward of .5 does not pass
  EXPECT_THROW(evaluate_rewards(tasks, 5), Error);
  EXPECT_THROW(evaluate_rewards({}, 1), Error);
}

TEST(Statistics, SameSeedSameInterval) {
  const std::vector<double> values{0, 0.5, 1, 0.25, 0.75, 0.1};
  const auto a = bootstrap_mean(values, {.seed = 1}), b = bootstrap_mean(values, {.seed = 1});
  EXPECT_EQ(a.low, b.low);
  EXPECT_EQ(a.high, b.high);
}

TEST(Statistics, PairedDifferenceIsTighterThanTheParts) {
  std::vector<double> before, after;
  Random random(5);
  for (int i = 0; i < 50; ++i) {
    before.push_back(random.uniform());
    after.push_back(before.back() + 0.1);
  }
  const auto difference = paired_difference(before, after);
  EXPECT_NEAR(difference.value, 0.1, 1e-9);
  EXPECT_LT(difference.high - difference.low, 1e-9);
  const auto alone = bootstrap_mean(before);
  EXPECT_GT(alone.high - alone.low, 0.05);
}

}  // namespace statistics_test
}  // namespace tidelock::rl
