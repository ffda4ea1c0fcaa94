// Running a prompt on an engine that keeps states, and on one that knows nothing.
#pragma once

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

  std::int64_t cached = 0;  // of the last run
};

}  // namespace tidelock::engine::testing
