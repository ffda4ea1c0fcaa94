// The control plane: sandboxes made, found, changed and ended. Private to serve/e2b.
#pragma once

#include "serve/e2b/envd.hpp"
#include "serve/e2b/sandboxes.hpp"

namespace tidelock::serve::e2b {

// Answers one request. Throws ApiError, Error. Waits for the runtime.
Reply answer_control(Sandboxes& sandboxes, const Request& request);

// The bodies of its requests, checked. Throw ApiError: {400} for what is wrong, code unsupported_parameter for what is
// valid and not built here.
NewSandbox parse_new_sandbox(const std::string& body, bool second_version);

}  // namespace tidelock::serve::e2b
