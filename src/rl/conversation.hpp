// Demonstrations as token sequences: what supervised training of a small model learns from.
#pragma once

#include <cstdint>
#include <vector>

#include "model/chat.hpp"
#include "rl/task.hpp"

namespace tidelock::rl {

struct Conversation {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> mask;  // 1 on what the assistant says
};

// The chat options that rollouts, demonstrations and evaluation share.
model::ChatOptions agent_chat(bool thinking);

// The prompt of an episode, with the generation prompt.
std::vector<std::int32_t> episode_prompt(const model::Tokenizer& tokenizer, const Episode& episode, bool thinking);

// Exactly the tokens that a rollout would hold had the model sampled these turns.
Conversation demonstration(const model::Tokenizer& tokenizer, const Episode& episode,
                           const std::vector<DemoTurn>& turns, bool thinking);

}  // namespace tidelock::rl
