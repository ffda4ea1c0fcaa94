// States that are reused: whatever an engine kept, gave up or computed again, a sequence's tokens and log-probabilities
// are those of an engine that knows nothing; and no state reaches a sequence of another adapter or tenant.
#include <rapidcheck.h>

#include <algorithm>

#include "engine/engine.hpp"
#include "engine/reuse_fixture.hpp"
#include "model/expect_refused.hpp"
#include "model/small_model.hpp"

namespace tidelock::engine {
namespace reuse_test {

using namespace model::testing;
using namespace testing;
INSTANTIATE_TEST_SUITE_P(Family, Reuse,
                         ::testing::Values(Variant{Family::linear, Format::bf16}, Variant{Family::k3, Format::f32},
                                           Variant{Family::k31, Format::bf16}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(Reuse, WarmEqualsColdAtEveryCut) {
  const Tokens first = random_tokens(150, 1);
  for (std::int64_t cut = 1; cut <= 150; cut += cut % 16 < 2 || cut % 16 > 13 ? 1 : 5) {
    Tokens second(first.begin(), first.begin() + cut);
    const Tokens other = random_tokens(20, 90);
    second.insert(second.end(), other.begin(), other.end());
    Engine engine(*model, solo_team(), reusing);
    run(engine, first, params(1, 5));
    EXPECT_EQ(run(engine, second, params(2, 5)), cold(second, params(2, 5))) << "cut at " << cut;
    EXPECT_EQ(cached % 64, 0);
    EXPECT_LE(cached, cut);
    // The second time it starts where the first left it: at its junction, or at its own last whole block.
    EXPECT_EQ(run(engine, second, params(2, 5)), cold(second, params(2, 5))) << "cut at " << cut;
    EXPECT_GE(cached, (static_cast<std::int64_t>(second.size()) - 1) / 64 * 64) << "cut at " << cut;
  }
}

TEST_P(Reuse, ATurnGoesOnWhereTheLastOneEnded) {
  for (const std::int64_t length : {3, 60, 63, 64, 65, 128, 140}) {
    Engine engine(*model, solo_team(), reusing);
    Tokens conversation = random_tokens(length, 4);
    for (std::uint64_t turn = 0; turn < 4; ++turn) {
      const Sampled answer = run(engine, conversation, params(turn, 9));
      EXPECT_EQ(answer, cold(conversation, params(turn, 9))) << "turn " << turn << " of " << length;
      EXPECT_EQ(cached, turn == 0 ? 0 : static_cast<std::int64_t>(conversation.size()) - 1 - 7)
          << "all but the last answer's last token and the new tokens";
      conversation.insert(conversation.end(), answer.tokens.begin(), answer.tokens.end());
      const Tokens more = random_tokens(7, 60 + turn);
      conversation.insert(conversation.end(), more.begin(), more.end());
    }
  }
}

TEST_P(Reuse, TheSamePromptNeverSkipsItsLastToken) {
  for (const std::int64_t length : {1, 2, 63, 64, 65, 128, 129}) {
    const Tokens prompt = random_tokens(length, 6);
    Engine engine(*model, solo_team(), reusing);
    const Sampled expected = cold(prompt, params(3, 4));
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(run(engine, prompt, params(3, 4)), expected) << length << " tokens, round " << round;
      EXPECT_EQ(cached, round == 0 ? 0 : (length - 1) / 64 * 64);
    }
    // The end of a request that computed exactly this prompt must not be continued without a token to run.
    const SamplingParams one = params(3, 1);
    run(engine, prompt, one);
    EXPECT_EQ(run(engine, prompt, one).tokens.front(), expected.tokens.front());
  }
}

TEST_P(Reuse, AdaptersAndTenantsStayApart) {
  const Adapter a = make_adapter(*model, random_adapter(*model, 3, 0.1F, 5)),
                b = make_adapter(*model, random_adapter(*model, 3, 0.1F, 6)),
                same_as_a = make_adapter(*model, random_adapter(*model, 3, 0.1F, 5));
  const Tokens prompt = random_tokens(130, 3);
  Engine engine(*model, solo_team(), reusing);
  for (const Adapter& adapter : {Adapter(), a, b}) {
    EXPECT_EQ(run(engine, prompt, params(1, 4), adapter), cold(prompt, params(1, 4), adapter));
    EXPECT_EQ(cached, 0) << "a state of another adapter was used";
  }
  run(engine, prompt, params(1, 4), same_as_a);
  EXPECT_EQ(cached, 128) << "an adapter is what it holds, not where it lies";
  run(engine, prompt, params(1, 4), nullptr, "tenant");
  EXPECT_EQ(cached, 0) << "a state of another tenant was used";
  run(engine, prompt, params(1, 4), nullptr, "tenant");
  EXPECT_EQ(cached, 128);
  engine.forget();
  run(engine, prompt, params(1, 4), nullptr, "tenant");
  EXPECT_EQ(cached, 0);
}

TEST_P(Reuse, WhatWasCancelledIsKeptAndWhatIsSpoiltIsNot) {
  const Tokens prompt = random_tokens(140, 3);
  for (const bool spoilt : {false, true}) {
    Engine engine(*model, solo_team(), reusing);
    const auto p = params(1, 4);
    const SequenceId id = engine.add(prompt, std::span(&p, 1)).front();
    engine.step();
    engine.remove(id, spoilt);
    EXPECT_EQ(run(engine, prompt, p), cold(prompt, p));
    EXPECT_EQ(cached, spoilt ? 0 : 50);
  }
}

TEST_P(Reuse, GroupsShareAndDiverge) {
  const Tokens prompt = random_tokens(100, 3);
  std::vector<SamplingParams> group;
  for (std::uint64_t seed = 0; seed < 4; ++seed) group.push_back(params(seed, 40));
  Engine engine(*model, solo_team(), reusing);
  for (int round = 0; round < 2; ++round) {
    const auto ids = engine.add(prompt, group);
    auto sampled = drain(engine);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ(engine.cached_tokens(ids[i]), round * 64);
      EXPECT_EQ(sampled[ids[i]], cold(prompt, group[i])) << "member " << i << ", round " << round;
    }
    for (const SequenceId id : ids) engine.remove(id);
  }
}

// The head property: any traffic, under any limit, gives what cold engines give, and the limit holds.
TEST_P(Reuse, AnyTrafficUnderAnyLimitChangesNoBit) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    const std::size_t limit = bytes_for(256, 1 + static_cast<std::int64_t>(random.below(4)));
    Team team(1 + static_cast<int>(random.below(2)));
    Engine engine(*model, team,
                  {.step_tokens = 16 + random.below(80), .state_limit = limit, .reuse = random.below(4) != 0});
    run_traffic(engine, random, limit, seed);
  }
}

