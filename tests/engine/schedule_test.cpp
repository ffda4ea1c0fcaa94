// What a step runs. The head properties: nothing is left idle, nobody is starved, a short prompt does not wait for a
// long one.
#include "engine/schedule.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>

namespace tidelock::engine {
namespace schedule_test {

std::vector<PlanInput> random_inputs() {
  const auto pending = *rc::gen::container<std::vector<std::int64_t>>(
      rc::gen::oneOf(rc::gen::just<std::int64_t>(1), rc::gen::inRange<std::int64_t>(0, 300)));
  std::vector<PlanInput> inputs;
  for (std::size_t i = 0; i < pending.size(); ++i)
    inputs.push_back({static_cast<SequenceId>(3 * i + 1), pending[i], static_cast<PromptClass>(*rc::gen::inRange(0, 4)),
                      *rc::gen::inRange(-1, 2)});
  return inputs;
}

RC_GTEST_PROP(Planner, LeavesNothingIdleAndServesEachClassInItsOrder, ()) {
  StepPlanner planner;
  for (int step = 0; step < 3; ++step) {
    const auto inputs = random_inputs();
    const auto budget = *rc::gen::inRange<std::int64_t>(1, 400);
    std::map<SequenceId, std::int64_t> planned;
    for (const auto& item : planner.plan(inputs, budget)) {
      RC_ASSERT(item.tokens >= 1);
      RC_ASSERT(planned.emplace(item.sequence, item.tokens).second);
    }
    std::int64_t decoding = 0, waiting = 0, prefill = 0;
    std::array<std::int64_t, kPromptClasses> by_class{};
    for (const auto& input : inputs) {
      const std::int64_t tokens = planned[input.sequence];
      RC_ASSERT(tokens <= input.pending);
      if (input.pending == 1) {
        RC_ASSERT(tokens == 1);
        ++decoding;
        continue;
      }
      waiting += input.pending;
      by_class[static_cast<std::size_t>(input.prompt)] += input.pending;
      prefill += tokens;
      // Whoever of its class comes after one that is not done gets nothing.
      for (const auto& other : inputs) {
        if (other.pending <= 1 || other.prompt != input.prompt || tokens == input.pending) continue;
        const bool after =
            other.priority > input.priority || (other.priority == input.priority && other.sequence > input.sequence);
        RC_ASSERT(!after || planned[other.sequence] == 0);
      }
    }
    const std::int64_t least = std::min(budget, StepPlanner::kLeastPrefill);
    std::int64_t room = std::max(budget - decoding, least), shares = 0;
    for (std::size_t c = 0; c < kPromptClasses; ++c) shares += by_class[c] > 0 ? kClassShares[c] : 0;
    const auto smallest =
        static_cast<std::size_t>(std::ranges::find_if(by_class, [](auto n) { return n > 0; }) - by_class.begin());
    if (waiting > 0 && by_class[smallest] < waiting) {
      const std::int64_t enough = (by_class[smallest] * shares + kClassShares[smallest] - 1) / kClassShares[smallest];
      room = std::min(room, std::max(enough, least));
    }
    RC_ASSERT(prefill == std::min(room, waiting));
  }
}

RC_GTEST_PROP(Planner, ASinglePromptIsNeverStarved, ()) {
  const auto pending = *rc::gen::inRange<std::int64_t>(1, 1000);
  const auto budget = *rc::gen::inRange<std::int64_t>(-3, 100);  // even of a budget that makes no sense
  StepPlanner planner;
  std::int64_t left = pending, steps = 0;
  while (left > 0) {
    const std::vector<PlanInput> input = {{4, left}};
    const auto plan = planner.plan(input, budget);
    RC_ASSERT(plan.size() == 1U && plan[0].tokens >= 1);
    left -= plan[0].tokens;
    ++steps;
  }
  const std::int64_t each = std::max<std::int64_t>(budget, 1);
  RC_ASSERT(steps <= (pending + each - 1) / each);
}

TEST(Planner, ClassesWithEndlessWorkGetTheirShares) {
  StepPlanner planner;
  std::array<std::int64_t, kPromptClasses> served{};
  std::vector<PlanInput> inputs;
  for (std::size_t c = 0; c < kPromptClasses; ++c)
    inputs.push_back({static_cast<SequenceId>(c), 1 << 20, static_cast<PromptClass>(c)});
  const int steps = 1000;
  for (int i = 0; i < steps; ++i)
    for (const auto& item : planner.plan(inputs, 100)) served[static_cast<std::size_t>(item.sequence)] += item.tokens;
  for (std::size_t c = 0; c < kPromptClasses; ++c)
    EXPECT_NEAR(static_cast<double>(served[c]), steps * 100.0 * static_cast<double>(kClassShares[c]) / 85, 100) << c;
}

TEST(Planner, AShortPromptDoesNotWaitForALongOne) {
  StepPlanner planner;
  for (int i = 0; i < 50; ++i) planner.plan(std::vector<PlanInput>{{1, 200000, PromptClass::huge}}, 128);
  std::int64_t left = 1000;
  int steps = 0;
  for (; left > 0; ++steps) {
    const std::vector<PlanInput> both{{1, 200000, PromptClass::huge}, {2, left, PromptClass::brief}};
    for (const auto& item : planner.plan(both, 128)) left -= item.sequence == 2 ? item.tokens : 0;
  }
  EXPECT_LE(steps, 1000 * 65 / 64 / 128 + 2) << "the long one took more than its share";
}

TEST(Planner, NothingPendingIsNoWork) {
  StepPlanner planner;
  const std::vector<PlanInput> inputs = {{1, 0}, {2, 0}};
  EXPECT_TRUE(planner.plan(inputs, 10).empty());
  EXPECT_TRUE(planner.plan({}, 10).empty());
}

TEST(Classes, AreByTokensToCompute) {
  EXPECT_EQ(class_of(2047), PromptClass::brief);
  EXPECT_EQ(class_of(2048), PromptClass::medium);
  EXPECT_EQ(class_of(32768), PromptClass::large);
  EXPECT_EQ(class_of(131072), PromptClass::huge);
}

TEST(Budget, ComesToStepsOfTheTargetsLength) {
  for (const double rate : {100.0, 3000.0, 1e6}) {
    StepBudget budget(0.1, 2048);
    const auto seconds = [&] { return 0.002 + static_cast<double>(budget.tokens()) / rate; };
    for (int i = 0; i < 20; ++i) budget.ran(budget.tokens(), seconds());
    EXPECT_TRUE(std::abs(seconds() - 0.1) < 0.01 || budget.tokens() == StepBudget::kLeast || budget.tokens() == 2048)
        << rate << ": " << seconds();
    const std::int64_t before = budget.tokens();
    budget.ran(1, 1e-6);
    EXPECT_EQ(budget.tokens(), before) << "a step that had little to do says nothing";
  }
}

TEST(Budget, StepsStayLongWhereShortOnesDoNotPay) {
  StepBudget budget(0.02, 2048);  // every step reads weights for 0.3 s, however few its tokens are
  for (int i = 0; i < 20; ++i) budget.ran(budget.tokens(), 0.3 + static_cast<double>(budget.tokens()) / 2000);
  const auto rate = [](double tokens) { return tokens / (0.3 + tokens / 2000); };
  const auto tokens = static_cast<double>(budget.tokens());
  EXPECT_GT(rate(2 * tokens), StepBudget::kWorthwhile * rate(2048));
  EXPECT_LT(tokens, 2048);
  StepBudget unbound(0, 2048);
  unbound.ran(2048, 100);
  EXPECT_EQ(unbound.tokens(), 2048);
}

TEST(FirstToken, IsTheOwnClassesWorkAndTheOthersShares) {
  EXPECT_DOUBLE_EQ(seconds_to_first_token(800, {0, 0, 0, 0}, 100), 8);
  EXPECT_DOUBLE_EQ(seconds_to_first_token(800, {800, 0, 0, 0}, 100), 16);
  EXPECT_DOUBLE_EQ(seconds_to_first_token(640, {0, 0, 0, 1000000}, 100), 6.5) << "the long one's share, meanwhile";
  EXPECT_DOUBLE_EQ(seconds_to_first_token(200000, {800, 0, 0, 0}, 100), 2008) << "all of the short ones' work";
  EXPECT_DOUBLE_EQ(seconds_to_first_token(800, {800, 0, 0, 0}, 0), 0) << "nothing is known yet";
}

TEST(KeepPoints, AreTheJunctionTheLastBlockAndEveryInterval) {
  const auto positions = [](std::int64_t from, std::int64_t known, std::int64_t prompt, std::int64_t interior) {
    std::string text;
    for (const auto& point : keep_points(from, known, prompt, interior))
      text += std::to_string(point.position) + (point.segment == state::Segment::probation ? "? " : " ");
    return text;
  };
  EXPECT_EQ(positions(0, 0, 64, 0), "");
  EXPECT_EQ(positions(0, 0, 65, 0), "64 ");
  EXPECT_EQ(positions(0, 128, 1000, 0), "128 960 ");
  EXPECT_EQ(positions(128, 128, 1000, 0), "960 ");
  EXPECT_EQ(positions(0, 256, 1000, 256), "256 512? 768? 960 ") << "a junction is no mere interior point";
  EXPECT_EQ(positions(960, 960, 1000, 256), "");
  EXPECT_EQ(positions(0, 0, 1, 64), "");
}

TEST(MemoryCap, LeavesSomethingForSmallerOnes) {
  using enum PromptClass;
  EXPECT_TRUE(within_cap(huge, 1000, {}, 1000)) << "the only one may have all";
  EXPECT_TRUE(within_cap(huge, 1000, {500, 400, 300, 0}, 1000)) << "smaller classes do not count";
  EXPECT_TRUE(within_cap(huge, 100, {0, 0, 0, 500}, 1000));
  EXPECT_FALSE(within_cap(huge, 101, {0, 0, 0, 500}, 1000));
  EXPECT_TRUE(within_cap(large, 150, {0, 0, 100, 500}, 1000)) << "with the larger ones";
  EXPECT_FALSE(within_cap(large, 151, {0, 0, 100, 500}, 1000));
  EXPECT_TRUE(within_cap(brief, 400, {100, 0, 0, 600}, 1000)) << "the rest is theirs, as far as there is room";
  EXPECT_FALSE(within_cap(medium, 400, {0, 0, 0, 600}, 1000));
}

}  // namespace schedule_test
}  // namespace tidelock::engine
