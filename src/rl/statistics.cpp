#include "rl/statistics.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/random.hpp"

namespace tidelock::rl {
namespace {

double mean(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

// The value below which a fraction q of the sorted values lies, linear between neighbours.
double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

}  // namespace

double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k) {
  if (c < 0 || c > n || k < 1 || k > n)
    fail(ErrorCode::invalid_argument, "pass@k needs 0 <= c <= n and 1 <= k <= n, found n={}, c={}, k={}", n, c, k);
  // C(n-c, k) / C(n, k) as a product of factors <= 1: no large binomials.
  double all_fail = 1;
  for (std::int64_t i = 0; i < k; ++i)
    all_fail *= static_cast<double>(std::max<std::int64_t>(n - c - i, 0)) / static_cast<double>(n - i);
  return 1 - all_fail;
}

Estimate bootstrap_mean(std::span<const double> per_task, const BootstrapOptions& options) {
  if (per_task.empty()) fail(ErrorCode::invalid_argument, "an estimate over no tasks");
  if (options.resamples < 1 || options.confidence <= 0 || options.confidence >= 1)
    fail(ErrorCode::invalid_argument, "bootstrap: {} resamples at confidence {}", options.resamples,
         options.confidence);
  const auto n = static_cast<std::uint32_t>(per_task.size());
  std::vector<double> means(static_cast<std::size_t>(options.resamples));
  for (std::size_t r = 0; r < means.size(); ++r) {
    Random random(options.seed, r);
    double sum = 0;
    for (std::uint32_t i = 0; i < n; ++i) sum += per_task[random.below(n)];
    means[r] = sum / n;
  }
  std::sort(means.begin(), means.end());
  const double tail = (1 - options.confidence) / 2;
  return {mean(per_task), quantile(means, tail), quantile(means, 1 - tail)};
}

Evaluation evaluate_rewards(std::span<const TaskRewards> tasks, int k, double threshold,
                            const BootstrapOptions& options) {
  std::vector<double> means, passes;
  for (std::size_t t = 0; t < tasks.size(); ++t) {
    const auto n = static_cast<std::int64_t>(tasks[t].size());
    if (k < 1 || n < k) fail(ErrorCode::invalid_argument, "mean@{}: task {} has {} samples", k, t, n);
    const auto c = std::count_if(tasks[t].begin(), tasks[t].end(), [&](double reward) { return reward >= threshold; });
    means.push_back(mean(tasks[t]));
    passes.push_back(pass_at_k(n, c, k));
  }
  return {k, static_cast<std::int64_t>(tasks.size()), bootstrap_mean(means, options), bootstrap_mean(passes, options)};
}

Estimate paired_difference(std::span<const double> before, std::span<const double> after,
                           const BootstrapOptions& options) {
  if (before.size() != after.size())
    fail(ErrorCode::invalid_argument, "paired difference of {} and {} tasks", before.size(), after.size());
  std::vector<double> differences(before.size());
  for (std::size_t i = 0; i < before.size(); ++i) differences[i] = after[i] - before[i];
  return bootstrap_mean(differences, options);
}

}  // namespace tidelock::rl
