// Decides again what a file of events (event_log.hpp) says was decided.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tidelock::serve {

struct EventReplay {
  std::map<std::string, std::int64_t> events;  // by name
  std::int64_t decided = 0;                    // of them, decided again with the same result
  std::vector<std::string> different;          // the others: "line N: ...", the first hundred
  std::int64_t differences = 0;
};

// Throws Error{corrupt_data} naming the line of what is no event; a torn last line is left out. Error{not_found, io}.
EventReplay replay_events(const std::filesystem::path& file);

}  // namespace tidelock::serve
