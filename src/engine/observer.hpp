// What an engine decides, told as it decides with everything that it decided by: enough to decide again.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "engine/schedule.hpp"
#include "state/kept_states.hpp"

namespace tidelock::engine {

// Called on the engine's thread between two steps; must not throw and not wait.
class Observer {
 public:
  virtual ~Observer() = default;
  // StepPlanner(before).plan(sequences, budget) gave `items`.
  virtual void planned(const StepPlanner::Memory& before, std::span<const PlanInput> sequences, std::int64_t budget,
                       std::span<const StepPlanItem> items) = 0;
  // StepBudget(before).ran(tokens, seconds): a step has so many tokens from now on.
  virtual void budgeted(const StepBudget::Memory& before, std::int64_t tokens, double seconds, std::int64_t after) = 0;
  // A sequence begins, or begins again: so many of its tokens need not be computed.
  virtual void started(SequenceId sequence, std::int64_t tokens, std::int64_t known, bool from_disk) = 0;
  // choose_to_set_back(held, but) gave `sequence`; `weighed`: whether to write its state, if that was asked.
  virtual void set_back(std::span<const Holding> held, SequenceId but, SequenceId sequence,
                        const std::optional<state::WriteChoice>& weighed) = 0;
};

}  // namespace tidelock::engine
