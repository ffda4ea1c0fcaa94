// The trainer sees the face that the rollout saw: over several updates of an adapter, every sampled token's
// log-probability is the trainer's, bit for bit. A changed adapter must be caught by the same comparison.
#include <algorithm>
#include <map>

#include "engine/engine.hpp"
#include "model/small_model.hpp"
#include "train/train.hpp"

namespace tidelock::engine {
namespace mismatch_test {

using namespace model::testing;
using Tokens = std::vector<std::int32_t>;

// A finished sequence as the trainer gets it: tokens, which of them were sampled, and what the rollout said of those.
struct Rollout {
  Tokens tokens;
  std::vector<std::uint8_t> mask;
  std::vector<float> logprobs;
};

struct Comparison {
  std::int64_t compared = 0, mismatched = 0;
};
Comparison compare(std::span<const Rollout> rollouts, const std::vector<std::vector<float>>& trainer) {
  Comparison out;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    EXPECT_EQ(rollouts[i].logprobs.size(), trainer[i].size());
    for (std::size_t t = 0; t < trainer[i].size(); ++t, ++out.compared)
      if (std::memcmp(&rollouts[i].logprobs[t], &trainer[i][t], sizeof(float)) != 0) ++out.mismatched;
  }
  return out;
}

std::vector<train::TrainSequence> for_training(std::span<const Rollout> rollouts, const model::Adapter* adapter) {
  std::vector<train::TrainSequence> out;
  for (const Rollout& r : rollouts) out.push_back({r.tokens, r.mask, adapter});
  return out;
}

class Mismatch : public ::testing::TestWithParam<Variant> {
 protected:
  std::unique_ptr<model::Model> model = make_small_model(small_config(GetParam()));

  // Two groups of four, in turns: after a stop token an observation of the environment follows, which is not sampled.
  std::vector<Rollout> roll_out(std::uint64_t version, const std::shared_ptr<const model::Adapter>& adapter,
                                int threads) {
    Team team(threads);
    Engine engine(*model, team, {.step_tokens = 50});
    std::map<SequenceId, Rollout> rollouts;
    for (std::uint64_t group = 0; group < 2; ++group) {
      std::vector<SamplingParams> params(4);
      for (std::size_t i = 0; i < params.size(); ++i) {
        params[i].seed = mix_seed(version, 10 * group + i);
        params[i].temperature =
            0.5F + 0.3F * static_cast<float>(i);  // the log-probability is that of the whole distribution
        params[i].top_p = i == 1 ? 0.8F : 1.0F;
        params[i].top_k = i == 2 ? 5 : 0;
        params[i].max_tokens = 30;
        params[i].stop_tokens = {3, 14, 15, 9, 26};
      }
      const Tokens prompt = random_tokens(25 + static_cast<std::int64_t>(group) * 14, 100 * version + group);
      for (const SequenceId id : engine.add(prompt, params, adapter))
        rollouts[id] = {prompt, std::vector<std::uint8_t>(prompt.size(), 0), {}};
    }
    while (engine.has_work()) {
      const auto events = engine.step();
      for (const Event& e : events) {
        Rollout& r = rollouts[e.sequence];
        r.tokens.push_back(e.token);
        r.mask.push_back(1);
        r.logprobs.push_back(e.logprob);
      }
      for (const Event& e : events) {
        if (e.status != Status::stopped || rollouts[e.sequence].tokens.size() > 100) continue;
        const Tokens observation = random_tokens(9, static_cast<std::uint64_t>(e.token) + version);
        engine.append(e.sequence, observation);
        if (engine.status(e.sequence) != Status::prefill) continue;
        Rollout& r = rollouts[e.sequence];
        r.tokens.insert(r.tokens.end(), observation.begin(), observation.end());
        r.mask.resize(r.tokens.size(), 0);
      }
    }
    std::vector<Rollout> out;
    for (auto& [id, r] : rollouts) {
      EXPECT_EQ(engine.tokens(id), r.tokens);
      out.push_back(std::move(r));
    }
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Family, Mismatch, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

TEST_P(Mismatch, TrainerEqualsRolloutOverUpdates) {
  Team team(2);
  train::GradientWorker worker(*model, team);
  train::LoraParameters lora(*model, 3, 6, {"all-linear"});
  lora.initialize(1);
  train::AdamW optimizer(lora.values().size());
  std::shared_ptr<const model::Adapter> previous;
  std::int64_t compared = 0;
  for (std::uint64_t version = 0; version < 3; ++version) {
    const std::shared_ptr<const model::Adapter> adapter = make_adapter(*model, lora.adapter_values());
    const auto rollouts = roll_out(version, adapter, version % 2 == 0 ? 1 : 3);
    train::GradientOptions options;
    options.micro_batch_tokens = version == 1 ? 1 : 120;
    options.tape = version == 2 ? model::TapeMode::recompute : model::TapeMode::full;
    const auto sequences = for_training(rollouts, adapter.get());
    const Comparison scored = compare(rollouts, worker.score(sequences, options));
    EXPECT_EQ(scored.mismatched, 0) << "version " << version;
    compared += scored.compared;

    std::vector<float> gradient(lora.values().size());
    const auto loss = [](std::size_t s, std::span<const float> logprobs, std::span<float> d) {
      double sum = 0;
      for (std::size_t i = 0; i < d.size(); ++i) {
        d[i] = s % 2 == 0 ? -0.1F : 0.1F;
        sum += static_cast<double>(d[i]) * static_cast<double>(logprobs[i]);
      }
      return sum;
    };
    const auto result = worker.run(
        sequences, loss, options, [&](std::span<float> flat) { return lora.gradients(flat); }, gradient);
    EXPECT_EQ(compare(rollouts, result.logprobs).mismatched, 0) << "the pass with a tape, version " << version;

    // Twins: the wrong adapter - none, or the last version's - is another model, and is seen on nearly every token.
    if (previous != nullptr) {
      const auto stale = compare(rollouts, worker.score(for_training(rollouts, previous.get()), options));
      EXPECT_GT(stale.mismatched, stale.compared / 2) << "version " << version;
      const auto none = compare(rollouts, worker.score(for_training(rollouts, nullptr), options));
      EXPECT_GT(none.mismatched, none.compared / 2) << "version " << version;
    }
    previous = adapter;
    optimizer.step(lora.values(), gradient, train::clip_scale(train::gradient_norm(gradient), 1),
                   {.learning_rate = 0.02F});
  }
  EXPECT_GT(compared, 200);
}

TEST_P(Mismatch, OneChangedTokenIsCaught) {
  const std::shared_ptr<const model::Adapter> adapter = make_adapter(*model, random_adapter(*model, 2, 0.05F, 5));
  auto rollouts = roll_out(9, adapter, 1);
  train::GradientWorker worker(*model, solo_team());
  EXPECT_EQ(compare(rollouts, worker.score(for_training(rollouts, adapter.get()), {})).mismatched, 0);
  // What tokenising the text again could do: one prompt token differs.
  rollouts[0].tokens[2] = (rollouts[0].tokens[2] + 1) % model->config().vocab;
  const auto changed = compare(rollouts, worker.score(for_training(rollouts, adapter.get()), {}));
  EXPECT_GT(changed.mismatched, 0);
  EXPECT_LE(changed.mismatched, static_cast<std::int64_t>(rollouts[0].logprobs.size()))
      << "other sequences must not notice";
}

}  // namespace mismatch_test
}  // namespace tidelock::engine