TEST_P(Reuse, TheLimitSetsSequencesBackAndEvictsStates) {
  Engine engine(*model, solo_team(), {.step_tokens = 64, .state_limit = bytes_for(200, 2), .reuse = true});
  std::vector<SequenceId> ids;
  std::map<SequenceId, Sampled> expected;
  for (std::uint64_t i = 0; i < 5; ++i) {
    const Tokens prompt = random_tokens(100, i);
    const auto p = params(i, 60);
    ids.push_back(engine.add(prompt, std::span(&p, 1)).front());
    expected[ids.back()] = cold(prompt, p);
  }
  EXPECT_EQ(engine.room_for(100, 1, PromptClass::brief), Engine::Room::none);
  EXPECT_EQ(drain(engine), expected);
  EXPECT_GT(engine.counters().set_back, 0);
  for (const SequenceId id : ids) engine.remove(id);
  EXPECT_EQ(engine.room_for(100, 1, PromptClass::brief), Engine::Room::enough);
  EXPECT_GT(engine.reuse_counters().evicted, 0);
  Engine small(*model, solo_team(), {.state_limit = bytes_for(64, 1)});
  const auto p = params(0, 50);
  expect_refused(ErrorCode::invalid_argument, "the limit is",
                 [&] { small.add(random_tokens(150, 1), std::span(&p, 1)); });
}

}  // namespace reuse_test
}  // namespace tidelock::engine
