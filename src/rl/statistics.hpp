// Estimates over tasks with several samples each, and how sure they are.
//
// mean@k is the mean reward of the samples; pass@k the chance that at least one of k samples solves the task, by the
// unbiased estimator 1 - C(n-c, k) / C(n, k) (Chen et al., 2021). Intervals come from a cluster bootstrap: whole tasks
// are drawn again, since samples of one task are not independent.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tidelock::rl {

// n samples of which c are right, 0 <= c <= n, 1 <= k <= n. Throws Error{invalid_argument} otherwise.
double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k);

struct Estimate {
  double value = 0;
  double low = 0, high = 0;  // 95 % interval
};

// The rewards of one task's samples.
using TaskRewards = std::vector<double>;

struct BootstrapOptions {
  int resamples = 2000;
  double confidence = 0.95;
  std::uint64_t seed = 0;
};

// The mean over tasks of a number per task, with a percentile interval over resampled tasks. Deterministic in the seed.
Estimate bootstrap_mean(std::span<const double> per_task, const BootstrapOptions& options = {});

struct Evaluation {
  int k = 0;           // of mean@k and pass@k
  std::int64_t n = 0;  // tasks
  Estimate mean_at_k, pass_at_k;
};

// Every task needs at least k samples; all of its samples are used by both estimators. A sample passes when its reward
// is at least `threshold`. Throws Error{invalid_argument} naming the task that has too few.
Evaluation evaluate_rewards(std::span<const TaskRewards> tasks, int k, double threshold = 1.0,
                            const BootstrapOptions& options = {});

// The mean of `after` minus the mean of `before` over the same tasks in the same order (paired bootstrap).
Estimate paired_difference(std::span<const double> before, std::span<const double> after,
                           const BootstrapOptions& options = {});

}  // namespace tidelock::rl
