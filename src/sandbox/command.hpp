// What a command is given in every runtime. Private to sandbox/.
#pragma once

#include <string>
#include <vector>

#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox {

// Throws Error{invalid_argument} saying that `what` holds a zero byte.
void need_no_zero_byte(const std::string& text, const char* what);

// As one word of a shell, whatever stands in it.
std::string shell_word(const std::string& text);

// "NAME=VALUE", sorted by name: the request's variables, and the defaults of a sandbox where it names none. Throws
// Error{invalid_argument} for names that are empty or hold '=', and for zero bytes.
std::vector<std::string> environment_of(const std::string& sandbox_id, const ExecRequest& request);

}  // namespace tidelock::sandbox
