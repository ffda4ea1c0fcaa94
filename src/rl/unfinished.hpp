// What partial rollouts leave between steps, in a checkpoint:
//
//   unfinished.json     per group: the step it was drawn for and its number there; per member: finished or not, and the
//                       seconds that its agent was under way; the versions of the weights in policy_V
//   unfinished.jsonl    the trajectories so far (ATIF), in the same order
//   policy_V/           adapters (PEFT) that sampled tokens of them, but for the checkpoint's own
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "rl/atif.hpp"
#include "rl/learner.hpp"
#include "rl/rollout.hpp"

namespace tidelock::rl {

struct Unfinished {
  std::vector<UnfinishedGroup> groups;
  Policies policies;  // all that sampled tokens of `groups`, but the newest
};

// Keeps of `policies` the newest, and those that sampled tokens of `groups`.
void forget_unused(Policies& policies, const std::vector<UnfinishedGroup>& groups);

// Writes nothing when there are no groups. Throws Error{io}.
void save_unfinished(const std::filesystem::path& folder, const Unfinished& unfinished, const model::Model& model,
                     const AtifContext& context);

// Empty when the checkpoint has none. `draw` gives the groups of a step. Throws Error{corrupt_data} naming the file;
// Error{mismatch} when a trajectory is not of the group that is drawn today, as when tasks have changed.
using DrawGroups = std::function<std::vector<RolloutGroup>(std::int64_t step)>;
Unfinished load_unfinished(const std::filesystem::path& folder, const model::Model& model, const DrawGroups& draw);

}  // namespace tidelock::rl
