// The engine as its callers see it: a sequence's tokens and log-probabilities do not depend on the batch, the chunk,
// the thread count or on who shares its prompt; the trainer computes the same bits.
#include "engine/engine.hpp"

#include <algorithm>

#include "engine/support.hpp"
#include "model/expect_refused.hpp"
#include "model/small_model.hpp"

namespace tidelock::engine {
namespace engine_test {

using namespace model::testing;
using namespace testing;
class EngineTest : public ::testing::TestWithParam<Variant> {
 protected:
  std::unique_ptr<model::Model> model = make_small_model(small_config(GetParam()), 7, false);
  // What a sequence gives when it is alone.
  Sampled alone(const Tokens& prompt, const SamplingParams& p,
                std::shared_ptr<const model::Adapter> adapter = nullptr) {
    Engine engine(*model, solo_team());
    const SequenceId id = engine.add(prompt, std::span(&p, 1), std::move(adapter)).front();
    return drain(engine)[id];
  }
};
INSTANTIATE_TEST_SUITE_P(Family, EngineTest,
                         ::testing::Values(Variant{Family::linear, Format::bf16}, Variant{Family::k3, Format::f32},
                                           Variant{Family::k31, Format::f32}, Variant{Family::k31, Format::bf16}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(EngineTest, BatchChunksAndThreadsChangeNoBit) {
  const std::int64_t lengths[] = {70, 3, 40, 16, 65};
  std::vector<Tokens> prompts;
  std::vector<Sampled> expected;
  for (std::size_t i = 0; i < std::size(lengths); ++i) {
    prompts.push_back(random_tokens(lengths[i], 30 + i));
    expected.push_back(alone(prompts[i], params(i, 12)));
    ASSERT_EQ(expected[i].tokens.size(), 12U);
  }
  for (const int threads : {1, 2, 3})
    for (const std::int64_t step_tokens : {1, 7, 64, 2048})
      for (const std::size_t shard_limit : {std::size_t{0}, std::size_t{64} << 20}) {
        Team team(threads);
        Engine engine(*model, team, {.step_tokens = step_tokens, .shard_weights_limit = shard_limit});
        std::vector<SequenceId> ids;
        for (std::size_t i = 0; i < prompts.size(); ++i) {
          const auto p = params(i, 12);
          ids.push_back(engine.add(prompts[i], std::span(&p, 1)).front());
          engine.step();  // they join one after the other
        }
        // The events of the joining steps are read back from the sequences.
        drain(engine);
        for (std::size_t i = 0; i < prompts.size(); ++i) {
          Tokens all = prompts[i];
          all.insert(all.end(), expected[i].tokens.begin(), expected[i].tokens.end());
          EXPECT_EQ(engine.tokens(ids[i]), all)
              << threads << " threads, steps of " << step_tokens << ", sequence " << i;
          EXPECT_EQ(engine.status(ids[i]), Status::length);
        }
      }
}

TEST_P(EngineTest, AGroupEqualsSeparateSequences) {
  const Tokens prompt = random_tokens(50, 3);
  std::vector<SamplingParams> group;
  for (std::uint64_t seed = 0; seed < 5; ++seed) group.push_back(params(seed, 10 + static_cast<std::int64_t>(seed)));
  Engine engine(*model, solo_team(), {.step_tokens = 20});
  const auto ids = engine.add(prompt, group);
  ASSERT_EQ(ids.size(), 5U);
  auto sampled = drain(engine);
  EXPECT_EQ(engine.counters().prefill_tokens, 50) << "the prompt is computed once";
  for (std::size_t i = 0; i < group.size(); ++i) EXPECT_EQ(sampled[ids[i]], alone(prompt, group[i])) << "member " << i;
  EXPECT_NE(sampled[ids[0]], sampled[ids[1]]) << "members with other seeds must differ";
}

TEST_P(EngineTest, AGroupOutlivesItsLeader) {
  const Tokens prompt = random_tokens(50, 3);
  const std::vector<SamplingParams> group = {params(0, 8), params(1, 8), params(2, 8), params(3, 8)};
  Engine engine(*model, solo_team(), {.step_tokens = 20});
  const auto ids = engine.add(prompt, group);
  EXPECT_TRUE(engine.step().empty());
  engine.remove(ids[2]);  // one that waits
  engine.remove(ids[0]);  // the leader, 20 tokens into the prompt
  EXPECT_TRUE(engine.has_work());
  EXPECT_TRUE(engine.step().empty());
  engine.remove(ids[1]);  // the heir
  auto sampled = drain(engine);
  EXPECT_EQ(sampled.size(), 1U);
  EXPECT_EQ(sampled[ids[3]], alone(prompt, group[3]));
  EXPECT_EQ(engine.counters().prefill_tokens, 50) << "the heirs went on where the leader was";
  expect_refused(ErrorCode::not_found, "no sequence", [&] { engine.tokens(ids[0]); });
}

TEST_P(EngineTest, AppendContinuesAfterAStop) {
  const Tokens prompt = random_tokens(20, 3), observation = random_tokens(30, 4);
  const Sampled free = alone(prompt, params(5, 30));
  const std::int32_t stop = free.tokens[6];
  const auto first = std::find(free.tokens.begin(), free.tokens.end(), stop) - free.tokens.begin() + 1;
  const auto p = params(5, 30, {stop, 1000});
  Engine engine(*model, solo_team());
  const SequenceId id = engine.add(prompt, std::span(&p, 1)).front();
  auto turn = drain(engine)[id];
  ASSERT_EQ(engine.status(id), Status::stopped);
  EXPECT_EQ(turn.tokens, Tokens(free.tokens.begin(), free.tokens.begin() + first)) << "the stop token is part of it";
  engine.append(id, observation);
  EXPECT_EQ(engine.status(id), Status::prefill);
  const auto next = drain(engine)[id];
  // The same tokens given as one prompt: the next draw has the same distribution; its number continues.
  Tokens history = prompt;
  history.insert(history.end(), turn.tokens.begin(), turn.tokens.end());
  history.insert(history.end(), observation.begin(), observation.end());
  Runner runner(*model);
  const Rows rows = runner.whole(history);
  const float* logits = rows.values.data() + (rows.count() - 1) * rows.width + model->config().hidden;
  const std::int32_t expected = sample(logits, model->config().vocab, p, static_cast<std::uint64_t>(first));
  ASSERT_FALSE(next.tokens.empty());
  EXPECT_EQ(next.tokens.front(), expected);
  EXPECT_EQ(next.logprobs.front(), model::token_logprob(logits, model->config().vocab, expected));
}

TEST_P(EngineTest, ASequenceGoesOnInAnotherEngineFromEveryCut) {
  const Tokens prompt = random_tokens(20, 3);
  const auto p = params(5, 12);
  const Sampled whole = alone(prompt, p);
  const auto continued = [&](std::int64_t cut, std::int64_t before) {
    Tokens history = prompt;
    history.insert(history.end(), whole.tokens.begin(), whole.tokens.begin() + cut);
    auto q = p;
    q.sampled_before = before;
    return alone(history, q);
  };
  for (std::int64_t cut = 1; cut < 12; ++cut) {
    const Sampled rest{{whole.tokens.begin() + cut, whole.tokens.end()},
                       {whole.logprobs.begin() + cut, whole.logprobs.end()}};
    EXPECT_EQ(continued(cut, cut), rest) << cut;
  }
  EXPECT_NE(continued(6, 5).tokens, continued(6, 6).tokens) << "the draws' numbers are part of what it says";
}

TEST_P(EngineTest, LengthsEndASequence) {
  const auto max_context = model->config().max_context;
  const auto p = params(1, 1000);
  Engine engine(*model, solo_team());
  const SequenceId id = engine.add(random_tokens(max_context - 5, 3), std::span(&p, 1)).front();
  EXPECT_EQ(drain(engine)[id].tokens.size(), 5U);
  EXPECT_EQ(engine.status(id), Status::length);
  EXPECT_FALSE(engine.has_work());
  EXPECT_TRUE(engine.step().empty());
  // A turn that stops on its last allowed token cannot be continued.
  const Tokens prompt = random_tokens(10, 3);
  const auto q = params(5, 1, {alone(prompt, params(5, 1)).tokens.front()});
  const SequenceId last = engine.add(prompt, std::span(&q, 1)).front();
  EXPECT_EQ(drain(engine)[last].tokens.size(), 1U);
  EXPECT_EQ(engine.status(last), Status::stopped);
  engine.append(last, prompt);
  EXPECT_EQ(engine.status(last), Status::length);
  EXPECT_FALSE(engine.has_work());
}

TEST_P(EngineTest, BadRequestsAreRefusedAndChangeNothing) {
  const auto p = params(1, 4);
  const std::span one(&p, 1);
  Engine engine(*model, solo_team());
  const Tokens prompt = random_tokens(10, 3);
  const auto vocab = model->config().vocab;
  expect_refused(ErrorCode::invalid_argument, "empty", [&] { engine.add({}, one); });
  expect_refused(ErrorCode::invalid_argument, "token -1", [&] { engine.add(Tokens{3, -1}, one); });
  expect_refused(ErrorCode::invalid_argument, std::to_string(vocab), [&] { engine.add(Tokens{vocab}, one); });
  expect_refused(ErrorCode::invalid_argument, "context",
                 [&] { engine.add(random_tokens(model->config().max_context, 3), one); });
  const std::pair<const char*, std::function<void(SamplingParams&)>> bad[] = {
      {"temperature", [](SamplingParams& s) { s.temperature = -0.1F; }},
      {"temperature", [](SamplingParams& s) { s.temperature = std::numeric_limits<float>::quiet_NaN(); }},
      {"top_p", [](SamplingParams& s) { s.top_p = 0; }},
      {"top_p", [](SamplingParams& s) { s.top_p = 1.5F; }},
      {"top_k", [](SamplingParams& s) { s.top_k = -1; }},
      {"max_tokens", [](SamplingParams& s) { s.max_tokens = 0; }},
      {"sampled_before", [](SamplingParams& s) { s.sampled_before = -1; }},
      {"sampled_before", [](SamplingParams& s) { s.sampled_before = s.max_tokens; }},
      {"sampled_before", [](SamplingParams& s) { s.max_tokens = 20, s.sampled_before = 10; }}};
  for (const auto& [name, spoil] : bad) {
    std::vector<SamplingParams> group = {p, p};
    spoil(group[1]);
    expect_refused(ErrorCode::invalid_argument, name, [&] { engine.add(prompt, group); });
  }
  EXPECT_FALSE(engine.has_work()) << "a refused request left a sequence behind";
  const SequenceId id = engine.add(prompt, one).front();
  expect_refused(ErrorCode::invalid_argument, "not at a stop", [&] { engine.append(id, prompt); });
  EXPECT_EQ(drain(engine)[id], alone(prompt, p));
  const SequenceId stopping = engine.add(prompt, std::vector{params(1, 4, {alone(prompt, p).tokens[0]})}).front();
  drain(engine);
  expect_refused(ErrorCode::invalid_argument, "nothing to append", [&] { engine.append(stopping, {}); });
  expect_refused(ErrorCode::invalid_argument, "vocabulary", [&] { engine.append(stopping, Tokens{vocab}); });
  EXPECT_EQ(engine.status(stopping), Status::stopped);
  expect_refused(ErrorCode::not_found, "99", [&] { engine.remove(99); });
}

// Even tokens only, and every token it is told of.
class Even final : public TokenConstraint {
 public:
  explicit Even(std::int64_t vocab) : mask_(static_cast<std::size_t>((vocab + 31) / 32), 0x55555555U) {}
  std::span<const std::uint32_t> allowed() override { return mask_; }
  void accept(std::int32_t token) override { told.push_back(token); }
  Tokens told;

 private:
  std::vector<std::uint32_t> mask_;
};

TEST_P(EngineTest, AConstraintHoldsItsSequenceAlone) {
  const Tokens prompt = random_tokens(20, 4);
  const Sampled free = alone(prompt, params(1, 30));
  const auto even = std::make_shared<Even>(model->config().vocab);
  std::vector<SamplingParams> both{params(1, 30), params(2, 30)};
  both[1].constraint = even;
  Engine engine(*model, solo_team(), {.step_tokens = 8});
  const auto ids = engine.add(prompt, both);
  auto said = drain(engine);
  EXPECT_EQ(said[ids[0]], free);
  ASSERT_EQ(said[ids[1]].tokens.size(), 30U);
  for (const auto token : said[ids[1]].tokens) EXPECT_EQ(token % 2, 0);
  EXPECT_EQ(even->told, said[ids[1]].tokens);
  EXPECT_TRUE(std::any_of(free.tokens.begin(), free.tokens.end(), [](auto token) { return token % 2 == 1; }));
  // Log-probabilities are the model's own: those of the same tokens, given.
  Tokens whole = prompt;
  whole.insert(whole.end(), even->told.begin(), even->told.end() - 1);
  const SamplingParams next = params(9, 1);
  SamplingParams forced = next;
  forced.top_logprobs = static_cast<int>(model->config().vocab);
  Engine again(*model, solo_team());
  again.add(whole, std::span(&forced, 1));
  std::vector<Event> events;
  while (events.empty()) events = again.step();
  const auto found = std::find_if(events[0].top.begin(), events[0].top.end(),
                                  [&](const TokenLogprob& t) { return t.token == even->told.back(); });
  ASSERT_NE(found, events[0].top.end());
  EXPECT_EQ(found->logprob, said[ids[1]].logprobs.back());
}

TEST_P(EngineTest, RemovedSequencesGiveTheirMemoryBack) {
  const auto p = params(1, 4);
  Engine engine(*model, solo_team());
  const Tokens prompt = random_tokens(100, 3);
  Sampled first;
  std::size_t bytes = 0;
  for (int round = 0; round < 4; ++round) {
    const SequenceId id = engine.add(prompt, std::span(&p, 1)).front();
    const Sampled now = drain(engine)[id];
    engine.remove(id);
    if (round == 0) {
      first = now;
      bytes = engine.state_bytes();
    }
    EXPECT_EQ(now, first) << "memory that was used before changed a result";
    EXPECT_EQ(engine.state_bytes(), bytes);
  }
}

TEST_P(EngineTest, AnAdapterOfAnotherModelIsRefused) {
  const auto other = make_small_model(small_config(GetParam()));  // of the same shape: only the object differs
  const std::shared_ptr<const model::Adapter> foreign = make_adapter(*other, random_adapter(*other, 3, 0.1F, 5));
  const Tokens prompt = random_tokens(5, 3);
  const auto p = params(1, 4);
  Engine engine(*model, solo_team());
  expect_refused(ErrorCode::invalid_argument, "another model", [&] { engine.add(prompt, std::span(&p, 1), foreign); });
  EXPECT_FALSE(engine.has_work());
}

TEST_P(EngineTest, AdaptersStayWithTheirSequences) {
  const std::shared_ptr<const model::Adapter> a = make_adapter(*model, random_adapter(*model, 3, 0.1F, 5));
  const Tokens prompt = random_tokens(40, 3);
  const auto p = params(1, 10);
  Engine engine(*model, solo_team(), {.step_tokens = 30});
  const SequenceId with = engine.add(prompt, std::span(&p, 1), a).front(),
                   without = engine.add(prompt, std::span(&p, 1)).front();
  auto sampled = drain(engine);
  EXPECT_EQ(sampled[with], alone(prompt, p, a));
  EXPECT_EQ(sampled[without], alone(prompt, p));
  EXPECT_NE(sampled[with], sampled[without]) << "the adapter must matter";
}

}  // namespace engine_test
}  // namespace tidelock::engine
