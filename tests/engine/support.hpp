// What the engine's tests share: running an engine to its end, and comparing what was sampled by bits.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <vector>

#include "engine/engine.hpp"

namespace tidelock::engine::testing {

using Tokens = std::vector<std::int32_t>;

struct Sampled {
  Tokens tokens;
  std::vector<float> logprobs;
  friend bool operator==(const Sampled& a, const Sampled& b) {
    return a.tokens == b.tokens && a.logprobs.size() == b.logprobs.size() &&
           std::memcmp(a.logprobs.data(), b.logprobs.data(), a.logprobs.size() * sizeof(float)) == 0;
  }
};

// Steps until nothing can go on; what was sampled, by sequence.
inline std::map<SequenceId, Sampled> drain(Engine& engine) {
  std::map<SequenceId, Sampled> out;
  for (int steps = 0; engine.has_work(); ++steps) {
    if (steps == 2000) {
      ADD_FAILURE() << "the engine does not come to an end";
      break;
    }
    for (const Event& e : engine.step()) {
      out[e.sequence].tokens.push_back(e.token);
      out[e.sequence].logprobs.push_back(e.logprob);
      EXPECT_EQ(engine.tokens(e.sequence).back(), e.token);
    }
  }
  return out;
}

inline SamplingParams params(std::uint64_t seed, std::int64_t max_tokens, Tokens stop = {}) {
  SamplingParams p;
  p.seed = seed;
  p.max_tokens = max_tokens;
  p.stop_tokens = std::move(stop);
  return p;
}

}  // namespace tidelock::engine::testing
