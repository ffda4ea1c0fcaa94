#include "engine/schedule.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "numerics/attention.hpp"

namespace tidelock::engine {
namespace {

std::size_t index_of(PromptClass prompt) {
  return static_cast<std::size_t>(prompt);
}

// Tokens that the smallest class with work needs to be done at its share; no bound where there is no other class.
std::int64_t enough_for_the_smallest(std::span<const PlanInput* const> prompts) {
  std::array<std::int64_t, kPromptClasses> pending{};
  for (const PlanInput* s : prompts) pending[index_of(s->prompt)] += s->pending;
  std::int64_t shares = 0, classes = 0;
  std::size_t smallest = kPromptClasses;
  for (std::size_t c = kPromptClasses; c-- > 0;) {
    if (pending[c] == 0) continue;
    shares += kClassShares[c];
    smallest = c;
    ++classes;
  }
  if (classes < 2) return std::numeric_limits<std::int64_t>::max();
  return (pending[smallest] * shares + kClassShares[smallest] - 1) / kClassShares[smallest];
}

}  // namespace

PromptClass class_of(std::int64_t uncached_tokens) {
  if (uncached_tokens < 2048) return PromptClass::brief;
  if (uncached_tokens < 32768) return PromptClass::medium;
  if (uncached_tokens < 131072) return PromptClass::large;
  return PromptClass::huge;
}

bool within_cap(PromptClass prompt, std::size_t wanted, const std::array<std::size_t, kPromptClasses>& held,
                std::size_t limit) {
  if (prompt == PromptClass::brief) return true;
  std::size_t together = 0;
  for (std::size_t c = index_of(prompt); c < kPromptClasses; ++c) together += held[c];
  const double cap = kMemoryCaps[index_of(prompt)] * static_cast<double>(limit);
  return together == 0 || static_cast<double>(together) + static_cast<double>(wanted) <= cap;
}

std::vector<StepPlanItem> StepPlanner::plan(std::span<const PlanInput> sequences, std::int64_t token_budget) {
  std::vector<StepPlanItem> plan;
  std::array<std::vector<std::size_t>, kPromptClasses> queues;  // indices into the plan, whose tokens grow from 0
  std::vector<std::int64_t> left_of;                            // pending tokens by index into the plan
  for (const PlanInput& s : sequences)
    if (s.pending == 1) plan.push_back({s.sequence, 1});
  const std::int64_t least = std::clamp<std::int64_t>(token_budget, 1, kLeastPrefill);
  std::int64_t left = std::max(token_budget - std::ssize(plan), least);
  const std::size_t decoding = plan.size();
  std::vector<const PlanInput*> prompts;
  for (const PlanInput& s : sequences)
    if (s.pending > 1) prompts.push_back(&s);
  std::ranges::stable_sort(prompts, {}, [](const PlanInput* s) { return s->priority; });
  for (const PlanInput* s : prompts) {
    queues[index_of(s->prompt)].push_back(plan.size());
    plan.push_back({s->sequence, 0});
    left_of.push_back(s->pending);
  }
  std::array<std::size_t, kPromptClasses> next{};
  const auto has_work = [&](std::size_t c) { return next[c] < queues[c].size(); };
  for (std::size_t c = 0; c < kPromptClasses; ++c)
    if (!has_work(c)) memory_.owed[c] = 0;
  left = std::min(left, std::max(enough_for_the_smallest(prompts), least));
  // The round goes on where the last step's budget ended.
  for (std::size_t idle = 0; left > 0 && idle < kPromptClasses;) {
    const std::size_t c = memory_.turn;
    idle = has_work(c) ? 0 : idle + 1;
    if (has_work(c) && !std::exchange(memory_.begun, true)) memory_.owed[c] += kClassShares[c];
    while (has_work(c) && memory_.owed[c] > 0 && left > 0) {
      const std::size_t item = queues[c][next[c]];
      std::int64_t& pending = left_of[item - decoding];
      const std::int64_t tokens = std::min({pending, memory_.owed[c], left});
      plan[item].tokens += tokens;
      pending -= tokens;
      memory_.owed[c] -= tokens;
      left -= tokens;
      if (pending == 0) ++next[c];
    }
    if (has_work(c) && memory_.owed[c] > 0) break;  // its turn is not over
    if (!has_work(c)) memory_.owed[c] = 0;
    memory_.turn = (c + 1) % kPromptClasses;
    memory_.begun = false;
  }
  std::erase_if(plan, [](const StepPlanItem& item) { return item.tokens == 0; });
  return plan;
}

void StepBudget::ran(std::int64_t tokens, double seconds) {
  auto& [target, most, now, best] = memory_;
  if (target <= 0 || seconds <= 0 || tokens < now) return;  // what was not used up says nothing
  const double rate = static_cast<double>(tokens) / seconds;
  best = std::max(0.999 * best, rate);  // a best of long ago counts less
  const double factor = std::clamp(target / seconds, 0.5, 2.0);
  if (factor < 1 && rate < kWorthwhile * best) return;
  now = std::clamp(static_cast<std::int64_t>(static_cast<double>(now) * factor), std::min(kLeast, most), most);
}

std::optional<SequenceId> choose_to_set_back(std::span<const Holding> held, SequenceId but) {
  const auto last = std::find_if(held.rbegin(), held.rend(), [](const Holding& one) { return one.holds; });
  if (last == held.rend() || last->sequence == but) return std::nullopt;
  return last->sequence;
}

double seconds_to_first_token(std::int64_t tokens, const std::array<std::int64_t, kPromptClasses>& ahead,
                              double tokens_per_second) {
  if (tokens_per_second <= 0) return 0;
  const std::size_t own = index_of(class_of(tokens));
  const auto mine = static_cast<double>(ahead[own] + tokens);
  double total = mine;
  for (std::size_t c = 0; c < kPromptClasses; ++c)
    if (c != own)
      total += std::min(static_cast<double>(ahead[c]),
                        mine * static_cast<double>(kClassShares[c]) / static_cast<double>(kClassShares[own]));
  return total / tokens_per_second;
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
