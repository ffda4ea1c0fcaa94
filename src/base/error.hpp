// Errors: one type across all rooms.
//
// A message names the file, tensor, field or request concerned, what was found and what was expected; `remedy` says
// what the user can do. Thrown across rooms; hot loops are noexcept and cannot fail.
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace tidelock {

enum class ErrorCode {
  invalid_argument,  // the caller's input is wrong: a flag, a recipe key, a request, a shape
  corrupt_data,      // a file or message does not hold what its format requires
  not_supported,     // valid, but this build does not do it
  not_found,
  io,         // the operating system refused: the message carries the path and errno text
  exhausted,  // out of memory, disk, process or time budget
  mismatch,   // two things that must agree by bits do not
  internal,   // a fault of ours
};

// Process exit code of the command line for an error: 2 for the caller's input, 3 for a mismatch, 1 for everything
// else.
int exit_code(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, std::string remedy = {})
      : std::runtime_error(message), code_(code), remedy_(std::move(remedy)) {}
  ErrorCode code() const { return code_; }
  const std::string& remedy() const { return remedy_; }

 private:
  ErrorCode code_;
  std::string remedy_;
};

// Throws `Error{code}` with a formatted message.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error naming what was attempted, the path and the text of errno: exhausted for a full disk, not_found for what
// is not there, io for everything else.
[[noreturn]] void fail_errno(const std::string& what, const std::string& path);

}  // namespace tidelock
