// What an API answers, whole. Private to serve/.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tidelock::serve {

// GCC 12 copies an aggregate that is made inside a co_await expression byte by byte and destroys it twice: what is
// passed to a coroutine has a name.
struct Reply {
  int status = 200;
  std::string body;
  const char* type = "application/json";
  std::string allow = {};                                         // of 405
  std::vector<std::pair<std::string, std::string>> headers = {};  // further ones
  int retry_after = 1;                                            // seconds, of 429
};

}  // namespace tidelock::serve
