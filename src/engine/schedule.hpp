// Which tokens the next step runs, and which states are worth keeping: pure decisions, whose only memory is what each
// class of prompts is owed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "state/segment.hpp"

namespace tidelock::engine {

using SequenceId = std::int64_t;

// Prompts by the tokens of them that have to be computed: below 2K, 32K, 128K, and more. A short one must not wait for
// a long one that came before it.
enum class PromptClass : std::uint8_t { brief, medium, large, huge };
inline constexpr std::size_t kPromptClasses = 4;
PromptClass class_of(std::int64_t uncached_tokens);
// Shares of a step's prefill when all classes have work; work that a class does not have goes to the others.
inline constexpr std::array<std::int64_t, kPromptClasses> kClassShares{64, 16, 4, 1};

// Of the memory for states, what sequences of a class and of the larger ones may hold together, so that there is always
// some that only smaller ones take.
inline constexpr std::array<double, kPromptClasses> kMemoryCaps{1, 0.9, 0.75, 0.6};
// Whether one more of this class may have `wanted` bytes when every class holds so many; the smallest class always may,
// as far as there is room. One that would be the only one of its class and the larger ones may have all: it could never
// run otherwise.
bool within_cap(PromptClass prompt, std::size_t wanted, const std::array<std::size_t, kPromptClasses>& held,
                std::size_t limit);

struct StepPlanItem {
  SequenceId sequence;
  std::int64_t tokens;
};
struct PlanInput {
  SequenceId sequence;
  std::int64_t pending;  // tokens known but not in the state yet; 1 when decoding
  PromptClass prompt = PromptClass::brief;
  int priority = 0;  // within a class the lower one goes first; then in the given order
};

class StepPlanner {
 public:
  struct Memory {
    std::array<std::int64_t, kPromptClasses> owed{};  // tokens, by class
    std::size_t turn = 0;                             // the class whose turn it is
    bool begun = false;                               // its turn, with what it adds to what it is owed
  };
  StepPlanner() = default;
  explicit StepPlanner(const Memory& memory) : memory_(memory) {}
  const Memory& memory() const { return memory_; }

  // Every decoding sequence (one token pending) runs. What they leave of the budget, but at least kLeastPrefill tokens
  // of it, goes to prompts by deficit round robin over the classes, in each class first come first served. A step in
  // which several classes have work ends where the smallest one's is done: its tokens do not wait for a long step.
  static constexpr std::int64_t kLeastPrefill = 16;
  std::vector<StepPlanItem> plan(std::span<const PlanInput> sequences, std::int64_t token_budget);

 private:
  Memory memory_;
};

// Tokens of a step, so that it takes about `target` seconds: prompts that come wait for the step that runs. Steps are
// not made so short that prompts are computed at less than kWorthwhile of the best speed seen: where few rows do not
// pay for the weights that they read.
class StepBudget {
 public:
  static constexpr std::int64_t kLeast = 64;
  static constexpr double kWorthwhile = 0.7;
  struct Memory {
    double target = 0;  // seconds; 0: always `most`
    std::int64_t most = 0, tokens = 0;
    double best = 0;  // tokens per second
  };
  StepBudget(double target, std::int64_t most) : memory_{target, most, most} {}
  explicit StepBudget(const Memory& memory) : memory_(memory) {}
  const Memory& memory() const { return memory_; }
  std::int64_t tokens() const { return memory_.tokens; }
  void ran(std::int64_t tokens, double seconds);

 private:
  Memory memory_;
};

// The sequence that is to give its memory back: the one that came last of those that hold some or wait for nothing.
// None when that is `but`. `held` in the order in which they came.
struct Holding {
  SequenceId sequence;
  bool holds;
};
std::optional<SequenceId> choose_to_set_back(std::span<const Holding> held, SequenceId but);

// Seconds until a prompt of `tokens` tokens to compute has its first token, when `ahead` of every class wait before it:
// its own class's work at the class's share, and of the others' as much as their shares take meanwhile. 0: nothing is
// known of the speed yet.
double seconds_to_first_token(std::int64_t tokens, const std::array<std::int64_t, kPromptClasses>& ahead,
                              double tokens_per_second);

// Where in a prompt of `prompt` tokens, of which `from` are computed already, a state is worth keeping for others:
// `known` (see state::PrefixCache::Hit), the last whole block before its end - what follows the prompt's end often
// differs from what a later prompt has there -, and every `interior` tokens on the way (0: none). Ascending, each in
// (from, prompt).
struct KeepPoint {
  std::int64_t position;
  state::Segment segment;
};
std::vector<KeepPoint> keep_points(std::int64_t from, std::int64_t known, std::int64_t prompt, std::int64_t interior);

}  // namespace tidelock::engine
