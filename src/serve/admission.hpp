// Which waiting request starts next: a pure decision. Private to serve/.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>

#include "engine/schedule.hpp"

namespace tidelock::serve {

struct WaitingRequest {
  engine::PromptClass prompt = engine::PromptClass::brief;
  int priority = 0;         // the lower one first
  int passed = 0;           // times that a later one went before it
  std::int64_t tokens = 0;  // of the prompt, that have to be computed
};

// By priority, then in the given order, in which they came. While the first of them does not fit, one of a smaller
// class that does may pass it - kMostPasses times, so that it does not wait for ever. An index, or none.
inline constexpr int kMostPasses = 16;
std::optional<std::size_t> next_to_admit(std::span<const WaitingRequest> waiting,
                                         const std::function<bool(std::size_t)>& fits);

}  // namespace tidelock::serve
