#include "serve/admission.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tidelock::serve {

std::optional<std::size_t> next_to_admit(std::span<const WaitingRequest> waiting,
                                         const std::function<Room(std::size_t)>& room) {
  std::vector<std::size_t> order(waiting.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return waiting[i].priority; });
  std::optional<std::size_t> first;  // that has no room
  for (const std::size_t i : order) {
    if (first && waiting[i].prompt >= waiting[*first].prompt) continue;
    const Room found = room(i);
    if (found == Room::enough) return i;
    if (found == Room::capped || first) continue;
    first = i;
    if (waiting[i].passed >= kMostPasses) return std::nullopt;
  }
  return std::nullopt;
}

double expected_first_token(std::int64_t tokens, const std::array<std::int64_t, engine::kPromptClasses>& ahead,
                            double tokens_per_second) {
  if (std::ranges::all_of(ahead, [](std::int64_t n) { return n == 0; })) return 0;
  return engine::seconds_to_first_token(tokens, ahead, tokens_per_second);
}

}  // namespace tidelock::serve
