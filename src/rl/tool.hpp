// The one tool of the built-in agent: a shell in the episode's sandbox.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "model/chat.hpp"
#include "rl/task.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::rl {

// function `shell` with one string parameter `command`.
model::ToolSpec shell_tool();

struct ToolResult {
  std::string text;        // the observation shown to the model
  bool malformed = false;  // the arguments were not {"command": string}; nothing ran, `text` says so
  bool timed_out = false;
  int exit_code = 0;
  double seconds = 0;  // wall time inside the sandbox
};

// Runs `sh -c COMMAND` in the episode's directory. `text` is standard output, then standard error, each without its
// final newline and cut to `limit` bytes (at a UTF-8 boundary) with a note; then `exit N` when N is not 0, or a
// time-out note. Bytes that are not UTF-8 become U+FFFD. The text depends on what the command did, never on how long it
// took.
ToolResult run_shell_tool(sandbox::Sandbox& sandbox, const Episode& episode, std::string_view arguments_json,
                          std::uint64_t limit = 2048);

// The observation for a finished command; pure.
std::string observation_text(const sandbox::ExecResult& result, std::chrono::milliseconds timeout, std::uint64_t limit);

// {"command": COMMAND} as the model writes it.
std::string shell_arguments(std::string_view command);

}  // namespace tidelock::rl
