// `tidelock sandbox shell`: a terminal inside a sandbox, at the terminal that this program was started from.
#pragma once

#include <string>
#include <vector>

#include "sandbox/sandbox.hpp"

namespace tidelock::cli {

// Runs `command` with a terminal of its own until it ends, and returns its exit code; 128 + the signal when one ended
// this program, which then ends the command. The terminal here is as before whatever happens. Throws
// Error{invalid_argument} when standard input and output are not a terminal, Error{io} when the sandbox goes away.
int run_shell(sandbox::Sandbox& box, const std::vector<std::string>& command, bool root, const std::string& directory);

}  // namespace tidelock::cli
