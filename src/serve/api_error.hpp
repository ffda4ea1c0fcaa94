// Errors in OpenAI's form. Private to serve/.
#pragma once

#include <stdexcept>
#include <string>

#include "base/error.hpp"

namespace tidelock::serve {

// What a client is told: {"error": {"message", "type", "param", "code"}} under an HTTP status.
class ApiError : public std::runtime_error {
 public:
  ApiError(int status, std::string code, const std::string& message, std::string param = {})
      : std::runtime_error(message), status_(status), code_(std::move(code)), param_(std::move(param)) {}
  int status() const { return status_; }
  const std::string& code() const { return code_; }    // "unsupported_parameter", "model_not_found", ...
  const std::string& param() const { return param_; }  // the field concerned; empty: none
  int retry_after = 1;                                 // seconds, with status 429
  std::string json() const;

 private:
  int status_;
  std::string code_, param_;
};

// An Error of another room as a client is told of it: its own fault (400) with the message, ours (500) without details
// of the machine. `param` as above.
ApiError to_api_error(const Error& error, const std::string& param = {});

}  // namespace tidelock::serve
