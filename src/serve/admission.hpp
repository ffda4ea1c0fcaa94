// Which waiting request starts next: a pure decision. Private to serve/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "engine/engine.hpp"
#include "engine/schedule.hpp"

namespace tidelock::serve {

struct WaitingRequest {
  engine::PromptClass prompt = engine::PromptClass::brief;
  int priority = 0;         // the lower one first
  int passed = 0;           // times that a later one went before it
  std::int64_t tokens = 0;  // of the prompt, that have to be computed
};

// By priority, then in the given order, in which they came. Those that their class's cap holds back are as if they were
// not there. While the first of the others has no room, one of a smaller class that has may pass it - kMostPasses
// times, so that it does not wait for ever. An index, or none.
using Room = engine::Engine::Room;
inline constexpr int kMostPasses = 16;
std::optional<std::size_t> next_to_admit(std::span<const WaitingRequest> waiting,
                                         const std::function<Room(std::size_t)>& room);

// Seconds until the first token of a prompt with so many tokens to compute, behind all that is `ahead` of it, by class.
// 0 where nothing is: to ask again would not help.
double expected_first_token(std::int64_t tokens, const std::array<std::int64_t, engine::kPromptClasses>& ahead,
                            double tokens_per_second);

}  // namespace tidelock::serve
