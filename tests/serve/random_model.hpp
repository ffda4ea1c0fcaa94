// A model with random logits, in both chat protocols: whatever a model would say.
#pragma once

#include <gtest/gtest.h>

#include "model/toolcall.hpp"
#include "serve/support.hpp"
#include "serve/text_stream.hpp"

namespace tidelock::serve::testing {

inline constexpr std::int64_t kMostTokens = 3000;

inline bool is_allowed(std::span<const std::uint32_t> allowed, std::int32_t token) {
  return allowed.empty() || (allowed[static_cast<std::size_t>(token) / 32] >> (token % 32) & 1U) != 0;
}

inline bool is_whole(std::string_view bytes) {
  Utf8Stream stream;
  return stream.feed(bytes) == bytes;
}

// What a model with random logits says under the constraint (null: without one), up to the end of its turn. With
// `whole` it says no token that is a part of a character.
inline model::AssistantTurn say(const RequestContext& context, engine::TokenConstraint* constraint, bool thinking,
                                std::uint64_t seed, bool whole = false) {
  const std::int32_t end = model::end_of_turn(context.tokenizer);
  std::vector<std::int32_t> said;
  std::vector<float> logits(static_cast<std::size_t>(context.vocab));
  engine::SamplingParams params;
  params.seed = seed;
  for (std::uint64_t step = 0; step < kMostTokens && (said.empty() || said.back() != end); ++step) {
    for (std::size_t i = 0; i < logits.size(); ++i)
      logits[i] = 4.0F * static_cast<float>(philox(seed, step, i)[0]) * 0x1.0p-32F;
    // A model that would rather stop, so that reasoning, strings and lists end.
    for (std::int32_t token = 0; token < context.tokenizer.vocab_size(); ++token)
      if (context.tokenizer.is_special(token) ||
          std::string_view("\"}]").find(context.tokenizer.token_bytes(token)) != std::string_view::npos)
        logits[static_cast<std::size_t>(token)] += 4;
    for (std::int32_t token = 0; whole && token < context.tokenizer.vocab_size(); ++token)
      if (!is_whole(context.tokenizer.token_bytes(token))) logits[static_cast<std::size_t>(token)] = -1e9F;
    const auto allowed = constraint != nullptr ? constraint->allowed() : std::span<const std::uint32_t>{};
    const std::int32_t token = engine::sample(logits.data(), context.vocab, params, step, allowed);
    EXPECT_TRUE(is_allowed(allowed, token));
    if (constraint != nullptr) constraint->accept(token);
    said.push_back(token);
  }
  return model::parse_assistant(context.tokenizer, said, thinking);
}

struct Protocol {
  const char* name;
  const RequestContext& context;
  bool thinking;
};
inline const std::vector<Protocol>& protocols() {
  static const std::vector<Protocol> all{{"k3", k3_context(), false},
                                         {"k3 thinking", k3_context(), true},
                                         {"k2", k2_context(false), false},
                                         {"k2 thinking", k2_context(true), true},
                                         {"k2 not thinking", k2_context(true), false}};
  return all;
}

}  // namespace tidelock::serve::testing
