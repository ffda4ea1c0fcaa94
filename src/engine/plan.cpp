// What the next step runs, and which states are worth keeping: pure decisions.
#include <algorithm>
#include <map>

#include "engine/engine.hpp"

namespace tidelock::engine {

std::vector<StepPlanItem> plan_step(std::span<const PlanInput> sequences, std::int64_t token_budget) {
  std::vector<StepPlanItem> plan;
  std::int64_t left = std::max<std::int64_t>(token_budget, 1);
  for (const PlanInput& s : sequences)
    if (s.pending == 1 && left > 0) {
      plan.push_back({s.sequence, 1});
      --left;
    }
  for (const PlanInput& s : sequences)
    if (s.pending > 1 && left > 0) {
      plan.push_back({s.sequence, std::min(s.pending, left)});
      left -= plan.back().tokens;
    }
  return plan;
}

std::vector<KeepPoint> keep_points(std::int64_t from, std::int64_t known, std::int64_t prompt, std::int64_t interior) {
  constexpr std::int64_t kBlock = numerics::kBlockTokens;
  std::map<std::int64_t, state::Segment> points;
  for (std::int64_t p = interior; interior > 0 && p < prompt; p += interior) points[p] = state::Segment::probation;
  points[(prompt - 1) / kBlock * kBlock] = state::Segment::protected_use;
  points[known] = state::Segment::protected_use;
  std::vector<KeepPoint> result;
  for (const auto& [position, segment] : points)
    if (position > from && position < prompt) result.push_back({position, segment});
  return result;
}

}  // namespace tidelock::engine
