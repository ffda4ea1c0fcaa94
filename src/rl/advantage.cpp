#include "rl/advantage.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.hpp"
#include "base/random.hpp"

namespace tidelock::rl {
namespace {

// Fisher-Yates over the graded rewards of the whole batch.
std::vector<double> shuffled(std::span<const double> rewards, std::span<const std::uint8_t> graded,
                             std::uint64_t seed) {
  std::vector<double> result(rewards.begin(), rewards.end());
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < graded.size(); ++i)
    if (graded[i] != 0) places.push_back(i);
  Random random(seed);
  for (std::size_t i = places.size(); i > 1; --i)
    std::swap(result[places[i - 1]], result[places[random.below(static_cast<std::uint32_t>(i))]]);
  return result;
}

void group_advantages(const std::vector<std::size_t>& members, std::span<const double> rewards,
                      const AdvantageOptions& options, Advantages& out) {
  double sum = 0;
  for (const std::size_t i : members) sum += rewards[i];
  const double count = static_cast<double>(members.size()), mean = sum / count;
  double squares = 0;
  for (const std::size_t i : members) squares += (rewards[i] - mean) * (rewards[i] - mean);
  // By value, not by deviation: rounding in the mean of equal rewards must not make a group alive.
  const bool alive = std::any_of(members.begin(), members.end(),
                                 [&](std::size_t i) { return rewards[i] != rewards[members.front()]; });
  const double deviation = alive ? std::sqrt(squares / (count - 1)) : 0.0;
  ++out.groups;
  if (alive) ++out.alive;
  for (const std::size_t i : members) {
    double advantage = alive ? rewards[i] - mean : 0.0;
    if (alive && options.kind != AdvantageKind::dr_grpo) advantage /= deviation + options.epsilon;
    out.values[i] = options.control == Control::zero_advantage ? 0.0F : static_cast<float>(advantage);
    out.kept[i] = options.kind == AdvantageKind::dapo && !alive ? 0 : 1;
  }
}

}  // namespace

AdvantageKind parse_advantage(std::string_view name) {
  if (name == "grpo") return AdvantageKind::grpo;
  if (name == "dr_grpo") return AdvantageKind::dr_grpo;
  if (name == "dapo") return AdvantageKind::dapo;
  fail(ErrorCode::invalid_argument, "advantage \"{}\" is not known; known are grpo, dr_grpo, dapo", name);
}

Control parse_control(std::string_view name) {
  if (name == "none") return Control::none;
  if (name == "shuffled_rewards") return Control::shuffled_rewards;
  if (name == "zero_advantage") return Control::zero_advantage;
  fail(ErrorCode::invalid_argument, "control \"{}\" is not known; known are none, shuffled_rewards, zero_advantage",
       name);
}

Advantages compute_advantages(std::span<const double> rewards, std::span<const std::int64_t> groups,
                              std::span<const std::uint8_t> graded, const AdvantageOptions& options) {
  if (groups.size() != rewards.size() || graded.size() != rewards.size())
    fail(ErrorCode::invalid_argument, "advantages: {} rewards, {} groups, {} graded flags", rewards.size(),
         groups.size(), graded.size());
  for (std::size_t i = 0; i < rewards.size(); ++i)
    if (graded[i] != 0 && !std::isfinite(rewards[i]))
      fail(ErrorCode::invalid_argument, "advantages: the reward of trajectory {} is {}", i, rewards[i]);
  const std::vector<double> used = options.control == Control::shuffled_rewards
                                       ? shuffled(rewards, graded, options.seed)
                                       : std::vector<double>(rewards.begin(), rewards.end());
  std::map<std::int64_t, std::vector<std::size_t>> members;
  for (std::size_t i = 0; i < rewards.size(); ++i)
    if (graded[i] != 0) members[groups[i]].push_back(i);
  Advantages out;
  out.values.assign(rewards.size(), 0.0F);
  out.kept.assign(rewards.size(), 0);
  for (const auto& [group, list] : members) group_advantages(list, used, options, out);
  return out;
}

double overlong_penalty(std::int64_t length, std::int64_t limit, std::int64_t buffer) {
  if (buffer < 1 || buffer > limit)
    fail(ErrorCode::invalid_argument, "overlong penalty: a buffer of {} tokens under a limit of {}", buffer, limit);
  if (length <= limit - buffer) return 0;
  if (length >= limit) return -1;
  return static_cast<double>(limit - buffer - length) / static_cast<double>(buffer);
}

}  // namespace tidelock::rl
