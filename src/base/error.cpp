#include "base/error.hpp"

#include <cerrno>
#include <cstring>

namespace tidelock {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::not_supported:
    case ErrorCode::not_found:
      return 2;
    case ErrorCode::mismatch:
      return 3;
    case ErrorCode::corrupt_data:
    case ErrorCode::io:
    case ErrorCode::exhausted:
    case ErrorCode::internal:
      return 1;
  }
  return 1;
}

void fail_errno(const std::string& what, const std::string& path) {
  const int error = errno;
  const bool full = error == ENOSPC || error == EDQUOT;
  const ErrorCode code = error == ENOENT ? ErrorCode::not_found : full ? ErrorCode::exhausted : ErrorCode::io;
  fail(code, "{} {}: {}", what, path, std::strerror(error));
}

}  // namespace tidelock
