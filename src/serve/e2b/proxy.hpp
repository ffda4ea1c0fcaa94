// What becomes of a request and an answer on their way to and from a port of a sandbox. Pure. Private to serve/e2b.
// Include from .cpp files only.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "serve/http.hpp"

namespace tidelock::serve::e2b {

// One request a connection: the next one of a client may be for another sandbox, which the guest's server must not get.
struct ProxyHead {
  std::string text;      // what is sent on
  bool upgrade = false;  // from here on bytes alone: WebSocket
  bool chunked = false;  // of a request: its body is
};
// Leaves out what is meant for this server: tokens, keys, the headers that routed it.
ProxyHead forward_request(const HttpRequest& header);

// A guest's answer from its start. Nothing while its head is not whole; an interim answer (1xx) is passed over.
struct ProxyAnswer {
  ProxyHead head;
  std::size_t used = 0;  // bytes of the answer; the body follows as it is
};
constexpr std::size_t kMaxAnswerHead = 64U << 10;
// Throws ApiError{502} for what is not HTTP, or has a longer head.
std::optional<ProxyAnswer> forward_answer(std::string_view bytes, bool upgrade_asked);

}  // namespace tidelock::serve::e2b
