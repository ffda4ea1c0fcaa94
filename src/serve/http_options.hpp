// What every HTTP server here can be told.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace tidelock::serve {

struct HttpOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 8000;  // 0: any free one
  int http_threads = 2;
  int connections = 512;                         // open at once; more are turned away (503)
  std::uint64_t body_bytes = 16 << 20;           // of a request (413)
  std::uint32_t header_bytes = 16 << 10;         // of a request (431)
  std::chrono::milliseconds patience{30'000};    // for a whole header, a whole body, and each write
  std::chrono::milliseconds idle{75'000};        // between two requests of a connection
  std::function<void(std::uint16_t)> listening;  // called once with the port; may be empty
};

}  // namespace tidelock::serve
