// Advantages: how much better a trajectory was than its group.
//
//   grpo     (r - mean) / (std + eps)    std of the sample (n - 1), as verl and TRL take it
//   dr_grpo  r - mean
//   dapo     as grpo; groups whose rewards are all equal are filtered out (dynamic sampling)
//
// The two controls of a run, which must not learn: `shuffled_rewards` permutes the rewards over the whole batch before
// anything else; `zero_advantage` computes all and then sets every advantage to zero.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace tidelock::rl {

enum class AdvantageKind { grpo, dr_grpo, dapo };
enum class Control { none, shuffled_rewards, zero_advantage };

// By name; Error{invalid_argument} lists the known names.
AdvantageKind parse_advantage(std::string_view name);
Control parse_control(std::string_view name);

struct AdvantageOptions {
  AdvantageKind kind = AdvantageKind::dr_grpo;
  Control control = Control::none;
  double epsilon = 1e-6;   // added to the deviation
  std::uint64_t seed = 0;  // of the permutation; use a new one each step
};

struct Advantages {
  std::vector<float> values;       // [trajectories]
  std::vector<std::uint8_t> kept;  // [trajectories] 0: leave it out of the loss and out of its denominators
  int groups = 0;                  // groups with at least one graded trajectory
  int alive = 0;                   // of these, groups whose rewards are not all equal
  double alive_fraction() const { return groups == 0 ? 0.0 : static_cast<double>(alive) / groups; }
};

// rewards, groups, graded: [trajectories]. groups[i] is the group of trajectory i (any numbers). Trajectories with
// graded == 0 (failed, aborted) enter no mean and are not kept. A group of one has advantage 0.
Advantages compute_advantages(std::span<const double> rewards, std::span<const std::int64_t> groups,
                              std::span<const std::uint8_t> graded, const AdvantageOptions& options);

// DAPO's soft overlong punishment, added to the reward: 0 up to limit - buffer tokens, then falling linearly to -1 at
// limit.
double overlong_penalty(std::int64_t length, std::int64_t limit, std::int64_t buffer);

}  // namespace tidelock::rl
