// The recipe of a reinforcement-learning run: its keys, and the parts of a run that they describe.
#pragma once

#include <cstdint>
#include <memory>

#include "base/settings.hpp"
#include "rl/advantage.hpp"
#include "rl/loss.hpp"
#include "rl/rollout.hpp"
#include "rl/task.hpp"

namespace tidelock::rl {

// Every key of an rl or eval recipe.
Schema rl_schema();

// The keys of [tasks] alone: training recipes have them too.
void add_task_keys(Schema& schema);

// [tasks]: the built-in mixture, or the folder of Harbor tasks. Error{invalid_argument} for none or both.
TaskMixture rl_tasks(const Settings& settings);
RolloutOptions rollout_options(const Settings& settings);
AdvantageOptions advantage_options(const Settings& settings);
LossOptions loss_options(const Settings& settings);

// Groups of one training step, or of an evaluation: episodes and sampler seeds are pure functions of (seed, step).
std::vector<RolloutGroup> draw_groups(const TaskMixture& tasks, Split split, std::uint64_t seed, std::int64_t step,
                                      std::int64_t groups, std::int64_t members);

}  // namespace tidelock::rl
