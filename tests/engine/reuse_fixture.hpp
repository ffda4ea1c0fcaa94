// Running a prompt on an engine that keeps states, and on one that knows nothing.
#pragma once

#include "base/random.hpp"
#include "engine/engine.hpp"
#include "engine/support.hpp"
#include "model/small_model.hpp"

namespace tidelock::engine::testing {

using Adapter = std::shared_ptr<const model::Adapter>;

class Reuse : public ::testing::TestWithParam<model::testing::Variant> {
 protected:
  std::unique_ptr<model::Model> model =
      model::testing::make_small_model(model::testing::small_config(GetParam()), 7, false);
  const EngineOptions reusing{.step_tokens = 50, .reuse = true};

  Sampled run(Engine& engine, const Tokens& prompt, const SamplingParams& p, const Adapter& adapter = nullptr,
              const std::string& salt = {}) {
    const SequenceId id = engine.add(prompt, std::span(&p, 1), adapter, salt).front();
    cached = engine.cached_tokens(id);
    Sampled sampled = drain(engine)[id];
    engine.remove(id);
    return sampled;
  }
  Sampled cold(const Tokens& prompt, const SamplingParams& p, const Adapter& adapter = nullptr) {
    Engine engine(*model, solo_team());
    const SequenceId id = engine.add(prompt, std::span(&p, 1), adapter).front();
    return drain(engine)[id];
  }
  std::size_t bytes_for(std::int64_t tokens, std::int64_t sequences) const {
    const model::StateLayout layout(model->config());
    return static_cast<std::size_t>(sequences) *
           ((static_cast<std::size_t>(model::StateLayout::blocks_for(tokens)) + 1) * layout.block_bytes() +
            layout.recurrent_bytes());
  }

  // Requests that start alike, come in at any time and leave at any time, some before their end. Every whole one must
  // say what a cold engine says, and the engine must stay below its limit after each step.
  void run_traffic(Engine& engine, Random& random, std::size_t limit, std::uint64_t seed) {
    struct Request {
      Tokens prompt;
      SamplingParams params;
      SequenceId id;
    };
    using model::testing::random_tokens;
    std::vector<Request> running;
    Random hints(seed + 1000);  // of its own: what comes and goes is the same with hints as without
    std::map<SequenceId, Sampled> sampled;
    int left = 14;
    for (int steps = 0; left > 0 || !running.empty(); ++steps) {
      ASSERT_LT(steps, 4000000) << "the engine does not come to an end";  // steps are many where it waits for a disk
      if (left > 0 && random.below(3) == 0) {
        Tokens prompt = random_tokens(static_cast<std::int64_t>(random.below(110)), random.below(3));
        const Tokens rest = random_tokens(1 + random.below(30), 100 + random.below(5));
        prompt.insert(prompt.end(), rest.begin(), rest.end());
        const SamplingParams p = params(random.below(3), 1 + random.below(30));
        if (hints.below(2) == 0) engine.prefetch(prompt, nullptr, "");
        running.push_back({prompt, p, engine.add(prompt, std::span(&p, 1)).front()});
        --left;
      }
      for (const Event& e : engine.step()) {
        sampled[e.sequence].tokens.push_back(e.token);
        sampled[e.sequence].logprobs.push_back(e.logprob);
      }
      EXPECT_LE(engine.state_bytes_used(), limit) << "step " << steps << ", seed " << seed;
      std::erase_if(running, [&](const Request& r) {
        const bool ended = engine.status(r.id) == Status::length;
        if (!ended && random.below(60) != 0) return false;
        if (ended) {
          EXPECT_EQ(sampled[r.id], cold(r.prompt, r.params)) << "seed " << seed;
        }
        engine.remove(r.id);
        return true;
      });
    }
  }

  std::int64_t cached = 0;  // of the last run
};

}  // namespace tidelock::engine::testing
